"""How frames, rows and numbers are said in a transcript: short, in the words of docs/sessions.md, defaults left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from bettercompute.delivery import facts
from bettercompute.delivery.commands import CommandState
from bettercompute.protocol import messages
from bettercompute.protocol.versions import PROTOCOL_VERSION
from bettercompute.session import effects

START_MS = 1_800_000_000_000
"""Server time when a story begins: 2027-01-15 08:00:00 UTC."""
VERSION = "0.1.0"
HEARTBEAT_MS = 10_000
LANES = {int(messages.LANE_CONTROL): "control", int(messages.LANE_BULK): "bulk"}
EVENT_ID = "00000000-0000-7000-8000-"


def seconds(duration_ms: int) -> str:
    """Return a duration."""
    return f"{duration_ms / 1000:g} s"


def clock(server_ms: int) -> str:
    """Return a server time; the date only where it is not the story's first day."""
    moment = datetime.fromtimestamp(server_ms / 1000, UTC)
    digits = moment.strftime("%H:%M:%S") + (f".{moment.microsecond // 1000:03}" if moment.microsecond else "")
    first_day = datetime.fromtimestamp(START_MS / 1000, UTC).date()
    return digits if moment.date() == first_day else f"{moment:%Y-%m-%d} {digits}"


def nonce(name: str) -> bytes:
    """Return a nonce that can be read again."""
    return name.encode().ljust(16, b"\0")


def nonce_name(value: bytes) -> str:
    """Return the name of a nonce; none is `none`."""
    return value.rstrip(b"\0").decode() or "none"


def event_id(number: int) -> str:
    """Return the id of the story's n-th event."""
    return f"{EVENT_ID}{number:012}"


def event_name(identifier: str) -> str:
    """Return the short name of an event's id."""
    return f"e-{int(identifier.removeprefix(EVENT_ID))}"


def state_name(state: int) -> str:
    """Return a command's state."""
    return CommandState(state).name.lower()


def listed(names: Iterable[object]) -> str:
    """Return `a, b and c`."""
    texts = [str(name) for name in names]
    return " and ".join([", ".join(texts[:-1]), texts[-1]]) if len(texts) > 1 else "".join(texts)


def span(first: int, last: int) -> str:
    """Return a range of numbers."""
    return str(first) if first == last else f"{first} to {last}"


def events(first: int, last: int) -> str:
    """Return a range of events."""
    return f"event{'s' * (first != last)} {span(first, last)}"


# Frames


def agent_frame(frame: messages.AgentFrame) -> str:
    """Return what a daemon says."""
    match frame.WhichOneof("frame"):
        case "hello":
            return f"hello: {_hello(frame.hello)}"
        case "heartbeat":
            hashes = frame.heartbeat.inventory_hashes
            return f"heartbeat with the hashes of {listed(sorted(hashes))}" if hashes else "heartbeat"
        case "update":
            return update(frame.update)
        case "updates":
            return "; ".join(update(one) for one in frame.updates.updates)
        case "events":
            return _events(frame.events)
        case "inventory":
            return f"inventory section {frame.inventory.name}"
        case "status":
            return "status"
        case other:
            return str(other)


def _hello(said: messages.Hello) -> str:
    parts = [f"boot {said.boot_id}", f"journal {said.journal_id}", f"process {said.process_id}"]
    parts.append(f"last epoch {said.last_epoch}")
    parts.append(f"nonce {nonce_name(said.hello_nonce)} after {nonce_name(said.previous_hello_nonce)}")
    if said.daemon_version != VERSION:
        parts.append(f"version {said.daemon_version}")
    if (said.proto_min, said.proto_max) != (PROTOCOL_VERSION.min, PROTOCOL_VERSION.max):
        parts.append(f"protocol {span(said.proto_min, said.proto_max)}")
    if said.first_unacked_event_seq:
        parts.append(f"{events(said.first_unacked_event_seq, said.last_event_seq)} not acked")
    elif said.last_event_seq:
        parts.append(f"events up to {said.last_event_seq} acked")
    if said.running_command_ids:
        parts.append(f"running {listed(said.running_command_ids)}")
    if said.done_results:
        parts.append("results " + listed(update(result) for result in said.done_results))
    riding = {result.command_id for result in said.done_results}
    if set(said.done_ids) - riding:
        parts.append(f"also done {listed(sorted(set(said.done_ids) - riding))}")
    if said.applied_generation:
        parts.append(f"spec applied {said.applied_generation}")
    return ", ".join(parts)


def update(said: messages.CommandUpdate) -> str:
    """Return the news of one command."""
    if said.state == messages.COMMAND_STATE_REJECTED:
        reason = messages.CommandRejectReason.Name(said.reject_reason).removeprefix("COMMAND_REJECT_REASON_")
        return f"{said.command_id} rejected {reason} ({said.message})"
    return f"{said.command_id} {state_name(said.state)}" + (f" ({said.reason})" if said.reason else "")


def _events(batch: messages.EventBatch) -> str:
    numbers = [event.seq for event in batch.events]
    names = listed(event_name(event.event_id) for event in batch.events)
    recovered = ", recovered" if any(event.recovered for event in batch.events) else ""
    return f"{events(numbers[0], numbers[-1])} of {batch.journal_id} ({names}{recovered})"


def server_frame(frame: messages.ServerFrame) -> str:
    """Return what a gateway says."""
    match frame.WhichOneof("frame"):
        case "welcome":
            return f"welcome: {_welcome(frame.welcome)}"
        case "command":
            body = messages.CommandBody.FromString(frame.command.body)
            seen = f", seen {state_name(frame.command.seen)}" if frame.command.seen else ""
            return f"command {body.command_id} {body.kind}, attempt {frame.command.attempt}{seen}"
        case "cancel":
            return f"cancel {frame.cancel.command_id}" + (f" ({frame.cancel.reason})" if frame.cancel.reason else "")
        case "ack":
            return f"ack: {_ack(frame.ack)}"
        case "desired":
            desired = messages.DesiredStateBody.FromString(frame.desired.body)
            over = f", a patch over {desired.patch.base_generation}" if desired.HasField("patch") else ""
            return f"desired state of generation {desired.generation}{over}"
        case "drain":
            return f"drain: reconnect elsewhere in {seconds(frame.drain.reconnect_after_ms)}"
        case "revoked":
            return f"revocation ({frame.revoked.reason})"
        case other:
            return str(other)


def _welcome(said: messages.Welcome) -> str:
    parts = [f"session {said.session_id}", f"epoch {said.epoch}", f"server time {clock(said.server_time_ms)}"]
    parts.append("credits " + listed(f"{LANES[lane.lane]} {lane.credits}" for lane in said.lane_credits))
    if said.heartbeat_interval_ms != HEARTBEAT_MS:
        parts.append(f"heartbeat every {seconds(said.heartbeat_interval_ms)}")
    if said.acked_event_seq:
        parts.append(f"events acked up to {said.acked_event_seq}")
    if said.request_sections:
        parts.append(f"send inventory {listed(said.request_sections)}")
    if said.HasField("trust"):
        parts.append("with a newer trust bundle")
    if said.upgrade_required:
        parts.append("UPGRADE REQUIRED")
    if said.new_journal:
        parts.append("NEW JOURNAL")
    return ", ".join(parts)


def _ack(said: messages.Ack) -> str:
    parts = []
    if said.acked_event_seq:
        parts.append(f"events of {said.journal_id} up to {said.acked_event_seq}")
    if said.command_ids:
        parts.append(f"the end of {listed(said.command_ids)}")
    return ", ".join(parts)


def fact(reported: facts.Fact) -> str:
    """Return a fact as it goes into the store; the caller adds what became of it."""
    match reported:
        case facts.CommandFact():
            return f"{reported.command_id} {state_name(reported.state)}" + (
                f" ({reported.reason})" if reported.reason else ""
            )
        case facts.EventsFact():
            return f"{events(reported.events[0].seq, reported.last_seq)} of {reported.journal_id}"
        case facts.StatusFact():
            return "a status"
        case facts.InventoryFact():
            return f"inventory section {reported.section}"
        case facts.InventoryHashesFact():
            return "inventory hashes"
        case facts.AppliedGenerationFact():
            return f"generation {reported.applied_generation} applied"


# The journal's writes


def write(effect: effects.JournalWrite) -> str:
    """Return one of the writes that a daemon makes durable before it goes on."""
    match effect:
        case effects.AcceptCommand(entry, _):
            return f"{entry.command_id} accepted"
        case effects.TakeUpCommand(command_id, _, process_id, _):
            return f"{command_id} taken up by {process_id}"
        case effects.StartCommand(command_id, boot_id, _, _):
            return f"{command_id} started under {boot_id}"
        case effects.CountUnbatched(unbatched):
            return f"{len(unbatched.at_ms)} without an approval this hour"
        case effects.FinishCommand(command_id, state, body, _):
            reason = messages.CommandUpdate.FromString(body).reason
            return f"{command_id} {state_name(state)}" + (f" ({reason})" if reason else "")
        case effects.AckCommands(command_ids):
            return f"the end of {listed(command_ids)} is acked"
        case effects.ForgetCommands(command_ids):
            return f"{listed(command_ids)} forgotten"
        case effects.RememberCancelled(command_id, _):
            return f"{command_id} is never to run"
        case effects.AckEvents(seq):
            return f"events up to {seq} are acked"
        case effects.StoreNonces(hello_nonce, previous):
            if not hello_nonce:
                return f"nonce {nonce_name(previous)} used up"
            return f"nonce {nonce_name(hello_nonce)} after {nonce_name(previous)}"
        case effects.StoreEpoch(last_epoch):
            return f"epoch {last_epoch}"
        case effects.StoreTime(mark_ms, _):
            return f"mark {clock(mark_ms)}"
        case effects.TakeNewJournalId():
            return "a new journal id"


def attributes(values: Mapping[str, object]) -> str:
    """Return what a published event says: the flags that are up, the numbers, and whose boot it was."""
    shown = [f"epoch {values['epoch']}"] if "epoch" in values else []
    shown += [f"{name} {values[name]}" for name in ("previousBootId", "bootId", "alternations") if name in values]
    shown += [name for name, value in values.items() if value is True]
    if "reason" in values:
        shown.append(f"reason {values['reason']}")
    if "serials" in values:
        shown.append(f"serials {listed(values['serials'])}")  # type: ignore[arg-type]  # a list of names
    return ", ".join(shown)
