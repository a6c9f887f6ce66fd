"""Inside a transaction nothing is awaited but its connection: not a timer, not a lock, not another connection.

A transaction that waits for anything else holds its row locks for that long, and would stop the simulator's clock. See
docs/simulator.md, "The database".
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "bettercompute"
PACKAGES = ("store", "gateway", "controllers", "services", "api", "server")


# What waits for time or for others, whatever it is given: also a transaction's own statement would wait inside it.
WAITERS = frozenset({"asyncio", "gather", "sleep", "timeout", "to_thread", "wait", "wait_for"})
# A connection under its other name: who takes it may be inside a transaction, and is judged as if it were.
CONNECTIONS = frozenset({"Transaction", "Queries"})


def awaits_of_others(tree: ast.AST) -> Iterator[int]:
    """Yield the lines at which something is awaited inside a transaction that is not the transaction's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef):
            arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            names = {argument.arg for argument in arguments if _is_connection(argument)}
        elif isinstance(node, ast.AsyncWith):
            names = {opened for item in node.items if (opened := _opened(item))}
        else:
            continue
        if names:
            yield from (line for statement in node.body for line in _strangers(statement, names))


def _is_connection(argument: ast.arg) -> bool:
    """Also `Transaction | None`, and not a function that takes one."""
    return argument.annotation is not None and any(
        name.strip() in CONNECTIONS for name in ast.unparse(argument.annotation).split("|")
    )


def _opened(item: ast.withitem) -> str:
    """Return the name of the transaction that is opened; empty: none."""
    opened, held = item.context_expr, item.optional_vars
    if isinstance(opened, ast.Call) and isinstance(opened.func, ast.Attribute) and opened.func.attr == "transaction":
        return held.id if isinstance(held, ast.Name) else ""
    return ""


def _strangers(statement: ast.stmt, names: set[str]) -> Iterator[int]:
    for node in ast.walk(statement):
        match node:
            case ast.Await():
                awaited = [node.value]
            case ast.AsyncFor():
                awaited = [node.iter]
            case ast.AsyncWith():
                awaited = [item.context_expr for item in node.items]
            case _:
                continue
        yield from (node.lineno for value in awaited if not _is_of(value, names))


def _is_of(value: ast.expr, names: set[str]) -> bool:
    """Say whether what is awaited is a call of the connection, or one that is handed it."""
    if not isinstance(value, ast.Call):
        return False
    called = {inner.id for inner in ast.walk(value.func) if isinstance(inner, ast.Name)}
    attributes = {inner.attr for inner in ast.walk(value.func) if isinstance(inner, ast.Attribute)}
    if (called | attributes) & WAITERS:
        return False
    handed = {
        argument.id
        for argument in (*value.args, *(keyword.value for keyword in value.keywords))
        if isinstance(argument, ast.Name)
    }
    return bool((called | handed) & names)


def test_the_check_sees_a_stranger() -> None:
    code = """
async def bad(transaction: Transaction):
    await transaction.fetch("a")
    await sleep(1)
async def worse(database):
    async with database.transaction() as held:
        await store(held)
        await database.fetch("a")
async def under_another_name(queries: Queries | None):
    await queries.fetch("a")
    await other(f(queries))
async def all_at_once(transaction: Transaction):
    await asyncio.gather(transaction.fetch("a"), transaction.fetch("b"))
    await asyncio.sleep(transaction.pause_s)
    async with asyncio.timeout(1):
        await transaction.fetch("a")
    async with lock:
        await keep(row, connection=transaction)
    async for row in stream:
        pass
    await future
"""
    assert sorted(awaits_of_others(ast.parse(code))) == [4, 8, 11, 13, 14, 15, 17, 19, 21]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_transaction_awaits_only_its_connection(package: str) -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in sorted((SOURCE / package).rglob("*.py"))
        for line in awaits_of_others(ast.parse(path.read_text()))
    ]
    assert not found
