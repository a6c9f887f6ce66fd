"""Answers that PostgreSQL need not give again: the statement, its arguments and every table it names are as they were.

A fleet in which nothing happens asks the same things over and over: is there anything to publish, to send, to end? Most
of a simulated day is that. An answer is kept if running its statement changed nothing, and is good until a table that
the statement names is written, which triggers tell with the COMMIT. What the time, a sequence or any other volatile
function has a say in is asked anew each time. Runs are the same with and without this. See decisions 0170.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from bettercompute.store.database import Row

CHANNEL = "sim_written"
TABLES = "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace ORDER BY relname"
# The product's own functions are all SQL. What reads the clock, or calls what does, is recognised by its source.
FICKLE = """
WITH RECURSIVE fickle AS (
  SELECT proname::text AS name FROM pg_proc WHERE provolatile = 'v' OR proname IN (
    'now', 'statement_timestamp', 'transaction_timestamp', 'current_setting', 'pg_current_snapshot')
  UNION SELECT 'compute_now'
  UNION SELECT own.proname::text FROM pg_proc own, fickle
   WHERE own.pronamespace = 'public'::regnamespace AND own.prosrc ~ ('\\m' || fickle.name || '\\M'))
SELECT DISTINCT name FROM fickle
"""
# Keywords that are not in the catalogue of functions.
CLOCK_WORDS = frozenset({"current_timestamp", "current_date", "current_time", "localtime", "localtimestamp"})
# A name in an SQL function's body would hide a table from us: there is one such function, and it reads the clock.
WORD = re.compile(r"[a-z_][a-z_0-9]*")
KEPT_MAX = 2_000

_Key: TypeAlias = tuple[str, Hashable]


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a statement returned, and when the tables that it names had last been written."""

    rows: Sequence[Row]
    stamp: tuple[int, ...]


@dataclass(slots=True)
class Unchanged:
    """The answers that are kept."""

    tables: frozenset[str]
    fickle: frozenset[str]
    changes: int = 0
    """How often any table was written."""
    _writes: Counter[str] = field(default_factory=Counter)
    _named: dict[str, tuple[str, ...] | None] = field(default_factory=dict)
    _kept: dict[_Key, _Answer] = field(default_factory=dict)

    def written(self, table: str) -> None:
        """Note that a transaction has written a table."""
        self.changes += 1
        self._writes[table] += 1

    def forget(self) -> None:
        """Drop everything: somebody has changed more than rows."""
        self.changes += 1
        self._kept.clear()
        self._named.clear()

    def answer(self, sql: str, arguments: Sequence[Any]) -> list[Row] | None:
        """Return what PostgreSQL would answer, if that is known."""
        named = self._names(sql)
        found = None if named is None else self._kept.get((sql, _frozen(arguments)))
        if named is None or found is None or found.stamp != self._stamp(named):
            return None
        return list(found.rows)

    def keep(self, sql: str, arguments: Sequence[Any], rows: Iterable[Row]) -> None:
        """Keep the answer to a statement that changed nothing, in a transaction that changed nothing."""
        named = self._names(sql)
        if named is None:
            return
        key = (sql, _frozen(arguments))
        self._kept.pop(key, None)
        while len(self._kept) >= KEPT_MAX:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = _Answer(tuple(rows), self._stamp(named))

    def _stamp(self, named: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(self._writes[table] for table in named)

    def _names(self, sql: str) -> tuple[str, ...] | None:
        """Return the tables that a statement names, or None if its answer may change without any of them."""
        try:
            return self._named[sql]
        except KeyError:
            words = set(WORD.findall(sql.lower()))
            fickle = words & (self.fickle | CLOCK_WORDS)
            named = self._named[sql] = None if fickle else tuple(sorted(words & self.tables))
            return named


def triggers(tables: Iterable[str]) -> str:
    """Return the SQL that tells of every table that is written."""
    return f"""
CREATE FUNCTION sim_written() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_notify('{CHANNEL}', TG_TABLE_NAME);
  RETURN NULL;
END $$;
""" + "".join(
        f"CREATE TRIGGER sim_written AFTER INSERT OR UPDATE OR DELETE ON {table}"
        " FOR EACH ROW EXECUTE FUNCTION sim_written();\n"
        for table in tables
    )


def _frozen(arguments: Sequence[Any]) -> Hashable:
    return tuple(tuple(argument) if isinstance(argument, list) else argument for argument in arguments)
