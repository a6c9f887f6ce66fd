"""What every named statement must keep to: its mark, the lock order, the only clock, and that PostgreSQL takes it."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from bettercompute.store import statements as loader
from bettercompute.store.database import StatementFailed
from bettercompute.store.statements import Statement, statements

ROOT = Path(__file__).resolve().parents[2]
STORE = ROOT / "src" / "bettercompute" / "store"
STATEMENTS = list(statements().values())
by_name = pytest.mark.parametrize("statement", STATEMENTS, ids=lambda statement: statement.name)

# Rows are locked in this order, and then everything else is written; within a table by its key.
LOCK_ORDER = ("node_sessions", "nodes", "node_certs", "commands")
KEYS = {"node_sessions": "node_id", "nodes": "node_id", "node_certs": "serial", "commands": "id"}
FENCES = ("session_epoch", "session_id", "gateway_id")
CLOCKS = re.compile(
    r"\b(now\s*\(|clock_timestamp|statement_timestamp|transaction_timestamp|current_(?:timestamp|date|time)\b"
    r"|localtime(?:stamp)?\b|timeofday|'now'|random\s*\(|gen_random_uuid|uuidv7)",
    re.IGNORECASE,
)
# compute_now and to_ms are the clock's own; a function that calls the clock by that name is not another clock.
OUR_CLOCK = re.compile(r"\bcompute_now\(\)")

_STRINGS_AND_COMMENTS = re.compile(r"/\*.*?\*/|--[^\n]*|'(?:[^']|'')*'", re.DOTALL)
_TOUCHED = re.compile(
    r"\bUPDATE\s+(?!OF\b|SKIP\b|NOWAIT\b)(?P<updated>\w+)|\bDELETE\s+FROM\s+(?P<deleted>\w+)|"
    r"\bINSERT\s+INTO\s+(?P<inserted>\w+)|\bFOR\s+(?P<strength>NO\s+KEY\s+UPDATE|UPDATE|SHARE|KEY\s+SHARE)\b",
    re.IGNORECASE,
)


def bare(sql: str) -> str:
    """The statement without comments; strings emptied, so that no word in them counts."""
    return _STRINGS_AND_COMMENTS.sub(lambda match: "''" if match[0].startswith("'") else " ", sql)


@dataclass(frozen=True)
class Part:
    """A common table expression by its name, or the main query under the empty name."""

    name: str
    text: str


def parts(sql: str) -> list[Part]:
    """The statement's common table expressions in their order, then its main query."""
    text = bare(sql).strip()
    if not re.match(r"WITH\b", text, re.IGNORECASE):
        return [Part("", text)]
    found = []
    rest = text[len("WITH") :]
    while head := re.match(r"[\s,]*(\w+)\s+AS\s+(?:MATERIALIZED\s+)?\(", rest, re.IGNORECASE):
        end = closing(rest, head.end() - 1)
        found.append(Part(head[1], rest[head.end() : end]))
        rest = rest[end + 1 :]
    return [*found, Part("", rest)]


def closing(text: str, opening: int) -> int:
    """Where the parenthesis at `opening` is closed."""
    depth = 0
    for index in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    raise AssertionError(f"not closed: {text[opening:]}")


@dataclass(frozen=True)
class Touch:
    """One table that a part locks or writes, and how."""

    table: str
    how: str
    part: Part


def touches(sql: str) -> list[Touch]:
    """Every lock and write of a statement, in the order of its text."""
    found = []
    for part in parts(sql):
        for match in _TOUCHED.finditer(part.text):
            if match["strength"]:
                found.append(Touch(locked_table(part.text, match), "lock", part))
            elif (match["updated"] or "").upper() != "SET":  # ON CONFLICT DO UPDATE SET belongs to its insert
                how = "update" if match["updated"] else "delete" if match["deleted"] else "insert"
                found.append(Touch(match["updated"] or match["deleted"] or match["inserted"], how, part))
    return found


def locked_table(text: str, lock: re.Match[str]) -> str:
    """The table of a FOR clause: the one it names, else the first of the query."""
    before = text[: lock.start()]
    alias = re.match(r"\s+OF\s+(\w+)", text[lock.end() :], re.IGNORECASE)
    pattern = r"\bFROM\s+(\w+)" if alias is None else rf"(?:\bFROM|\bJOIN|,)\s+(\w+)\s+(?:AS\s+)?{alias[1]}\b"
    table = re.search(pattern, before, re.IGNORECASE)
    assert table is not None, text
    return table[1]


def stands_on(sql: str, part: Part, wanted: str) -> bool:
    """Whether a part reads another one, itself or through others: only then does that one run first."""
    texts = {other.name: other.text for other in parts(sql)}
    seen: set[str] = set()
    waiting = [part.text]
    while waiting:
        text = waiting.pop()
        read = {name for name in texts if name and re.search(rf"\b{name}\b", text)} - seen
        seen |= read
        waiting += [texts[name] for name in read]
    return wanted in seen


def test_a_file_of_statements_belongs_to_a_module_of_its_name() -> None:
    groups = {path.stem for path in loader.QUERIES.glob("*.sql")}
    assert groups == {group for group in groups if (STORE / f"{group}.py").exists()}


# The simulator puts a fleet into the tables that joined before the story begins, past JoinService; and what plays the
# database itself copies tables and watches them.
SIMULATOR = ROOT / "src/bettercompute/testing/sim"
PLAYS_THE_DATABASE = [SIMULATOR / f"{name}.py" for name in ("fleet", "copies", "ledger", "unchanged")]


def test_sql_is_only_in_the_store() -> None:
    pattern = re.compile(r"\b(SELECT\s+.+\s+FROM|INSERT\s+INTO|UPDATE\s+\w+\s+SET|DELETE\s+FROM)\b")
    elsewhere = [
        str(path)
        for path in (ROOT / "src").rglob("*.py")
        # SQLite's own statements are the journal's.
        if path.parent != STORE
        and path not in PLAYS_THE_DATABASE
        and not path.name.startswith("journal")
        and pattern.search(path.read_text())
    ]
    assert elsewhere == []


def test_every_statement_is_used() -> None:
    text = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert [statement.name for statement in STATEMENTS if f'"{statement.name}"' not in text] == []


@by_name
def test_marks_are_true(statement: Statement) -> None:
    text = bare(statement.sql)
    if statement.mark == "fenced":
        for column in FENCES:
            assert re.search(rf"\b{column}\s*(=|\)\s*IN|,)", text), f"a fenced statement must compare {column}"
        assert "holds_lease" in text, "a fenced statement must read the gateway's lease"
    if statement.mark == "fact":
        compared = [
            column
            for column in ("session_epoch", "session_id", "gateway_id")
            if re.search(rf"\b{column}\b", text) or column in statement.arguments
        ]
        assert not compared, f"a fact is true whatever session carried it, this compares {compared}"


@by_name
def test_only_the_clock_of_record_is_read(statement: Statement) -> None:
    text = OUR_CLOCK.sub(" ", re.sub(r"/\*.*?\*/|--[^\n]*", " ", statement.sql))
    assert not CLOCKS.search(text)


def test_migrations_read_the_clock_by_its_name_only() -> None:
    for path in sorted((STORE / "migrations").glob("*.sql")):
        text = OUR_CLOCK.sub(" ", re.sub(r"--[^\n]*", " ", path.read_text()))
        clocks = [match[0] for match in CLOCKS.finditer(text)]
        # The one definition of the clock.
        assert clocks == (["statement_timestamp"] if path.name.startswith("0001") else []), path


@by_name
def test_locks_are_taken_in_their_order(statement: Statement) -> None:
    ranks = [LOCK_ORDER.index(touch.table) for touch in touches(statement.sql) if touch.table in LOCK_ORDER
             and touch.how != "insert"]  # fmt: skip
    assert ranks == sorted(ranks), "lock order: " + ", ".join(LOCK_ORDER)


@by_name
def test_rows_are_locked_in_the_order_of_their_key(statement: Statement) -> None:
    for touch in touches(statement.sql):
        if touch.how != "lock" or touch.table not in KEYS:
            continue
        one_row = rf"\b{KEYS[touch.table]}\s*=\s*\$\d+"
        in_order = rf"ORDER\s+BY\s+(?:\w+\.)?{KEYS[touch.table]}\b"
        ordered = re.search(in_order, touch.part.text, re.IGNORECASE)
        assert ordered or re.search(one_row, touch.part.text), (
            f"{touch.table}: ORDER BY {KEYS[touch.table]} before the lock"
        )


@by_name
def test_many_rows_are_locked_before_they_are_written(statement: Statement) -> None:
    touched = touches(statement.sql)
    for index, touch in enumerate(touched):
        if touch.how not in {"update", "delete"} or touch.table not in KEYS:
            continue
        key = KEYS[touch.table]
        locked_first = any(
            lock.how == "lock" and lock.table == touch.table and stands_on(statement.sql, touch.part, lock.part.name)
            for lock in touched[:index]
        )
        # One row: its key is an argument, or comes from a part that has at most that one row.
        single = re.search(rf"\b{key}\s*=\s*(\$\d+|(taken|allowed)\.{key})", touch.part.text)
        assert locked_first or single, f"{touch.table}: first SELECT ... ORDER BY {key} FOR NO KEY UPDATE, and read it"


@by_name
async def test_postgres_takes_it(statement: Statement, prepared) -> None:
    try:
        await prepared(statement)
    except StatementFailed as failure:
        pytest.fail(str(failure))


@pytest.fixture(scope="module")
def module_dsn(postgres_server):
    """One migrated database for all statements: they are prepared, not run."""
    address = postgres_server.create_database()
    yield address
    postgres_server.drop_database(address)


@pytest.fixture
async def prepared(module_dsn):
    from bettercompute.store.database import DedicatedConnection

    connection = await DedicatedConnection.open(module_dsn, application_name="tests")
    numbers = itertools.count(1)

    async def prepare(statement: Statement) -> None:
        if statement.sql.partition("*/")[2].strip().startswith("LOCK"):
            return  # a utility statement cannot be prepared
        await connection.script(f"PREPARE p{next(numbers)} AS {statement.sql}")

    yield prepare
    await connection.close()


@pytest.mark.parametrize(
    ("sql", "order"),
    [
        ("UPDATE commands SET state = 1 WHERE id = $1", [("commands", "update")]),
        (
            """WITH a AS (SELECT c.id FROM commands c JOIN x ON true ORDER BY c.id FOR NO KEY UPDATE OF c),
               b AS (INSERT INTO outbox (id) SELECT 1 ON CONFLICT DO UPDATE SET id = 2) DELETE FROM nodes n USING a""",
            [("commands", "lock"), ("outbox", "insert"), ("nodes", "delete")],
        ),
        ("SELECT 'UPDATE nodes' FROM node_sessions FOR SHARE -- UPDATE commands", [("node_sessions", "lock")]),
    ],
)
def test_the_reader_of_statements_sees_what_they_do(sql: str, order: list[tuple[str, str]]) -> None:
    assert [(touch.table, touch.how) for touch in touches(sql)] == order


def test_the_reader_of_statements_knows_what_runs_first() -> None:
    sql = "WITH a AS (SELECT 1), b AS (SELECT * FROM a), c AS (SELECT 2) UPDATE nodes SET x = 1 FROM b"
    main = parts(sql)[-1]
    assert [stands_on(sql, main, name) for name in "abc"] == [True, True, False]
