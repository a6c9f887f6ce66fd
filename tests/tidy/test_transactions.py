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


def awaits_of_others(tree: ast.AST) -> Iterator[int]:
    """Yield the lines at which something is awaited inside a transaction that does not mention it."""
    for node in ast.walk(tree):
        names: set[str] = set()
        body: list[ast.stmt] = []
        if isinstance(node, ast.AsyncFunctionDef):
            names = {
                argument.arg
                for argument in (*node.args.args, *node.args.kwonlyargs)
                if argument.annotation is not None and ast.unparse(argument.annotation) == "Transaction"
            }
            body = node.body
        elif isinstance(node, ast.AsyncWith):
            names = {
                item.optional_vars.id
                for item in node.items
                if isinstance(item.context_expr, ast.Call)
                and isinstance(item.context_expr.func, ast.Attribute)
                and item.context_expr.func.attr == "transaction"
                and isinstance(item.optional_vars, ast.Name)
            }
            body = node.body
        if names:
            yield from (line for statement in body for line in _strangers(statement, names))


def _strangers(statement: ast.stmt, names: set[str]) -> Iterator[int]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Await):
            said = {inner.id for inner in ast.walk(node.value) if isinstance(inner, ast.Name)}
            if not said & names:
                yield node.lineno


def test_the_check_sees_a_stranger() -> None:
    code = """
async def bad(transaction: Transaction):
    await transaction.fetch("a")
    await sleep(1)
async def worse(database):
    async with database.transaction() as held:
        await store(held)
        await database.fetch("a")
"""
    assert sorted(awaits_of_others(ast.parse(code))) == [4, 8]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_transaction_awaits_only_its_connection(package: str) -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in sorted((SOURCE / package).rglob("*.py"))
        for line in awaits_of_others(ast.parse(path.read_text()))
    ]
    assert not found
