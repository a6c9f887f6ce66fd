"""What was committed, row by row, as it was committed: triggers of the simulated database tell it by notifications.

They come with the COMMIT that made them true and not without it, so the ledger is the state of the tables at every
moment, and each transaction can be judged by what it changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from bettercompute.testing.sim.postgres import Notification, SimulatedServer

CHANNEL = "sim_changes"
Values: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Watched:
    """A table whose changes are told: by which columns a row is known, and which are told besides."""

    table: str
    key: tuple[str, ...]
    columns: tuple[str, ...]
    times: tuple[str, ...] = ()
    """Timestamps, told in milliseconds."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all values that are told."""
        return (*self.key, *self.columns, *self.times)


WATCHED = (
    Watched(
        "node_sessions",
        ("node_id",),
        ("gateway_id", "session_id", "session_epoch", "journal_id", "acked_event_seq", "cert_serial"),
        ("disconnected_at",),
    ),
    Watched(
        "nodes",
        ("node_id",),
        (
            "state",
            "state_reason",
            "identity_generation",
            "spec_generation",
            "observed_generation",
            "applied_generation",
        ),
        ("locked_at", "locked_until", "revoked_at", "quarantined_at"),
    ),
    Watched(
        "commands",
        ("id",),
        ("node_id", "kind", "lane", "seq", "state", "session_id", "session_epoch", "attempt", "reason"),
        ("cancel_requested_at", "not_after", "asked_not_before"),
    ),
    Watched("node_events", ("node_id", "journal_id", "seq"), ("event_id", "recovered")),
    Watched("node_event_gaps", ("node_id", "journal_id", "first_seq"), ("last_seq",)),
    Watched("leases", ("name",), ("draining",), ("expires_at", "retired_at")),
    Watched("node_certs", ("serial",), ("node_id",), ("revoked_at", "superseded_at", "not_after")),
)
_BY_TABLE = {watched.table: watched for watched in WATCHED}


@dataclass(frozen=True, slots=True)
class Change:
    """One row before and after; None: it did not exist."""

    table: str
    key: tuple[Any, ...]
    old: Values | None
    new: Values | None

    def became(self, name: str) -> bool:
        """Return whether this value changed to something that is not NULL."""
        return self.new is not None and self.new[name] is not None and self.moved(name)

    def moved(self, name: str) -> bool:
        """Return whether this value changed."""
        before = None if self.old is None else self.old[name]
        after = None if self.new is None else self.new[name]
        return bool(before != after)


@dataclass(slots=True)
class Ledger:
    """The watched tables as they are."""

    rows: dict[str, dict[tuple[Any, ...], Values]] = field(
        default_factory=lambda: {watched.table: {} for watched in WATCHED}
    )

    def row(self, table: str, *key: Any) -> Values | None:
        """Return a row."""
        return self.rows[table].get(key)

    def take(self, heard: Iterable[Notification]) -> list[Change]:
        """Note what one transaction has changed, and return it: one change a row, however often it was written."""
        changes: dict[tuple[str, tuple[Any, ...]], Change] = {}
        for notification in heard:
            if notification.channel != CHANNEL:
                continue
            table, old, new = json.loads(notification.payload)[1:]
            change = _change(table, old, new)
            first = changes.get((table, change.key))
            changes[table, change.key] = change if first is None else Change(table, change.key, first.old, change.new)
        for change in changes.values():
            if change.new is None:
                self.rows[change.table].pop(change.key, None)
            else:
                self.rows[change.table][change.key] = change.new
        return list(changes.values())


def reload(ledger: Ledger, server: SimulatedServer) -> None:
    """Read all watched tables anew: the database is another one than a moment ago."""
    for watched in WATCHED:
        rows = server.query(
            f"SELECT {_values(watched, 't')}::text AS told FROM {watched.table} t"  # noqa: S608 - names of our own
            f" ORDER BY {', '.join(watched.key)}"
        )
        read = [dict(zip(watched.names, json.loads(row["told"]), strict=True)) for row in rows]
        ledger.rows[watched.table] = {tuple(row[name] for name in watched.key): row for row in read}


def _change(table: str, old: Sequence[Any] | None, new: Sequence[Any] | None) -> Change:
    names = _BY_TABLE[table].names
    before = None if old is None else dict(zip(names, old, strict=True))
    after = None if new is None else dict(zip(names, new, strict=True))
    known = after or before
    assert known is not None
    return Change(table, tuple(known[name] for name in _BY_TABLE[table].key), before, after)


def install(server: SimulatedServer) -> None:
    """Put the triggers on the tables."""
    server.script("CREATE SEQUENCE sim_changes_seq;" + "".join(_trigger(watched) for watched in WATCHED))


def _values(watched: Watched, row: str) -> str:
    plain = [f"{row}.{name}" for name in (*watched.key, *watched.columns)]
    return f"jsonb_build_array({', '.join([*plain, *(f'to_ms({row}.{name})' for name in watched.times)])})"


def _trigger(watched: Watched) -> str:
    table = watched.table
    # Equal payloads of one transaction are told once: the number makes each its own.
    return f"""
CREATE FUNCTION sim_note_{table}() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE old_row jsonb; new_row jsonb;
BEGIN
  IF TG_OP <> 'INSERT' THEN old_row := {_values(watched, "OLD")}; END IF;
  IF TG_OP <> 'DELETE' THEN new_row := {_values(watched, "NEW")}; END IF;
  IF old_row IS DISTINCT FROM new_row THEN
    PERFORM pg_notify('{CHANNEL}', jsonb_build_array(nextval('sim_changes_seq'), '{table}', old_row, new_row)::text);
  END IF;
  RETURN NULL;
END $$;
CREATE TRIGGER sim_note AFTER INSERT OR UPDATE OR DELETE ON {table}
  FOR EACH ROW EXECUTE FUNCTION sim_note_{table}();
"""
