"""Inputs and effects of both ends of a session, as frozen values. The order in which they are obeyed is part of the
type.

`gateway_side.step` and `daemon_side.step` are pure: what happened goes in, what must be done comes out. The shells
(`gateway/`, `daemon/`) turn the world into inputs and obey effects; they decide nothing. `now_ms` is always the
shell's monotonic clock; where a rule needs another time, the input carries it under its own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from bettercompute.delivery.commands import CommandState, OutgoingCommand
from bettercompute.delivery.desired_state import StoredSpec
from bettercompute.delivery.facts import Fact
from bettercompute.delivery.journal_rules import JournalEntry
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Status

# --- The gateway's side: inputs


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

    The shell gives it only after the commit, and gives every command whose mark committed, also when more were marked
    than credits are left now: the rest is held.
    """

    commands: tuple[OutgoingCommand, ...]


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
    """Bisecting a batch that failed found this session's frame guilty."""

    message: str


@dataclass(frozen=True, slots=True)
class PutBackCommitted:
    """A command refused BUSY is pending again (or cancelled): dispatch may pick it once its `not_before` has passed."""

    command_id: str


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
class LeaseLost:
    """The gateway is fenced: nothing of this session may be written any more, not even its end."""


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """The gateway drains, or hands over sessions to others: tell the daemon to reconnect after this long (spread by
    the shell).
    """

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


GatewayInput = (
    FrameReceived
    | FrameRefused
    | CommandsMarked
    | FactsCommitted
    | FactsFailed
    | FactsPoisoned
    | PutBackCommitted
    | CancelRequested
    | SpecPublished
    | Tick
    | Superseded
    | ZombieFound
    | Revoked
    | LeaseLost
    | DrainRequested
    | SlowConsumer
    | GatewayStopping
    | PeerEnded
    | SecretAnswered
    | WorkloadTokenAnswered
    | TunnelRequested
)

# --- The gateway's side: effects


@dataclass(frozen=True, slots=True)
class SendFrame:
    """Queue a frame on the stream."""

    frame: messages.ServerFrame


@dataclass(frozen=True, slots=True)
class RecordFacts:
    """Add facts to the group commit. The shell answers `FactsCommitted`, `FactsFailed` or `FactsPoisoned`."""

    facts: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class PutBack:
    """A fenced write: the command was refused BUSY. Pending again with `not_before` = compute_now() + back-off, epoch
    cleared.

    It matches only a row in flight with this epoch, session and attempt; with a cancel requested the row becomes
    cancelled. The shell answers `PutBackCommitted`, also when no row matched.
    """

    command_id: str
    attempt: int
    back_off_ms: int


@dataclass(frozen=True, slots=True)
class PokeDispatch:
    """Credits, or commands held back, may let something go: ask `gateway_side.wants()` in the next dispatch
    transaction.
    """


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """Read the node's spec and give it as `SpecPublished(requested=True)`; a node without one gives nothing."""


@dataclass(frozen=True, slots=True)
class AskSecret:
    """Relay to the broker, outside the frame queue."""

    request: messages.SecretRequest


@dataclass(frozen=True, slots=True)
class AskWorkloadToken:
    """Relay to the token issuer, outside the frame queue."""

    request: messages.WorkloadTokenRequest


@dataclass(frozen=True, slots=True)
class Close:
    """End the stream after what is queued, with this status. Always the last effect; the session takes no input after
    it.

    With `disconnect_write` the epoch-fenced disconnect follows (`reason` goes into node.disconnected), after the
    facts this session has queued have committed or failed; without it the row belongs to somebody else and is left
    alone.
    """

    status: Status
    reason: str
    message: str
    disconnect_write: bool
    pushback_ms: int | None = None


GatewayEffect = SendFrame | RecordFacts | PutBack | PokeDispatch | RequestSpec | AskSecret | AskWorkloadToken | Close
"""Obeyed in order.

Commit before ack: no effect acknowledges a fact; an Ack frame comes only out of `FactsCommitted`.
"""

# --- The daemon's side: inputs


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


@dataclass(frozen=True, slots=True)
class InventoryCollected:
    """The inventory as it now is: hash by section. The bodies stay with the shell."""

    hashes: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class EventsJournaled:
    """Events are durable up to this seq."""

    last_event_seq: int


@dataclass(frozen=True, slots=True)
class EventsSent:
    """A batch asked for by `SendEvents` has been queued, up to this seq."""

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
    """The trust bundle and approver set in force after an `ApplyTrust`."""

    trust_version: int
    approver_set_epoch: int
    approver_set_sha256: bytes


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
    | JournalRoom
    | JournalRenewed
    | DaemonTick
    | StreamEnded
)

# --- The daemon's side: effects. First those on the journal.


@dataclass(frozen=True, slots=True)
class AcceptCommand:
    """Keep a delivered command. The one write that a full journal refuses: the shell then gives `JournalRefused`."""

    entry: JournalEntry
    command: bytes
    """The delivered `Command`, serialized."""


@dataclass(frozen=True, slots=True)
class TakeUpCommand:
    """A redelivery of a command that an earlier process left unfinished: it belongs to this process now."""

    command_id: str
    attempt: int
    process_id: str
    command: bytes


@dataclass(frozen=True, slots=True)
class StartCommand:
    """The effect is about to begin: with boot, role and version, which the proofs of self-terminating kinds compare."""

    command_id: str
    boot_id: str
    role: int
    daemon_version: str


@dataclass(frozen=True, slots=True)
class FinishCommand:
    """The terminal update, before it is sent, with the stored mark of now (ids are kept 24 h from here)."""

    command_id: str
    state: CommandState
    update: bytes
    """The terminal `CommandUpdate`, serialized."""
    done_mark_ms: int


@dataclass(frozen=True, slots=True)
class AckCommands:
    """The gateway has committed these results."""

    command_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ForgetCommands:
    """These ids, done or cancelled, have been kept long enough."""

    command_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RememberCancelled:
    """A cancel came for an unknown id: its late delivery will be refused."""

    command_id: str
    mark_ms: int


@dataclass(frozen=True, slots=True)
class AckEvents:
    """Events up to this seq are stored by the control plane and may be forgotten."""

    seq: int


@dataclass(frozen=True, slots=True)
class StoreNonces:
    """The pair of continuity nonces, before the Hello that carries it."""

    hello_nonce: bytes
    previous_hello_nonce: bytes


@dataclass(frozen=True, slots=True)
class StoreEpoch:
    """The epoch of the Welcome that was applied: the next Hello's `last_epoch`."""

    last_epoch: int


@dataclass(frozen=True, slots=True)
class StoreTime:
    """The server time mark and the confirmed time it is bounded by; the shell keeps both in identity.json too."""

    mark_ms: int
    confirmed_ms: int | None


@dataclass(frozen=True, slots=True)
class TakeNewJournalId:
    """Draw a new journal id, keep all entries, number kept events anew and mark them recovered; then give
    `JournalRenewed`.
    """


JournalWrite = (
    AcceptCommand
    | TakeUpCommand
    | StartCommand
    | FinishCommand
    | AckCommands
    | ForgetCommands
    | RememberCancelled
    | AckEvents
    | StoreNonces
    | StoreEpoch
    | StoreTime
    | TakeNewJournalId
)

# --- The daemon's side: the other effects


@dataclass(frozen=True, slots=True)
class SendAgentFrame:
    """Queue a frame on the stream; dropped when the stream has ended."""

    frame: messages.AgentFrame


@dataclass(frozen=True, slots=True)
class SendEvents:
    """Read events from the journal, at most 500 or 512 KiB, queue them as one frame and give `EventsSent`."""

    journal_id: str
    after_seq: int
    through_seq: int


@dataclass(frozen=True, slots=True)
class SendInventory:
    """Queue these sections as frames, in this order. One not held is skipped."""

    sections: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StartHandler:
    """Run the command. It has been judged: kind, lane, role, deadline. The shell ends it after `body.timeout_ms`."""

    command_id: str
    attempt: int
    body: messages.CommandBody


@dataclass(frozen=True, slots=True)
class StopHandler:
    """Stop the command between actions; its `HandlerFinished` follows, cancelled or with its real outcome."""

    command_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class ApplyTrust:
    """Verify and take a trust bundle; then `TrustHeld`, or a condition when it does not verify."""

    bundle: messages.SignedTrustBundle


@dataclass(frozen=True, slots=True)
class ApplyDesired:
    """Judge (`delivery.desired_state`) and converge a desired state."""

    desired: messages.DesiredState


@dataclass(frozen=True, slots=True)
class OpenTunnel:
    """Verify the ticket and open a Tunnel stream on this session's connection."""

    request: messages.OpenTunnel


@dataclass(frozen=True, slots=True)
class DeliverSecret:
    """Hand an answer to whoever waits for its request id; an answer to nothing is dropped."""

    response: messages.SecretResponse


@dataclass(frozen=True, slots=True)
class DeliverWorkloadToken:
    """Hand an answer to whoever waits for its request id; an answer to nothing is dropped."""

    response: messages.WorkloadTokenResponse


@dataclass(frozen=True, slots=True)
class SetCondition:
    """Raise or clear a condition of the node; the shell puts it into the next status report."""

    type: str
    holds: bool
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Warn:
    """Say it in the daemon's own log, in words: who refused what, and the cure."""

    reason: str
    message: str


class Redial(StrEnum):
    """How the next attempt reaches a gateway."""

    SAME_CONNECTION = "same-connection"
    """Keep the connection: a short refusal that only asks to wait."""
    NEW_CONNECTION = "new-connection"
    """Close it and dial anew, another url or address first."""


@dataclass(frozen=True, slots=True)
class EndSession:
    """End the stream from this side. `StreamEnded` follows from the shell as for any other end."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class WaitThenDial:
    """Wait exactly this long, then open the next Session stream, telling `x-bc-attempt`."""

    delay_ms: int
    redial: Redial
    attempt: int
    """The bucket's refusals since the last Welcome: the `x-bc-attempt` header of the next stream."""


DaemonEffect = (
    JournalWrite
    | SendAgentFrame
    | SendEvents
    | SendInventory
    | StartHandler
    | StopHandler
    | ApplyTrust
    | ApplyDesired
    | OpenTunnel
    | DeliverSecret
    | DeliverWorkloadToken
    | SetCondition
    | Warn
    | EndSession
    | WaitThenDial
)
"""Persist before send: a step's journal writes come first and are one transaction, fsynced before anything else of
the step.

The rest follows in order. Steps are obeyed in the order in which they were taken; the writes of several steps may
share a transaction. When the journal refuses a step's `AcceptCommand`, nothing of that step is obeyed and
`JournalRefused` is the next input.
"""
