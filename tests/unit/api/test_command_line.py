"""The command line against the API over a socket: rolling runs, live output, and an API that restarts meanwhile.

See docs/operations.md, "Runs".
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable

import pytest
from typer.testing import CliRunner, Result

from bettercompute.api import events
from bettercompute.api.app import create_app
from bettercompute.api.context import ApiContext
from bettercompute.cli import client, rolling, running
from bettercompute.cli.better_compute import app
from bettercompute.errors import Unavailable
from bettercompute.server import http
from bettercompute.server.http import HttpServer, listen
from bettercompute.store import channels, commands, nodes, outbox
from bettercompute.store.database import Database, DedicatedConnection
from bettercompute.store.outbox import NewEvent


class Served:
    """The API on a port that stays the same when it restarts."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._http = HttpServer(create_app(context), listener=listen("127.0.0.1", 0, purpose="api"))
        self.url = self._http.url

    async def restart(self) -> None:
        """End every connection, and begin again as another process would: without what it had seen."""
        await self._http.stop()
        port = int(self.url.rpartition(":")[2])
        self._http = HttpServer(create_app(self._context), listener=listen("127.0.0.1", port, purpose="api"))

    async def stop(self) -> None:
        await self._http.stop()


@pytest.fixture
async def served(clients, context: ApiContext, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    # Those who follow the events do not end of themselves.
    monkeypatch.setattr(http, "GRACEFUL_STOP_S", 0.1)
    server = Served(context)
    yield server
    await server.stop()


@pytest.fixture
async def bettercompute(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., asyncio.Task[Result]]]:
    """Runs the command line in a thread. A run that nobody ends gives up in time for the thread to end, too."""
    monkeypatch.setattr(rolling, "GRACE_S", 0.0)
    opened: list[client.ApiClient] = []
    make = client.ApiClient.__init__

    def record(self: client.ApiClient, **arguments: str) -> None:
        opened.append(self)
        make(self, **arguments)

    monkeypatch.setattr(client.ApiClient, "__init__", record)

    def start(*arguments: str, token: str = "secret-operator") -> asyncio.Task[Result]:
        environment = {"BETTER_COMPUTE_API": served.url, "BETTER_COMPUTE_TOKEN": token}
        bounded = ["--not-after", "20s", "--timeout", "1s"] if arguments[0] == "run" else []
        return asyncio.create_task(asyncio.to_thread(CliRunner().invoke, app, [*arguments, *bounded], env=environment))

    yield start
    # A process ends with its connections; here they would outlive it.
    for one in opened:
        one.close()


@pytest.fixture
async def asked(dsn: str) -> AsyncIterator[Callable[[], object]]:
    """Waits until somebody was asked something: a notification for the gateways."""
    heard: asyncio.Queue[str] = asyncio.Queue()
    connection = await DedicatedConnection.open(dsn, application_name="tests")
    for channel in (channels.COMMANDS, channels.DISPATCH):
        await connection.listen(channel, heard.put_nowait)

    async def wait() -> list[str]:
        return sorted((await asyncio.wait_for(heard.get(), 20)).split(","))

    yield wait
    await connection.close()


async def end(database: Database, node_id: str, *, state: int = 5, output: bytes = b"") -> None:
    """A node has done what it was asked."""
    async with database.transaction() as transaction:
        rows = await transaction.query(
            "UPDATE commands SET state = $2, reason = $3, finished_at = compute_now()"
            " WHERE node_id = $1 AND state < 5 RETURNING id",
            node_id,
            state,
            "" if state == 5 else "broken",
        )
        for row in rows:
            await transaction.query(
                "INSERT INTO command_output (command_id, output_offset, node_id, data) "
                " SELECT $1, 0, $2, $3::bytea WHERE octet_length($3::bytea) > 0",
                row["id"],
                node_id,
                output,
            )
        await commands.tell_finished(transaction, command_ids=[row["id"] for row in rows])


@pytest.fixture
async def four_nodes(database: Database) -> None:
    for number in range(1, 5):
        async with database.transaction() as transaction:
            await nodes.insert_joined(
                transaction,
                nodes.JoinedNode(
                    node_id=f"n{number}", site="default", role="node", tenant_controlled=False, attestor="join-token"
                ),
            )


async def test_a_run_shows_what_its_nodes_write_and_who_failed(bettercompute, asked, database, four_nodes) -> None:
    run = bettercompute("run", "inventory.refresh", "--node", "n1", "--node", "n2")
    assert await asked() == ["n1", "n2"]
    await end(database, "n1", output=b"first\nn2: \x1b[31mforged\nlast \xc3")
    await end(database, "n2", state=6)
    result = await asyncio.wait_for(run, 20)
    assert result.exit_code == 1, result.output
    assert result.stdout.splitlines() == [
        "n1: first",
        "n1: n2: \ufffd[31mforged",
        "n1: last \ufffd",
        "1 of 2 succeeded",
        "n2: failed (broken)",
    ]
    assert "n1: succeeded" in result.stderr


async def test_a_rolling_run_asks_a_few_at_a_time_until_too_many_fail(
    bettercompute, asked, database, four_nodes
) -> None:
    run = bettercompute("run", "inventory.refresh", "--all", "--max-concurrency", "50%", "--max-failures", "0")
    assert await asked() == ["n1", "n2"]
    await end(database, "n2")
    assert await asked() == ["n3"], "as soon as one has ended, not when all have"
    await end(database, "n1", state=6)
    await end(database, "n3")
    result = await asyncio.wait_for(run, 20)
    assert result.exit_code == 1
    assert "2 of 3 succeeded" in result.stdout
    assert "1 failed and 0 did not answer: 1 nodes were not asked: n4" in result.stderr
    [batches] = await database.query("SELECT count(DISTINCT batch_id) AS batches FROM commands")
    assert batches["batches"] == 1


async def test_a_run_and_its_steps_survive_a_restart_of_the_api(
    bettercompute, asked, database, served, four_nodes, monkeypatch
) -> None:
    monkeypatch.setattr(rolling, "RETRY_S_MIN", 0.01)
    run = bettercompute("run", "inventory.refresh", "--selector", "site=default", "--max-concurrency", "3", "--json")
    assert await asked() == ["n1", "n2", "n3"]
    await served.restart()
    await end(database, "n1")
    assert await asked() == ["n4"]
    await served.restart()
    for node_id in ("n2", "n3", "n4"):
        await end(database, node_id)
    result = await asyncio.wait_for(run, 30)
    assert result.exit_code == 0, result.output
    told = [json.loads(line) for line in result.stdout.splitlines()]
    assert [command["state"] for command in told] == ["succeeded"] * 4


async def test_an_api_that_stays_away_ends_the_wait_and_names_the_way_back(
    bettercompute, asked, served, four_nodes, monkeypatch
) -> None:
    for module in (rolling, running):
        monkeypatch.setattr(module, "RESTART_S", 0.2)
    run = bettercompute("run", "inventory.refresh", "--node", "n1")
    await asked()
    await served.stop()
    result = await asyncio.wait_for(run, 30)
    assert result.exit_code == 3, result.output
    assert "the commands go on: better-compute commands list --batch" in result.stderr


async def test_labels_select_who_is_asked(bettercompute, four_nodes) -> None:
    labelled = await bettercompute("nodes", "label", "n2", "gpu=h100", "rack=7")
    assert labelled.stdout == "n2: gpu=h100, rack=7\n"
    assert (await bettercompute("nodes", "label", "n2", "rack-")).stdout == "n2: gpu=h100\n"
    listed = await bettercompute("nodes", "list", "--selector", "gpu", "--json")
    assert json.loads(listed.stdout)["node_id"] == "n2"
    preview = await bettercompute("run", "inventory.refresh", "--selector", "gpu=h100", "--dry-run")
    assert preview.stdout == "node\tstate\nn2\tjoined\n"
    assert "none was asked" in preview.stderr
    commands_listed = await bettercompute("commands", "list", "--selector", "gpu=h100")
    assert "no commands" in commands_listed.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run", "inventory.refresh", "--selector", "gpu==", "--all"), "one of the three"),
        (("run", "inventory.refresh", "--selector", "a=1,,"), "selector, character 5"),
        (("run", "inventory.refresh", "--all", "--max-failures", "1"), "needs --max-concurrency"),
        (("run", "inventory.refresh", "--all", "--max-concurrency", "101%"), "write a number, as 10"),
        (("run", "inventory.refresh", "--all", "--max-concurrency", "1", "--detach"), "does not go with --detach"),
        (("nodes", "label", "n1", "gpu"), "write KEY=VALUE"),
        (("nodes", "label", "n1", "bc.dev/cap.nvml=1"), "the control plane's own"),
    ],
    ids=["both", "grammar", "failures", "share", "detach", "label", "system"],
)
async def test_a_mistake_is_a_sentence(bettercompute, four_nodes, arguments, says) -> None:
    result = await bettercompute(*arguments)
    assert (result.exit_code, says in result.stderr) == (2, True), result.output


async def publish(context: ApiContext, *names: str, payload: dict[str, str] | None = None) -> None:
    made = [NewEvent(id=name, type="node.joined", node_id="n1", payload=payload or {}) for name in names]
    async with context.database.transaction() as transaction:
        await outbox.publish(transaction, made)
    await outbox.assign_positions(context.database)


async def test_followed_events_go_on_after_a_restart(context, served, monkeypatch) -> None:
    monkeypatch.setattr(client, "RESUME_S_MIN", 0.01)
    monkeypatch.setattr(client, "RESUME_FOR_S", 0.2)
    await publish(context, "a")
    api = client.ApiClient(address=served.url, token="secret-viewer")
    stream = api.server_sent("/v1/events", after=0)
    assert (await asyncio.to_thread(next, stream))[1]["id"] == "a"
    await served.restart()
    await publish(context, "b")
    assert (await asyncio.wait_for(asyncio.to_thread(next, stream), 20))[1]["id"] == "b"
    await served.stop()
    with pytest.raises(Unavailable, match="did not answer"):
        await asyncio.wait_for(asyncio.to_thread(next, stream), 20)
    api.close()


async def test_a_slow_reader_over_a_socket_sees_why_it_was_dropped(context, served, monkeypatch) -> None:
    monkeypatch.setattr(events, "SEND_S", 0.5)
    # Three pages: more than the buffers of a connection hold.
    for number in range(30):
        await publish(context, *(f"{number}-{item}" for item in range(20)), payload={"text": "x" * 40_000})
    reader = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])))
    reader.settimeout(20)
    reader.sendall(
        b"GET /v1/events?after=0 HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\n"
        b"authorization: Bearer secret-viewer\r\n\r\n"
    )
    # It begins to read when it has been dropped, within the time in which it is told why.
    while context.finished.subscribers == 0:
        await context.finished.wait(timeout_s=0.01)
    while context.finished.subscribers:
        await context.finished.wait(timeout_s=0.01)

    def rest() -> bytes:
        read = b""
        while chunk := reader.recv(1 << 20):
            read += chunk
            if read.endswith(b"0\r\n\r\n"):
                break
        return read

    told = await asyncio.to_thread(rest)
    reader.close()
    assert b'event: dropped\ndata: {"reason": "slow-consumer"' in told[-400:]
    assert told.count(b"\nevent: node.joined") < 600


async def test_a_command_is_shown_with_all_of_its_output(bettercompute, asked, database, four_nodes) -> None:
    made = await bettercompute("run", "inventory.refresh", "--node", "n1", "--detach", "--json")
    command_id = json.loads(made.stdout)["commands"][0]["id"]
    await database.query(
        "INSERT INTO command_output (command_id, output_offset, node_id, data) "
        "SELECT $1, n, 'n1', CASE n WHEN 150 THEN '\\xc3'::bytea WHEN 151 THEN '\\xa9' ELSE '.' END "
        "FROM generate_series(10, 250) n",
        command_id,
    )
    shown = await bettercompute("commands", "show", command_id)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.endswith("." * 140 + "é" + "." * 99)
    assert "[10 bytes of output were dropped here]" in shown.stderr


async def test_api_tokens_from_the_command_line(bettercompute) -> None:
    made = await bettercompute(
        "api-token", "create", "ci", "--role", "viewer", "--label", "rack=7", token="secret-admin"
    )
    assert made.exit_code == 0, made.output
    assert made.stdout.startswith("bct1_")
    assert "ci, viewer, nodes with rack=7, until it is revoked" in made.stderr
    seen = await bettercompute("nodes", "list", token=made.stdout.strip())
    assert seen.exit_code == 0, seen.output
    listed = await bettercompute("api-token", "list", token="secret-admin")
    assert "nodes with rack=7" in listed.stdout
    assert made.stdout.strip() not in listed.stdout
    assert (await bettercompute("api-token", "revoke", "ci", token="secret-admin")).exit_code == 0
    assert (await bettercompute("nodes", "list", token=made.stdout.strip())).exit_code != 0
    wrong = await bettercompute("api-token", "create", "x", "--label", "rack", token="secret-admin")
    assert (wrong.exit_code, "write key=value" in wrong.stderr) == (2, True)


async def test_what_a_node_told_of_itself_on_the_command_line(
    bettercompute, context: ApiContext, two_nodes: object
) -> None:
    await context.database.query(
        "INSERT INTO node_events (node_id, journal_id, seq, event_id, type, occurred_at, payload)"
        " SELECT 'n1', 'j', n, 'e' || n, 'daemon.started', 'epoch', '{\"n\": 1}' FROM generate_series(1, 502) n"
    )
    await context.database.query("INSERT INTO node_event_gaps VALUES ('n1', 'j', 503, 504)")
    shown = await bettercompute("nodes", "events", "n1", "--limit", "501")
    lines = shown.stdout.splitlines()
    assert (shown.exit_code, len(lines)) == (0, 501), shown.output
    assert lines[0] == '1970-01-01T00:00:00.000Z  2  daemon.started  {"n": 1}'
    assert "events 503 to 504 of journal j are lost: the node dropped them" in shown.stderr
    as_json = await bettercompute("nodes", "events", "n1", "--limit", "1", "--json")
    assert json.loads(as_json.stdout)["seq"] == 502
    unknown = await bettercompute("nodes", "events", "n3")
    assert (unknown.exit_code != 0, "no node n3" in unknown.stderr) == (True, True)
