"""What an approver is about to sign, in words, from the very bytes that the nodes will get.

The control plane says what a batch holds; its approvers must not have to believe it. Here the scope root is computed
from the bodies, every body is read as its node will read it, and whatever does not fit, or cannot be read by this
release, is refused instead of being shown in part. See docs/security.md, "Approvers"; decisions 0131.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from bettercompute.errors import Refused
from bettercompute.pki import quorum
from bettercompute.protocol import messages
from bettercompute.protocol.frames import says_more
from bettercompute.protocol.kinds import KINDS, CommandKind, unpack_payload
from bettercompute.protocol.statuses import Reason, refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedCommand:
    """One command as the API tells it."""

    command_id: str
    node_id: str
    kind: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """A batch that is what it says: all that its approver has to know."""

    approval: messages.BatchApproval
    """Without signatures: what is signed."""
    trust_domain: str
    kind: CommandKind
    node_ids: tuple[str, ...]
    payloads: tuple[tuple[messages.ProtoMessage, int], ...]
    """Each different payload, and how many commands have it; the most frequent first."""
    issued_by: tuple[str, ...]
    issued_at_ms: int
    """When the first of them was made."""
    not_before_ms: int
    """Before this none of them begins; 0: at once."""
    timeout_ms: int
    """How long the longest may run."""


def review(*, batch_id: str, scope_root: bytes, not_after_ms: int, commands: Sequence[OfferedCommand]) -> Review:
    """Return what the batch is; refuse BAD_PROOF one whose commands are not what its root stands for."""
    if not commands:
        raise _wrong(batch_id, "it has no commands")
    bodies = [_body(batch_id, command) for command in commands]
    leaves = [
        quorum.batch_leaf(command_id=body.command_id, node_id=body.node_id, kind=body.kind, body=command.body)
        for body, command in zip(bodies, commands, strict=True)
    ]
    if quorum.scope_root(leaves) != scope_root:
        raise _wrong(batch_id, "its scope root is not that of the commands that it is said to hold")
    if any(body.not_before_ms >= not_after_ms for body in bodies):
        raise _wrong(batch_id, "some of it may begin only when none of it may any more")
    kinds, domains = {body.kind for body in bodies}, {body.trust_domain for body in bodies}
    if len(kinds) != 1 or len(domains) != 1:
        raise _wrong(batch_id, f"it mixes kinds or trust domains: {', '.join(sorted(kinds | domains))}")
    kind = KINDS.get(kinds.pop())
    if kind is None:
        raise _wrong(batch_id, f"kind {bodies[0].kind} is not known to this release: approve it with a newer one")
    payloads = Counter(_payload_bytes(batch_id, kind, body) for body in bodies)
    return Review(
        approval=messages.BatchApproval(
            batch_id=batch_id, scope_root=scope_root, scope_size=len(commands), not_after_ms=not_after_ms
        ),
        trust_domain=domains.pop(),
        kind=kind,
        node_ids=tuple(sorted({body.node_id for body in bodies})),
        payloads=tuple((kind.payload.FromString(payload), count) for payload, count in payloads.most_common()),
        issued_by=tuple(sorted({body.issued_by for body in bodies})),
        issued_at_ms=min(body.issued_at_ms for body in bodies),
        not_before_ms=min(body.not_before_ms for body in bodies),
        timeout_ms=max(body.timeout_ms for body in bodies),
    )


def _body(batch_id: str, command: OfferedCommand) -> messages.CommandBody:
    try:
        body = messages.CommandBody.FromString(command.body)
    except DecodeError as error:
        raise _wrong(batch_id, f"the body of command {command.command_id} does not decode") from error
    if (body.command_id, body.node_id, body.kind) != (command.command_id, command.node_id, command.kind):
        raise _wrong(batch_id, f"command {command.command_id} is shown as another than its body is")
    if says_more(body):
        raise _wrong(batch_id, f"command {command.command_id} says more than this release can read: use a newer one")
    return body


def _payload_bytes(batch_id: str, kind: CommandKind, body: messages.CommandBody) -> bytes:
    try:
        payload = unpack_payload(kind, body)
    except Refused as refused:
        raise _wrong(batch_id, refused.message) from refused
    if says_more(payload):
        raise _wrong(batch_id, f"the payload of {kind.name} says more than this release can read: use a newer one")
    return payload.SerializeToString(deterministic=True)


def _wrong(batch_id: str, why: str) -> Refused:
    return refuse(Reason.BAD_PROOF, f"batch {batch_id} cannot be approved: {why}")
