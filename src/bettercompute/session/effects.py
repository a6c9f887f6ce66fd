"""Effects of both ends of a session, as frozen values. The order in which they are obeyed is part of the type.

`gateway_side.step` and `daemon_side.step` return a tuple of them for each input (`session.inputs`): `GatewayEffect` and
`DaemonEffect` say in which order a shell obeys it. Persist before send, commit before ack.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from bettercompute.delivery.commands import CommandState
from bettercompute.delivery.facts import Fact
from bettercompute.delivery.journal_rules import JournalEntry
from bettercompute.pki.quorum import Unbatched
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Status

# The gateway's side


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
    cancelled. One that is acked or running stays so, for no step goes back: the shell gives `BackOffOver` later. The
    shell answers `PutBackCommitted`, also when no row matched.
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


# The daemon's side: first the journal's writes


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
class CountUnbatched:
    """A destructive command is about to begin without an approval: the count that it is part of, before its start."""

    unbatched: Unbatched


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
    """The pair of continuity nonces: before the Hello that carries it, and when a Welcome for it was applied."""

    hello_nonce: bytes
    """Empty: used up, the next dial draws a fresh one."""
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
    | CountUnbatched
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

# The daemon's side: the other effects


@dataclass(frozen=True, slots=True)
class SendAgentFrame:
    """Queue a frame on the stream; dropped when the stream has ended."""

    frame: messages.AgentFrame


@dataclass(frozen=True, slots=True)
class SendEvents:
    """Read events from the journal, at most 500 or 512 KiB, queue them as one frame and give `EventsSent`."""

    session_id: str
    journal_id: str
    after_seq: int
    through_seq: int


@dataclass(frozen=True, slots=True)
class SendInventory:
    """Queue these sections as frames, in this order. One not held is skipped."""

    sections: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ResendResult:
    """Read the stored terminal update of a command that is done and acked, and queue it as a frame."""

    command_id: str


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
    | ResendResult
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
