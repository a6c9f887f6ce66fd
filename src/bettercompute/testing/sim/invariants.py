"""What must hold after every transaction, judged by what it changed. docs/simulator.md lists it in words.

Nothing here looks into production code: the rows, who wrote them and when are enough. A violation is noted once, with
the virtual time and the transaction, and ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bettercompute.session.liveness import GRACE_MS, OUTAGE_MS
from bettercompute.testing.sim.ledger import Change, Ledger

TERMINAL_FROM = 5
PENDING, DISPATCHED = 1, 2
GENERATIONS = ("identity_generation", "spec_generation", "observed_generation", "applied_generation")
ROUTING = ("gateway_id", "session_id", "session_epoch", "disconnected_at")


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that was broken."""

    rule: str
    text: str
    at_ms: int


@dataclass(slots=True)
class Verdict:
    """The violations found so far."""

    now_ms: Callable[[], int]
    violations: list[Violation] = field(default_factory=list)

    def broken(self, rule: str, text: str) -> None:
        """Note a violation."""
        self.violations.append(Violation(rule, text, self.now_ms()))


@dataclass(slots=True)
class Outages:
    """When the database was away last, by a clock that nobody steps."""

    since_ms: int | None = None
    ended_ms: int | None = None
    doubted_ms: int | None = None
    """When its clock was stepped last: a controller that measures by it knows no better."""

    def begins(self, now_ms: int) -> None:
        """Note that it goes away."""
        self.since_ms = now_ms

    def ends(self, now_ms: int) -> None:
        """Note that it is back."""
        if self.since_ms is not None and now_ms - self.since_ms > OUTAGE_MS:
            self.ended_ms = now_ms
        self.since_ms = None

    def doubted(self, now_ms: int) -> None:
        """Note that the database's clock was stepped."""
        self.doubted_ms = now_ms

    def in_grace(self, now_ms: int) -> bool:
        """Return whether ages are no evidence yet."""
        if self.ended_ms is None or (self.doubted_ms is not None and now_ms - self.doubted_ms < 2 * GRACE_MS):
            return False
        return now_ms - self.ended_ms < GRACE_MS - MARGIN_MS


# A controller counts its grace from its own first look after the outage, never from before.
MARGIN_MS = 1_000


class TransactionRules:
    """Judges each transaction."""

    def __init__(self, ledger: Ledger, verdict: Verdict, *, monotonic_ms: Callable[[], int]) -> None:
        self.outages = Outages()
        self._monotonic_ms = monotonic_ms
        self._ledger = ledger
        self._verdict = verdict
        self._owner_of_lease: dict[str, str] = {}
        self._event_ids: dict[tuple[str, str], tuple[str, int]] = {}
        self._last_seq: dict[tuple[str, str], int] = {}
        self._stored_once: dict[tuple[str, str], set[int]] = {}
        """Every event that was ever stored, also by a database that is another one since."""
        self.told_events: Mapping[tuple[str, str], Mapping[int, str]] = {}
        """Ids of the events that nodes have said, by seq, of each journal."""
        self._ids_stored_once: set[tuple[str, str]] = set()

    def went_back(self) -> None:
        """Judge from now on by what the database, which is an earlier one, holds."""
        events = self._ledger.rows["node_events"]
        self._event_ids = {(node, row["event_id"]): (journal, seq) for (node, journal, seq), row in events.items()}
        self._last_seq = {}
        for node_id, journal_id, seq in events:
            key = (node_id, journal_id)
            self._last_seq[key] = max(seq, self._last_seq.get(key, 0))

    def judge(self, client: str, changes: Sequence[Change]) -> None:
        """Judge one transaction of `client`, a process by its name."""
        disconnected = False
        for change in changes:
            match change.table:
                case "leases" if change.old is None:
                    self._owner_of_lease[str(change.key[0])] = client
                case "node_sessions" if change.old is not None:
                    self._session(client, change)
                    disconnected |= change.became("disconnected_at")
                case "nodes" if change.new is None:
                    self._forgotten(str(change.key[0]))
                case "nodes" if change.old is not None:
                    self._node(client, change)
                case "commands":
                    self._command(client, change)
                case "node_events" if change.new is not None:
                    self._event(change)
                case "node_event_gaps" if change.new is not None:
                    self._gap(change.key, change.new["last_seq"])
                case "node_certs" if change.old is not None and change.old["revoked_at"] is not None:
                    if change.new is not None and change.moved("revoked_at"):
                        self._verdict.broken("revocations last", f"{change.key[0]}: {change.old} -> {change.new}")
        if disconnected:
            touched = [change for change in changes if change.table == "commands"]
            if touched:
                text = f"{client} wrote a disconnect and, with it, {touched[0]}"
                self._verdict.broken("nothing is released by a disconnect", text)

    # One live session a node, and who may write where it is

    def _session(self, client: str, change: Change) -> None:
        old, new = change.old, change.new
        if old is None or new is None:
            return
        node_id = change.key[0]
        if new["session_epoch"] < old["session_epoch"]:
            self._verdict.broken("epochs rise", f"{node_id}: {old} -> {new} by {client}")
        taken = change.became("session_id") or change.became("gateway_id")
        if taken and new["session_epoch"] <= old["session_epoch"]:
            self._verdict.broken("one live session a node", f"{node_id}: {old} -> {new} in one epoch, by {client}")
        if taken:
            self._may_be_here(str(node_id), f"{node_id}: {old} -> {new} by {client}")
            self._may_be_shown(new["cert_serial"], f"{node_id}: {old} -> {new} by {client}")
        if not any(change.moved(name) for name in ROUTING) or not client.startswith("gw"):
            return
        holder = new["gateway_id"] if new["session_epoch"] > old["session_epoch"] else old["gateway_id"]
        if holder is None or self._owner_of_lease.get(holder) != client:
            text = f"{node_id}: {old} -> {new} was written by {client}, the holder is {holder}"
            self._verdict.broken("routing writes only by the holder", text)
        else:
            self._leased(holder, f"{node_id}: {old} -> {new}")

    def _may_be_here(self, node_id: str, wrote: str) -> None:
        """Judge a new session by what operators have said of the node."""
        node = self._ledger.row("nodes", node_id)
        if node is None:
            self._verdict.broken("a node that was forgotten gets no session", wrote)
        elif node["revoked_at"] is not None:
            self._verdict.broken("a revoked node gets no session", wrote)
        elif node["locked_at"] is not None and (
            node["locked_until"] is None or node["locked_until"] > self._verdict.now_ms()
        ):
            self._verdict.broken("a locked node gets no session", wrote)

    def _may_be_shown(self, serial: str | None, wrote: str) -> None:
        """Judge a new session by its certificate: one that is not on record was restored away."""
        row = None if serial is None else self._ledger.row("node_certs", serial)
        for fault in ("revoked", "superseded"):
            if row is not None and row[f"{fault}_at"] is not None:
                self._verdict.broken(f"a {fault} certificate gets no session", f"{row}: {wrote}")

    def _forgotten(self, node_id: str) -> None:
        left = [
            key
            for key, row in self._ledger.rows["commands"].items()
            if row["node_id"] == node_id and row["state"] < TERMINAL_FROM
        ]
        if left:
            self._verdict.broken("the commands of a forgotten node end with it", f"{node_id}: {left}")

    def _leased(self, gateway_id: str, wrote: str) -> None:
        lease = self._ledger.row("leases", gateway_id)
        now_ms = self._verdict.now_ms()
        if lease is None or lease["retired_at"] is not None or lease["expires_at"] < now_ms:
            self._verdict.broken("a gateway without a lease routes nothing", f"{gateway_id} ({lease}) wrote {wrote}")

    def _node(self, client: str, change: Change) -> None:
        old, new = change.old, change.new
        if old is None or new is None:
            return
        for name in GENERATIONS:
            if new[name] < old[name]:
                self._verdict.broken("generations only rise", f"{change.key[0]}: {old} -> {new} by {client}")
        judged = (
            change.moved("state") and new["state"] in ("disconnected", "unreachable") and client.startswith("worker")
        )
        if judged and self.outages.in_grace(self._monotonic_ms()):
            text = f"{client} judged {change.key[0]} {new['state']} ({new['state_reason']})"
            self._verdict.broken("no judgement within the grace after an outage", text)

    # A command ends once

    def _command(self, client: str, change: Change) -> None:
        old, new = change.old, change.new
        if new is None:
            return
        if old is not None and (old["state"], new["state"]) == (PENDING, DISPATCHED):
            now_ms = self._verdict.now_ms()
            if new["not_after"] < now_ms:
                text = f"{change.key[0]}: {old} -> {new} by {client}"
                self._verdict.broken("nothing is sent after its deadline", text)
            if (new["asked_not_before"] or 0) > now_ms:
                text = f"{change.key[0]}: {old} -> {new} by {client}, at {now_ms}"
                self._verdict.broken("a command for later leaves when it is due", text)
        if old is not None:
            if old["state"] >= TERMINAL_FROM and (change.moved("state") or change.moved("reason")):
                self._verdict.broken("a command ends once", f"{change.key[0]}: {old} -> {new} by {client}")
            back = new["state"] < old["state"] and (old["state"], new["state"]) != (DISPATCHED, PENDING)
            if back:
                self._verdict.broken("commands go forward", f"{change.key[0]}: {old} -> {new} by {client}")
        sent = new["session_epoch"] is not None and (change.moved("session_epoch") or change.moved("attempt"))
        if sent and client.startswith("gw"):
            session = self._ledger.row("node_sessions", new["node_id"])
            held = session is not None and (session["session_id"], session["session_epoch"]) == (
                new["session_id"],
                new["session_epoch"],
            )
            if session is None or not held or self._owner_of_lease.get(session["gateway_id"] or "") != client:
                text = f"{change.key[0]}: {old} -> {new} by {client} while the row says {session}"
                self._verdict.broken("routing writes only by the holder", text)
            else:
                self._leased(session["gateway_id"], f"{change.key[0]}: {old} -> {new}")

    # Events: once, in order

    def _event(self, change: Change) -> None:
        node_id, journal_id, seq = change.key
        new = change.new
        assert new is not None
        known = self._event_ids.setdefault((node_id, new["event_id"]), (journal_id, seq))
        if known != (journal_id, seq):
            text = f"{node_id}: {new['event_id']} is stored as {known} and as {(journal_id, seq)}"
            self._verdict.broken("events are stored once", text)
        last = self._last_seq.get((node_id, journal_id), 0)
        if seq <= last:
            self._verdict.broken("events are stored in order", f"{node_id} {journal_id}: {seq} after {last}")
        self._last_seq[node_id, journal_id] = max(last, seq)
        self._stored_once.setdefault((node_id, journal_id), set()).add(seq)
        self._ids_stored_once.add((node_id, new["event_id"]))

    def _gap(self, key: tuple[str, str, int], last: int) -> None:
        """A daemon forgets only what was stored: what is missing is what the database has lost since."""
        node_id, journal_id, first = key
        told = self.told_events.get((node_id, journal_id), {})
        never = {
            seq
            for seq in set(range(first, last + 1)) - self._stored_once.get((node_id, journal_id), set())
            if (node_id, told.get(seq)) not in self._ids_stored_once  # else it was recovered from an earlier journal
        }
        if never:
            text = f"{node_id} {journal_id}: {sorted(never)} of the gap {first} to {last} were never stored"
            self._verdict.broken("no event is lost", text)
