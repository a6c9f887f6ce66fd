"""What an approver is shown: everything from the bytes, and nothing where the story does not fit them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bettercompute.errors import Refused
from bettercompute.pki import quorum
from bettercompute.pki.review import OfferedCommand, Review, review
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import pack_payload
from bettercompute.protocol.statuses import Reason


def offered(node_id: str, *, kind: str = "node.reboot", delay_ms: int = 0, extra: bytes = b"") -> OfferedCommand:
    body = messages.CommandBody(
        command_id=f"c-{node_id}",
        node_id=node_id,
        kind=kind,
        timeout_ms=5_000,
        issued_at_ms=1_000,
        issued_by="ops",
        trust_domain="bc.local",
    )
    body.payload.CopyFrom(pack_payload(messages.NodeRebootPayload(delay_ms=delay_ms)))
    encoded = body.SerializeToString() + extra
    return OfferedCommand(command_id=body.command_id, node_id=node_id, kind=kind, body=encoded)


def packed(node_id: str, payload: bytes, *, inside: bytes = b"") -> OfferedCommand:
    made = offered(node_id)
    body = messages.CommandBody.FromString(made.body)
    body.payload.value = payload
    body.payload.MergeFromString(inside)
    return replace(made, body=body.SerializeToString())


UNKNOWN = b"\xa0\x1f\x01"


def root_of(commands: list[OfferedCommand]) -> bytes:
    return quorum.scope_root(
        [
            quorum.batch_leaf(command_id=one.command_id, node_id=one.node_id, kind=one.kind, body=one.body)
            for one in commands
        ]
    )


def reviewed(commands: list[OfferedCommand], *, scope_root: bytes | None = None) -> Review:
    return review(
        batch_id="b1",
        scope_root=root_of(commands) if scope_root is None else scope_root,
        not_after_ms=9_000,
        commands=commands,
    )


def test_everything_that_is_approved_is_said() -> None:
    found = reviewed([offered("n2"), offered("n1"), offered("n3", delay_ms=7)])
    assert (found.kind.name, found.node_ids, found.trust_domain) == ("node.reboot", ("n1", "n2", "n3"), "bc.local")
    assert [(payload.delay_ms, count) for payload, count in found.payloads] == [(0, 2), (7, 1)]  # type: ignore[attr-defined]
    assert (found.issued_by, found.issued_at_ms, found.timeout_ms) == (("ops",), 1_000, 5_000)
    assert (found.approval.scope_size, found.approval.not_after_ms, len(found.approval.signatures)) == (3, 9_000, 0)


TWO = [offered("n1"), offered("n2")]


@pytest.mark.parametrize(
    ("commands", "scope_root", "says"),
    [
        ([], b"", "no commands"),
        (TWO[:1], root_of(TWO), "not that of the commands"),
        ([TWO[1], TWO[0]], root_of(TWO), "not that of the commands"),
        ([replace(TWO[0], node_id="n9"), TWO[1]], root_of(TWO), "shown as another"),
        ([replace(TWO[0], kind="gpu.reset"), TWO[1]], root_of(TWO), "shown as another"),
        ([replace(TWO[0], body=b"\xff"), TWO[1]], root_of(TWO), "does not decode"),
        ([offered("n1", kind="node.melt")], None, "not known to this release"),
        ([offered("n1"), offered("n2", kind="gpu.reset")], None, "mixes kinds"),
        ([offered("n1", kind="gpu.reset")], None, "gpu.reset"),
        ([offered("n1", extra=UNKNOWN)], None, "more than this release can read"),
        ([packed("n1", UNKNOWN)], None, "more than this release can read"),
        ([packed("n1", b"", inside=UNKNOWN)], None, "more than this release can read"),
    ],
    ids=[
        "none",
        "fewer",
        "order",
        "node",
        "kind",
        "bytes",
        "unknown",
        "mixed",
        "payload",
        "field",
        "in payload",
        "around payload",
    ],
)
def test_what_does_not_fit_is_not_shown(commands: list[OfferedCommand], scope_root: bytes | None, says: str) -> None:
    with pytest.raises(Refused, match=says) as caught:
        reviewed(commands, scope_root=scope_root)
    assert caught.value.reason == Reason.BAD_PROOF
