"""Copies of the simulated database: what a standby had when it was promoted, or a backup when it was taken.

A copy is a schema of its own in the same database: taking one and putting it back are two scripts, at no virtual time.
Sequences go back too, as they do in a restored backup. Triggers do not fire: nobody has committed what comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bettercompute.testing.sim.postgres import SimulatedServer

_TABLES = """
SELECT c.relname AS name, array_agg(a.attname::text ORDER BY a.attnum) AS columns
  FROM pg_class c
  JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
 WHERE n.nspname = 'public' AND c.relkind = 'r'
 GROUP BY c.relname ORDER BY c.relname
"""
# The one that numbers what the ledger is told goes on.
_SEQUENCES = """
SELECT sequencename::text AS name, last_value FROM pg_sequences
 WHERE schemaname = 'public' AND sequencename <> 'sim_changes_seq' ORDER BY sequencename
"""


@dataclass(frozen=True, slots=True)
class Copy:
    """The database as it was."""

    schema: str
    tables: Sequence[tuple[str, Sequence[str]]]
    sequences: Sequence[tuple[str, int | None]]
    """With their last value; None: never used."""


def take(server: SimulatedServer, *, name: str) -> Copy:
    """Take a copy under a name that no other copy has."""
    schema = f"copy_{name}"
    tables = [(row["name"], row["columns"]) for row in server.query(_TABLES)]
    sequences = [(row["name"], row["last_value"]) for row in server.query(_SEQUENCES)]
    script = "".join(f"CREATE TABLE {schema}.{table} AS TABLE public.{table};" for table, _ in tables)
    server.script(f"CREATE SCHEMA {schema};{script}")
    return Copy(schema, tables, sequences)


def put_back(server: SimulatedServer, copy: Copy) -> None:
    """Let the database be what the copy is."""
    names = ", ".join(f"public.{table}" for table, _ in copy.tables)
    script = f"SET session_replication_role = replica; TRUNCATE {names};"
    for table, columns in copy.tables:
        listed = ", ".join(columns)
        rows = f"SELECT {listed} FROM {copy.schema}.{table}"  # noqa: S608 - names of our own tables
        script += f"INSERT INTO public.{table} ({listed}) OVERRIDING SYSTEM VALUE {rows};"
    for name, last_value in copy.sequences:
        used = "true" if last_value is not None else "false"
        script += f"SELECT setval('public.{name}', {1 if last_value is None else last_value}, {used});"
    server.script(f"{script}SET session_replication_role = DEFAULT;")


def drop(server: SimulatedServer, copy: Copy) -> None:
    """Throw a copy away."""
    server.script(f"DROP SCHEMA {copy.schema} CASCADE;")
