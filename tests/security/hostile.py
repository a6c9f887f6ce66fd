"""A site whose relay lies: the production rules of a node, an honest gateway's, and everything that may lie between.

`Site` is the control plane in memory of the session tests with signed intent. A test may open a *hostile* stream on it:
frames that no honest gateway sends are relayed to the same node, with the same journal, and afterwards an honest
gateway takes over. What a relay may alter is not listed by hand: `altered` walks a message's descriptor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from bettercompute.pki import certificates, intent
from bettercompute.pki.certificates import DAY_MS, Authority
from bettercompute.pki.intent import IntentSigner
from bettercompute.pki.trust import CommandRoot
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import KINDS, pack_payload
from bettercompute.protocol.validation import validate_for_store
from bettercompute.session import authority, daemon_side, effects, inputs
from bettercompute.session.daemon_state import DaemonSession, Phase
from tests.unit.session.world_in_memory import NODE_ID, START_MS, World

TRUST_DOMAIN = "bc.local"
HOUR_MS = 3_600_000


def worker(root: Authority, *, serial: int = 1, lifetime_ms: int = 30 * DAY_MS, at_ms: int = START_MS) -> IntentSigner:
    """Return a worker that `root` certified."""
    key = certificates.generate_key()
    leaf = certificates.make_worker_leaf(
        root, public_key=key.public_key(), serial=bytes(15) + bytes([serial]), now_ms=at_ms, lifetime_ms=lifetime_ms
    )
    return intent.make_signer(key=key, leaf=leaf, root=root.certificate, now_ms=at_ms)


ROOT = certificates.make_command_root(serial=bytes(16), now_ms=START_MS - DAY_MS)
SIGNER = worker(ROOT)
FOREIGN_ROOT = certificates.make_command_root(serial=bytes(16), now_ms=START_MS - DAY_MS)
FOREIGN_SIGNER = worker(FOREIGN_ROOT)
NARROW_ROOT = certificates.make_command_root(serial=bytes(16), now_ms=START_MS - DAY_MS)
NARROW_SIGNER = worker(NARROW_ROOT)
ROOTS = (
    CommandRoot(certificate=ROOT.certificate),
    CommandRoot(certificate=NARROW_ROOT.certificate, allowed_kinds=("logs.collect",)),
)
AUTHORITY = authority.Authority(command_roots=ROOTS)


def body_of(command_id: str, kind: str = "gpu.reset", **changes: object) -> messages.CommandBody:
    """Return a body with every field set, so that each has something to alter."""
    known = KINDS.get(kind, KINDS["gpu.reset"])
    fields: dict[str, object] = {
        "command_id": command_id,
        "node_id": NODE_ID,
        "kind": kind,
        "lane": known.lane,
        "payload": pack_payload(known.payload()),
        "not_before_ms": START_MS - 1_000,
        "not_after_ms": START_MS + DAY_MS,
        "timeout_ms": 60_000,
        "seq": 1,
        "issued_at_ms": START_MS,
        "workflow_id": "w",
        "step_id": "s",
        "allocation_id": "a",
        "trust_domain": TRUST_DOMAIN,
        "issued_by": "somebody",
    }
    return messages.CommandBody(**{**fields, **changes})  # type: ignore[arg-type]  # test data


def signed(body: messages.CommandBody | bytes, signer: IntentSigner | None = SIGNER) -> messages.Command:
    """Return a body as an honest gateway relays it; unsigned without a signer."""
    data = body if isinstance(body, bytes) else body.SerializeToString()
    command = messages.Command(body=data, attempt=1)
    if signer is not None:
        command.signature.MergeFromString(signer.sign_command(data))
    return command


class Site(World):
    """The world with signed intent, and what a hostile relay can do in it."""

    def __init__(self) -> None:
        self.started: list[bytes] = []
        """The bodies that the node began to run, in order."""
        self.started_at_ms: list[int] = []
        self.signed_bodies: set[bytes] = set()
        self.wall_skew_ms = 0
        """How far the host's own clock is off."""
        self.lost_ms = 0
        """Time that the node cannot know of, at most: it passed between its last durable mark and a restart."""
        super().__init__()
        self.journal.mark_ms = START_MS

    def _boot_daemon(self) -> DaemonSession:
        self.processes += 1
        journal = self.journal
        known_ms = max(journal.confirmed_ms or START_MS, journal.mark_ms)
        # Of several restarts the largest gap: none adds to it, for each process counts on from what the last one knew.
        self.lost_ms = max(self.lost_ms, START_MS + self.now_ms - known_ms)
        self.daemon, first = daemon_side.start(
            daemon_side.DaemonFacts(
                node_id=NODE_ID,
                role=messages.AGENT_ROLE_NODE,
                boot_id=self.boot_id,
                process_id=f"p-{self.processes}",
                daemon_version="0.1.0",
                proto_min=1,
                proto_max=1,
                trust_domain=TRUST_DOMAIN,
            ),
            daemon_side.Advertised(),
            daemon_side.JournalFacts(
                **{
                    name: getattr(journal, name)
                    for name in (
                        *("journal_id", "last_epoch", "last_event_seq", "acked_event_seq", "hello_nonce"),
                        *("previous_hello_nonce", "mark_ms", "confirmed_ms", "full"),
                    )
                },
                entries=dict(journal.entries),
                cancelled=dict(journal.cancelled),
            ),
            authority=AUTHORITY,
            now_ms=self.now_ms,
        )
        self._obey_daemon(first)
        self.tell_daemon(inputs.StatusChanged(messages.StatusReport()))
        return self.daemon

    def enqueue(self, kind: str = "inventory.refresh", *, not_after_ms: int = DAY_MS) -> str:
        """Insert a pending command whose body is a signed one's."""
        command_id = super().enqueue(kind, not_after_ms=not_after_ms)
        row = self.rows[command_id]
        body = messages.CommandBody.FromString(row.body)
        body.trust_domain, body.issued_at_ms = TRUST_DOMAIN, START_MS + self.now_ms
        row.body = body.SerializeToString()
        self.signed_bodies.add(row.body)
        return command_id

    def command_of(self, command_id: str) -> messages.Command:
        """Return a stored command as the relay reads it: with its signature."""
        return signed(self.rows[command_id].body)

    def tell_daemon(self, given: inputs.DaemonInput) -> None:
        """Step the daemon under the host's own clock, and obey."""
        if isinstance(given, inputs.ServerFrameReceived | inputs.DaemonTick):
            given = replace(given, wall_ms=given.wall_ms + self.wall_skew_ms)
        super().tell_daemon(given)

    def _obey_gateway(self, done: tuple[effects.GatewayEffect, ...]) -> None:
        super()._obey_gateway(done)
        for frame in self.down:
            if frame.WhichOneof("frame") == "command" and not frame.command.HasField("signature"):
                frame.command.signature.MergeFromString(SIGNER.sign_command(frame.command.body))

    def _do(self, effect: effects.DaemonEffect) -> None:
        if isinstance(effect, effects.StartHandler):
            self.started.append(effect.body.SerializeToString())
            self.started_at_ms.append(START_MS + self.now_ms)
        super()._do(effect)

    def _welcomed(self) -> bool:
        self.dial()
        validate_for_store(self.up[0])
        self.settle()
        return self.live

    # The hostile relay

    def hostile_stream(self, **lies: object) -> None:
        """Let the node dial the hostile gateway, which says Welcome with these lies."""
        self.cut()
        self.dial()
        self.up.clear()
        self.relay(welcome=lying_welcome(**{"server_time_ms": START_MS + self.now_ms, **lies}))

    def relay(self, **frame: Any) -> list[messages.AgentFrame]:
        """Deliver one frame of the hostile gateway; return what the node answered."""
        before = len(self.up)
        server = messages.ServerFrame(**frame)
        self.tell_daemon(inputs.ServerFrameReceived(server, wall_ms=START_MS + self.now_ms))
        return list(self.up)[before:]

    @property
    def live(self) -> bool:
        """Say whether the node is on a stream that it obeys."""
        return self.daemon.phase is Phase.LIVE

    def refused(self, what: str) -> dict[str, int]:
        """Return how often the node refused something of a kind, by reason."""
        return {reason: count for (kind, reason), count in self.daemon.refused.items() if kind == what}

    def honest_again(self, *, within_ms: int = 0) -> None:
        """Let an honest gateway take over, and everything come to rest. Its rules judge what the node says.

        It may take two Hellos: a Welcome that no database knows uses up a nonce, so the honest gateway takes the
        journal for that of a restored disk and has the node give it a new id. `within_ms`: how long its time may
        have to pass the mark that a lie has moved.
        """
        self.cut()
        waited_ms = 0
        while not self._welcomed() and not self._welcomed() and waited_ms < within_ms:
            self.now_ms += 5 * 60_000
            waited_ms += 5 * 60_000
        assert self.live, f"the node is {self.daemon.phase} after {waited_ms} ms: {self.warnings[-3:]}"


def lying_welcome(**lies: object) -> messages.Welcome:
    """Return a Welcome as an honest gateway would say it, but for the lies."""
    fields: dict[str, object] = {
        "session_id": "hostile",
        "epoch": 5,
        "protocol_version": 1,
        "heartbeat_interval_ms": 10_000,
        "lane_credits": [
            messages.LaneCredits(lane=messages.LANE_CONTROL, credits=8),
            messages.LaneCredits(lane=messages.LANE_BULK, credits=2),
        ],
        "gateway_id": "hostile",
        "gateway_capabilities": ["update-batch"],
    }
    return messages.Welcome(**{**fields, **lies})  # type: ignore[arg-type]  # test data


# What a relay may alter


@dataclass(frozen=True)
class Alteration:
    """One field of a message in another form than it was signed in."""

    name: str
    data: bytes


def altered(message: messages.ProtoMessage, *, path: str = "") -> Iterator[Alteration]:
    """Yield a message once for each way to alter one of its fields, submessages too: other values, and without it."""
    for field in message.DESCRIPTOR.fields:
        for how, change in _changes(field, message):
            copy = type(message)()
            copy.CopyFrom(message)
            change(copy)
            data = copy.SerializeToString()
            if data != message.SerializeToString():
                yield Alteration(f"{path}{field.name} {how}", data)
        if field.message_type is not None and not field.is_repeated and message.HasField(field.name):
            for inner in altered(getattr(message, field.name), path=f"{field.name}."):
                copy = type(message)()
                copy.CopyFrom(message)
                getattr(copy, field.name).ParseFromString(inner.data)
                yield Alteration(f"{path}{inner.name}", copy.SerializeToString())


Change = Callable[[Any], None]


def _changes(field: Any, message: messages.ProtoMessage) -> Iterator[tuple[str, Change]]:
    name = field.name
    yield "removed", lambda copy: copy.ClearField(name)
    if field.is_repeated:
        yield "doubled", lambda copy: getattr(copy, name).MergeFrom(getattr(copy, name)[:])
        if len(getattr(message, name)) > 1:
            yield "reversed", lambda copy: _replace_all(copy, name, list(getattr(copy, name))[::-1])
        return
    for how, value in _other_values(field, getattr(message, name)):
        yield how, partial(_set, name=name, value=value)


def _set(copy: Any, *, name: str, value: Any) -> None:
    setattr(copy, name, value)


def _replace_all(copy: Any, name: str, values: list[Any]) -> None:
    copy.ClearField(name)
    getattr(copy, name).extend(values)


_INTEGERS = {
    FieldDescriptor.TYPE_INT64: (-1, 2**63 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_ENUM: (0, 2),
}


def _other_values(field: Any, value: Any) -> Iterator[tuple[str, Any]]:
    if field.type in _INTEGERS:
        low, high = _INTEGERS[field.type]
        yield from (("lowest", low), ("one more", value + 1), ("highest", high))
    elif field.type == FieldDescriptor.TYPE_STRING:
        yield from (("another", value + "x"), ("shorter", value[:-1]), ("upper case", value.upper()))
    elif field.type == FieldDescriptor.TYPE_BYTES:
        yield from (("longer", value + b"\0"), ("shorter", value[:-1]))
        if value:
            yield "a bit", bytes([value[0] ^ 1]) + value[1:]
    elif field.type == FieldDescriptor.TYPE_BOOL:
        yield "the other", not value
