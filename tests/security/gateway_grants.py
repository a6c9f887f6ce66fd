"""Which privileges a gateway needs, found out by PostgreSQL: `python -m tests.security.gateway_grants` writes them.

The statements that `gateway/` calls are read from its code. Beginning with every privilege on every column, each one is
taken away for which no statement asks; what is left is `store/grants/gateway.sql`. A statement's privileges are checked
when it is planned for execution, so nothing is run.
"""

from __future__ import annotations

import ast
import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from bettercompute.store import roles, statements
from bettercompute.store.database import DedicatedConnection, StatementFailed
from bettercompute.testing import postgres

PACKAGE = Path(statements.__file__).parent.parent
GATEWAY_SCHEMA_CHECK = "SELECT version, name, phase, checksum FROM schema_migrations"
"""What `serve` asks before it starts anything."""

Privilege = tuple[str, str, str]
"""A table, a privilege, a column; no column for DELETE."""


@cache
def statements_of_gateway() -> frozenset[str]:
    """Return the names of the statements that the gateway package calls, by way of functions of the store."""
    found: set[str] = set()
    for path in sorted((PACKAGE / "gateway").glob("*.py")):
        tree = ast.parse(path.read_text())
        modules = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "bettercompute.store"
            for alias in node.names
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in modules
                and (PACKAGE / "store" / f"{node.value.id}.py").exists()
            ):
                found |= _statements_of(node.value.id, node.attr, frozenset())
    return frozenset(found)


@cache
def _functions_of(module: str) -> dict[str, ast.AST]:
    tree = ast.parse((PACKAGE / "store" / f"{module}.py").read_text())
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def _statements_of(module: str, function: str, seen: frozenset[str]) -> set[str]:
    """Return the statements that a function of a store module names, and those of what it calls in its own module."""
    tree = ast.parse((PACKAGE / "store" / f"{module}.py").read_text())
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    body = functions.get(function)
    if body is None or function in seen:
        return set()
    names = {
        node.value
        for node in ast.walk(body)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in statements.statements()
    }
    for node in ast.walk(body):
        if isinstance(node, ast.Name) and node.id in functions:
            names |= _statements_of(module, node.id, seen | {function})
    return names


def asked() -> dict[str, tuple[str, int]]:
    """Return everything that a gateway's role must be able to run, with the number of its arguments."""
    known = statements.statements()
    ours = {name: (known[name].sql, len(known[name].arguments)) for name in statements_of_gateway()}
    return {**ours, "serve.schema": (GATEWAY_SCHEMA_CHECK, 0)}


async def prepare(connection: DedicatedConnection, asked_for: Mapping[str, tuple[str, int]]) -> dict[str, str]:
    """Prepare statements, and return what asks for each whether the role may run it, without running it."""
    await connection.script("SET plan_cache_mode = force_generic_plan")
    asking = {}
    for number, (name, (sql, arguments)) in enumerate(sorted(asked_for.items())):
        await connection.script(f"PREPARE asked{number} AS {sql}")
        values = f"({', '.join(['NULL'] * arguments)})" if arguments else ""
        asking[name] = f"EXPLAIN EXECUTE asked{number}{values};"
    return asking


async def allowed(connection: DedicatedConnection, asking: str) -> bool:
    """Say whether the connection's role may run what is asked for; inside a transaction."""
    await connection.script("SAVEPOINT asking")
    try:
        await connection.script(asking)
    except StatementFailed as failure:
        if failure.sqlstate != "42501":
            raise
        return False
    finally:
        await connection.script("ROLLBACK TO SAVEPOINT asking")
    return True


async def every_privilege(connection: DedicatedConnection) -> list[Privilege]:
    """Return every privilege on every column of every table."""
    rows = await connection.query(
        "SELECT c.relname AS name, a.attname AS column FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid"
        " WHERE c.relkind = 'r' AND c.relnamespace = 'public'::regnamespace AND a.attnum > 0 AND NOT a.attisdropped"
        " ORDER BY 1, a.attnum"
    )
    columns = [(row["name"], row["column"]) for row in rows]
    by_column = [(name, privilege, column) for privilege in ("INSERT", "UPDATE", "SELECT") for name, column in columns]
    return [(name, "DELETE", "") for name in dict.fromkeys(name for name, _ in columns)] + by_column


def grant(name: str, privilege: str, columns: list[str], *, verb: str = "GRANT", preposition: str = "TO") -> str:
    """Return one statement that gives, or takes away."""
    listed = f" ({', '.join(columns)})" if any(columns) else ""
    return f"{verb} {privilege}{listed} ON {name} {preposition} {roles.GATEWAY};"


def written(privileges: list[Privilege]) -> str:
    """Return the file: one line for each table and privilege."""
    grouped: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, privilege, column in privileges:
        grouped[name, privilege].append(column)
    lines = [grant(name, privilege, columns) for (name, privilege), columns in sorted(grouped.items())]
    head = (
        "-- What a gateway may do in the database, and nothing else: the privileges that its statements ask for.\n"
        "-- Written by `python -m tests.security.gateway_grants`; a test sees that none is missing or needless.\n"
    )
    return head + "\n".join(lines) + "\n"


async def minimal(connection: DedicatedConnection) -> list[Privilege]:
    """Take privileges away, halving what is tried at once, until each that is left is asked for."""
    needed: list[Privilege] = []
    asking = "".join((await prepare(connection, asked())).values())
    await connection.script(f"BEGIN; SET LOCAL ROLE NONE; GRANT USAGE ON SCHEMA public TO {roles.GATEWAY}")
    everything = await every_privilege(connection)
    await connection.script("".join(grant(name, privilege, [column]) for name, privilege, column in everything))

    async def without(tried: list[Privilege]) -> bool:
        await connection.script("SAVEPOINT trying; SET LOCAL ROLE NONE")
        await connection.script(
            "".join(
                grant(name, privilege, [column], verb="REVOKE", preposition="FROM") for name, privilege, column in tried
            )
        )
        await connection.script(f"SET LOCAL ROLE {roles.GATEWAY}")
        enough = await allowed(connection, asking)
        await connection.script("RELEASE SAVEPOINT trying" if enough else "ROLLBACK TO SAVEPOINT trying")
        return enough

    async def reduce(tried: list[Privilege]) -> None:
        if not tried or await without(tried):
            return
        if len(tried) == 1:
            needed.extend(tried)
            return
        await reduce(tried[: len(tried) // 2])
        await reduce(tried[len(tried) // 2 :])

    await reduce(everything)
    await connection.script("ROLLBACK")
    return needed


async def _write(dsn: str) -> None:
    await roles.grant(dsn, grants="")
    connection = await DedicatedConnection.open(dsn, application_name="grants")
    try:
        roles.GRANTS.write_text(written(await minimal(connection)))
    finally:
        await connection.close()


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as fallback,
        postgres.scratch(Path(fallback)) as scratch,
        postgres.serve(scratch) as running,
    ):
        asyncio.run(_write(running.create_database()))
