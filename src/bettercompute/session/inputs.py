"""Inputs of both ends of a session, as frozen values: what a shell tells `gateway_side.step` and `daemon_side.step`.

The two `step` functions are pure: what happened goes in, what must be done (`session.effects`) comes out. The shells
(`gateway/`, `daemon/`) turn the world into inputs and obey effects; they decide nothing. `now_ms` of a step is always
the shell's monotonic clock; where a rule needs another time, the input carries it under its own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bettercompute.delivery.commands import CommandState, OutgoingCommand
from bettercompute.delivery.desired_state import StoredSpec
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Status
from bettercompute.session.authority import Authority
from bettercompute.session.hello_plan import HeldCommand
from bettercompute.session.refusals import Relayed

# The gateway's side


@dataclass(frozen=True, slots=True)
class FrameReceived:
    """A decoded frame after Hello. The shell has refused what does not decode (`FrameRefused`)."""

    frame: messages.AgentFrame


@dataclass(frozen=True, slots=True)
class FrameRefused:
    """The next message was no frame: too large, truncated or undecodable."""

    message: str


@dataclass(frozen=True, slots=True)
class CommandsMarked:
    """The dispatch transaction committed: these rows are dispatched (or re-sent) in this session's epoch. In seq order.

    Given only after the commit, with every command whose mark committed; what is above the credits is held.
    """

    commands: tuple[OutgoingCommand, ...]
    settled: tuple[str, ...] = ()
    """Held ones that were asked for and are not in flight any more."""


@dataclass(frozen=True, slots=True)
class FactsCommitted:
    """Facts of this session are durable: what the daemon may now forget."""

    command_ids: tuple[str, ...] = ()
    """Commands with a terminal fact in the batch, also those that were late, unknown or another node's."""
    journal_id: str = ""
    acked_event_seq: int = 0
    """The row's ack after the commit; 0: the batch held no events of this session."""


@dataclass(frozen=True, slots=True)
class FactsFailed:
    """A batch with facts of this session did not commit, for a passing reason: the daemon must send them again."""

    message: str


@dataclass(frozen=True, slots=True)
class FactsPoisoned:
    """Bisecting a batch that failed, of facts or of put-backs, found this session's frame guilty."""

    message: str


@dataclass(frozen=True, slots=True)
class PutBackCommitted:
    """A command refused BUSY is pending again (or cancelled): dispatch may pick it once its `not_before` has passed."""

    command_id: str


@dataclass(frozen=True, slots=True)
class BackOffOver:
    """The back-off of a refused command is over that stayed in flight, because the node had accepted it before."""

    command: HeldCommand


@dataclass(frozen=True, slots=True)
class MarksFound:
    """What is marked for this session by its rows, read after a dispatch transaction whose outcome was not heard."""

    commands: tuple[HeldCommand, ...]


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """Somebody asked for the cancellation of a command in flight on this node; the row says so already."""

    command_id: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SpecPublished:
    """The node's spec has a newer generation, or the one asked for by `RequestSpec` has been read."""

    spec: StoredSpec
    requested: bool = False
    """True as the answer to `RequestSpec`: sent even when this session was offered the generation before."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. The liveness loop gives it, every half interval or 5 s."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """A newer session of this node committed its Hello on this gateway."""


@dataclass(frozen=True, slots=True)
class ZombieFound:
    """The flush, or a fenced write, matched no row: a newer session lives elsewhere."""


@dataclass(frozen=True, slots=True)
class Revoked:
    """The certificate of this session is revoked: by the feed, by quarantine or by an operator."""

    notice: messages.RevocationNotice


@dataclass(frozen=True, slots=True)
class Locked:
    """An operator has locked the node: what `standing.refuse_locked` says of it."""

    message: str
    pushback_ms: int


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The gateway is fenced: nothing of this session may be written any more, not even its end."""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """The gateway drains, or evens out: tell the daemon to reconnect after this long (spread by the shell)."""

    reconnect_after_ms: int
    reason: str = "draining"


@dataclass(frozen=True, slots=True)
class SlowConsumer:
    """The outbound queue passed its bound."""

    queued_bytes: int


@dataclass(frozen=True, slots=True)
class GatewayStopping:
    """The process ends in order."""


@dataclass(frozen=True, slots=True)
class PeerEnded:
    """The daemon ended the stream, or the connection was lost."""

    message: str = ""


@dataclass(frozen=True, slots=True)
class SecretAnswered:
    """The broker's answer to an `AskSecret`."""

    response: messages.SecretResponse


@dataclass(frozen=True, slots=True)
class WorkloadTokenAnswered:
    """The issuer's answer to an `AskWorkloadToken`."""

    response: messages.WorkloadTokenResponse


@dataclass(frozen=True, slots=True)
class TunnelRequested:
    """A verified ticket for this node: ask the daemon to open a Tunnel stream."""

    tunnel_id: str
    ticket: str


EndingInput = (
    Superseded
    | ZombieFound
    | LeaseLost
    | Revoked
    | Locked
    | FactsFailed
    | FactsPoisoned
    | SlowConsumer
    | GatewayStopping
    | PeerEnded
)
"""Those that end the session; `closing.CLOSINGS` says how."""

GatewayInput = (
    EndingInput
    | FrameReceived
    | FrameRefused
    | CommandsMarked
    | FactsCommitted
    | PutBackCommitted
    | BackOffOver
    | MarksFound
    | CancelRequested
    | SpecPublished
    | Tick
    | DrainRequested
    | SecretAnswered
    | WorkloadTokenAnswered
    | TunnelRequested
)


# The daemon's side


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialed:
    """The Session stream is open: time to say Hello. Dice and ids have been reseeded for this dial."""

    fresh_nonce: bytes
    """16 bytes from the kernel, used only when the last Welcome was applied; else the stored pair is repeated."""
    serving_not_before_ms: int | None = None
    serving_not_after_ms: int | None = None
    """Validity of the serving leaf that TLS showed; None where the transport has none (in memory)."""


@dataclass(frozen=True, slots=True)
class ServerFrameReceived:
    """A decoded frame of the gateway, with the host's wall clock at its arrival."""

    frame: messages.ServerFrame
    wall_ms: int


@dataclass(frozen=True, slots=True)
class JournalRefused:
    """The journal had no room for the `AcceptCommand` of a step: none of that step was obeyed."""

    command_id: str


@dataclass(frozen=True, slots=True)
class HandlerProgressed:
    """News of a running command; at most one in 500 ms and command, the shell sees to that."""

    command_id: str
    progress: messages.CommandProgress | None = None
    output: messages.CommandOutput | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerFinished:
    """A command ended and its processes have been reaped, to the last one."""

    command_id: str
    state: CommandState
    """SUCCEEDED, FAILED or CANCELLED."""
    result: bytes = b""
    reason: str = ""
    message: str = ""
    signature: messages.Signature | None = None


Hashes = Mapping[str, bytes]
"""SHA-256 by inventory section."""


@dataclass(frozen=True, slots=True)
class InventoryCollected:
    """The inventory as it now is. The bodies stay with the shell."""

    hashes: Hashes


@dataclass(frozen=True, slots=True)
class EventsJournaled:
    """Events are durable up to this seq."""

    last_event_seq: int


@dataclass(frozen=True, slots=True)
class EventsSent:
    """A batch asked for by `SendEvents` has been queued, up to this seq, on the session that asked for it."""

    session_id: str
    last_seq: int


@dataclass(frozen=True, slots=True)
class StatusChanged:
    """The status as it should now be reported; the newest one is also sent after each Welcome."""

    report: messages.StatusReport


@dataclass(frozen=True, slots=True)
class SpecHeld:
    """What of the desired state is read and applied."""

    observed_generation: int
    applied_generation: int
    spec_sha256: bytes


@dataclass(frozen=True, slots=True)
class TrustHeld:
    """The trust bundle in force, at start and after an `ApplyTrust`, and whom it lets command."""

    trust_version: int
    authority: Authority


@dataclass(frozen=True, slots=True)
class RelayRefused:
    """The shell refused something that the gateway relayed: a bundle, a spec, an answer, a frame."""

    what: Relayed
    reason: str


@dataclass(frozen=True, slots=True)
class JournalRoom:
    """The journal became full, or has room again."""

    full: bool


@dataclass(frozen=True, slots=True)
class JournalRenewed:
    """The journal has taken a new id (`TakeNewJournalId`); kept events were numbered anew."""

    journal_id: str
    last_event_seq: int


@dataclass(frozen=True, slots=True)
class DaemonTick:
    """Time passed (`daemon_side.next_tick_ms` says when the next one is due), with the host's load and what was
    heard.
    """

    wall_ms: int
    load: messages.NodeLoad
    last_heard_ms: int
    """When the connection last gave a sign of life (any frame or an answered PING), on the monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnded:
    """The stream ended, or the dial failed.

    `status` None: no gRPC status came (connection lost, TLS, name resolution).
    """

    drawn: float
    """A number drawn evenly from [0, 1)."""
    status: Status | None = None
    reason: str = ""
    """The `x-bc-reason` trailer; empty: none."""
    pushback_ms: int | None = None
    """The parsed `grpc-retry-pushback-ms`; None: missing, malformed or negative."""
    message: str = ""


DaemonInput = (
    Dialed
    | ServerFrameReceived
    | JournalRefused
    | HandlerProgressed
    | HandlerFinished
    | InventoryCollected
    | EventsJournaled
    | EventsSent
    | StatusChanged
    | SpecHeld
    | TrustHeld
    | RelayRefused
    | JournalRoom
    | JournalRenewed
    | DaemonTick
    | StreamEnded
)
