"""The rows of the control plane that a story moves, and how they are shown."""

from __future__ import annotations

from dataclasses import dataclass, field

from bettercompute.delivery import commands as table
from bettercompute.delivery.commands import CommandState, OutgoingCommand
from bettercompute.delivery.desired_state import StoredSpec
from bettercompute.session.hello_plan import CommandInFlight, SessionRow
from bettercompute.session.liveness import Connectivity
from tests.stories import wording


def empty_session() -> SessionRow:
    """Return the row that Join inserts."""
    return SessionRow(
        gateway_id="",
        session_id="",
        session_epoch=0,
        boot_id="",
        recent_boots=(),
        journal_id="",
        hello_nonce=b"",
        role=0,
        daemon_version="",
        trust_version=0,
        acked_event_seq=0,
        heartbeat_interval_ms=wording.HEARTBEAT_MS,
        duplicate_hellos=0,
        duplicate_since_ms=None,
        last_seen_ms=None,
        disconnected_at_ms=None,
    )


@dataclass
class NodeRow:
    """A node that has joined: its row in nodes and the one in node_sessions."""

    node_id: str
    serial: str
    session: SessionRow = field(default_factory=empty_session)
    connectivity: Connectivity = Connectivity.DISCONNECTED
    generation: int = 1
    used: bool = False
    spec: StoredSpec | None = None
    conditions: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    sections: dict[str, bytes] = field(default_factory=dict)
    events: dict[tuple[str, int], str] = field(default_factory=dict)
    """Ids of the stored events, by journal and seq."""
    gaps: list[tuple[str, int, int]] = field(default_factory=list)

    def shown(self) -> list[str]:
        """Return what matters of the rows."""
        row = self.session
        held = f"gateway {row.gateway_id}, session {row.session_id}" if row.gateway_id else "no gateway"
        whose = f"boot {row.boot_id or '-'}, journal {row.journal_id or '-'}"
        lines = [
            f"{self.node_id} is {self.connectivity.value}: epoch {row.session_epoch}, {held}",
            f"  {whose}, nonce {wording.nonce_name(row.hello_nonce)}, events acked up to {row.acked_event_seq}",
        ]
        times = [] if row.last_seen_ms is None else [f"last seen {wording.clock(row.last_seen_ms)}"]
        if row.disconnected_at_ms is not None:
            times.append(f"disconnected {wording.clock(row.disconnected_at_ms)}")
        lines += [f"  {', '.join(times)}"] if times else []
        if row.duplicate_hellos:
            boots = wording.listed(seen.boot_id + " (forked)" * seen.forked for seen in row.recent_boots)
            count = f"{row.duplicate_hellos} alternation{'s' * (row.duplicate_hellos > 1)}"
            lines.append(f"  {count}; boots seen: {boots}")
        lines += [f"  condition {name}" for name in sorted(self.conditions)]
        lines += [f"  label {name}={value}" for name, value in sorted(self.labels.items())]
        return lines

    def events_shown(self) -> list[str]:
        """Return the stored events and the gaps among them, by journal and seq."""
        stored = {key: wording.event_name(identifier) for key, identifier in self.events.items()}
        gaps = {(journal, first): f"gone up to {last}" for journal, first, last in self.gaps}
        return [f"{journal} {seq}: {what}" for (journal, seq), what in sorted({**stored, **gaps}.items())]


@dataclass
class CommandRow:
    """One command of the table."""

    command_id: str
    node_id: str
    kind: str
    lane: int
    seq: int
    body: bytes
    not_after_ms: int
    not_before_ms: int = 0
    state: CommandState = CommandState.PENDING
    attempt: int = 0
    epoch: int | None = None
    sent_boot_id: str = ""
    cancel_requested: bool = False
    reason: str = ""

    @property
    def in_flight(self) -> bool:
        """Say whether a session of the node answers for it."""
        return self.state in table.IN_FLIGHT

    def moved(self, move: table.Move, *, reason: str = "") -> None:
        """Make one of the control plane's own moves; one that the table does not know raises."""
        self.state = table.moved(self.state, move)
        self.reason = reason

    def sent(self, *, epoch: int, boot_id: str) -> OutgoingCommand:
        """Mark one sending and return what is sent."""
        self.attempt += 1
        self.epoch = epoch
        self.sent_boot_id = boot_id
        return OutgoingCommand(
            command_id=self.command_id,
            kind=self.kind,
            lane=self.lane,
            seq=self.seq,
            attempt=self.attempt,
            seen=self.state if self.state in (CommandState.ACKED, CommandState.RUNNING) else None,
            body=self.body,
        )

    def as_fact(self) -> CommandInFlight:
        """Return what the Hello transaction reads of it."""
        return CommandInFlight(
            command_id=self.command_id,
            kind=self.kind,
            lane=self.lane,
            seq=self.seq,
            state=self.state,
            attempt=self.attempt,
            sent_boot_id=self.sent_boot_id,
            cancel_requested=self.cancel_requested,
            body=self.body,
        )

    def shown(self) -> str:
        """Return what matters of the row."""
        parts = [f"{self.command_id} {self.kind} {wording.state_name(self.state)}"]
        parts += [f"({self.reason})"] if self.reason else []
        details = [f"attempt {self.attempt}"] if self.attempt else []
        details += [f"epoch {self.epoch}"] if self.in_flight else []
        if self.state is CommandState.PENDING and self.not_before_ms:
            details.append(f"not before {wording.clock(self.not_before_ms)}")
        details += ["cancel requested"] if self.cancel_requested and self.in_flight else []
        return " ".join(parts) + (f": {', '.join(details)}" if details else "")
