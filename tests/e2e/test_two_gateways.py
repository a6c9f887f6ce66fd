"""Two gateway processes, one database: either may die, stop for a while or be drained, and the database restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from bettercompute.errors import Unavailable
from bettercompute.store import embedded, migrations
from bettercompute.testing.fake_commands import FakeCommands
from bettercompute.testing.postgres import CHEAP_SETTINGS
from bettercompute.testing.profiles import NEVER_ENDS, Answer
from tests.e2e.conftest import BETTER_COMPUTE
from tests.e2e.gateways import POLL_S, Site, free_port, open_site, until

RATE_PER_S = 200
EVENT = ("daemon.started", "{}")
# Who writes which row, by the setting that each gateway's connections carry.
NOTE_WRITES = """
CREATE TABLE noted_writes (number bigserial, process text, relation text, key text);
CREATE FUNCTION note_write() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  INSERT INTO noted_writes (process, relation, key)
  VALUES (current_setting('bc.process', true), TG_TABLE_NAME, to_jsonb(NEW) ->> TG_ARGV[0]);
  RETURN NULL;
END $$;
CREATE TRIGGER noted AFTER UPDATE ON node_sessions FOR EACH ROW EXECUTE FUNCTION note_write('node_id');
CREATE TRIGGER noted AFTER UPDATE ON nodes FOR EACH ROW EXECUTE FUNCTION note_write('node_id');
CREATE TRIGGER noted AFTER UPDATE ON commands FOR EACH ROW EXECUTE FUNCTION note_write('id');
"""


@pytest.fixture
async def site(tmp_path: Path, dsn: str) -> AsyncIterator[Site]:
    async with open_site(tmp_path, dsn) as site:
        yield site


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each command was begun by its daemon."""
    counts: Counter[str] = Counter()
    begin = FakeCommands._begin

    def counting(self: FakeCommands, held: object) -> None:
        counts[held.body.command_id] += 1  # type: ignore[attr-defined] # a HeldCommand
        begin(self, held)  # type: ignore[arg-type] # as above

    monkeypatch.setattr(FakeCommands, "_begin", counting)
    return counts


@pytest.mark.parametrize("nodes", [60, pytest.param(200, marks=pytest.mark.long)])
async def test_kill_of_a_gateway(site: Site, begun: Counter[str], nodes: int) -> None:
    first, second = await site.start_gateways("first", "second")
    daemons = await site.join(nodes)
    for daemon in daemons:
        daemon.levers.answer = Answer(delay_ms=2_000)
    site.run(daemons)
    await site.all_connected(within_s=30)
    first_id, second_id = await site.gateway_id(first), await site.gateway_id(second)
    on_first = {node_id for node_id, row in (await site.rows()).items() if row["gateway_id"] == first_id}
    assert len(on_first) > nodes / 4
    command_ids = await site.enqueue([daemon.node_id for daemon in daemons], per_node=2)
    await until(lambda: sum(begun.values()) >= nodes, what="half of the commands", within_s=20)
    for daemon in daemons:
        daemon.record_events([EVENT] * 5)
    first.kill()
    killed_at = time.monotonic()
    for daemon in daemons:
        daemon.record_events([EVENT] * 5)
    moved = [daemon for daemon in daemons if daemon.node_id in on_first]
    await until(lambda: all(daemon.welcomes == 2 for daemon in moved), what="the sessions of the dead", within_s=60)
    took_s = time.monotonic() - killed_at
    rows = await site.rows()
    assert {row["gateway_id"] for row in rows.values()} == {second_id}
    assert {row["session_epoch"] for node_id, row in rows.items() if node_id not in on_first} == {1}
    assert {row["session_epoch"] for node_id, row in rows.items() if node_id in on_first} == {2}
    await site.until_agreed(within_s=30)
    await site.until_ended(command_ids, within_s=30)
    assert begun == Counter(command_ids), "every command was begun exactly once"
    await until(lambda: not any(len(daemon.events) for daemon in daemons), what="the acks of all events", within_s=20)
    await site.assert_events_whole()
    await site.assert_no_clones()
    # A short run on a full machine says that all come back, not how soon.
    assert took_s < len(on_first) / RATE_PER_S + (60 if nodes < 200 else 10)


@pytest.mark.parametrize("past_its_trust", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_a_paused_gateway_writes_nothing_stale(site: Site, begun: Counter[str], past_its_trust: bool) -> None:
    """Paused past its lease: long enough that it knows (its own fence), or only the database does (the epochs)."""
    first, second = await site.start_gateways("first", "second")
    daemons = await site.join(20, dial=site.dial_to(first))
    for daemon in daemons:
        daemon.levers.answer = NEVER_ENDS
    site.run(daemons)
    await site.all_connected(within_s=30)
    command_ids = await site.enqueue([daemon.node_id for daemon in daemons], per_node=2)
    await until(lambda: sum(begun.values()) == len(command_ids), what="the commands", within_s=20)
    first.pause()
    await wait_past_lease(site, await site.gateway_id(first), really=past_its_trust)
    # What the paused gateway finds in its sockets: results, events, notifications, and ends of streams.
    for daemon in daemons:
        daemon.record_events([EVENT] * 3)
        daemon.commands.finish(f"c-{daemon.node_id}-0")
        daemon.levers.answer = Answer()
    command_ids += await site.enqueue([daemon.node_id for daemon in daemons], per_node=1, prefix="d")
    for daemon in daemons:
        daemon.dial = site.dial_to(second)(site.identities[daemon.node_id])
        daemon.hang_up()
    await until(lambda: all(daemon.welcomes == 2 for daemon in daemons), what="the sessions", within_s=30)
    for daemon in daemons:
        daemon.commands.finish(f"c-{daemon.node_id}-1")
    await site.until_ended(command_ids, within_s=20)
    before = await site.rows()
    await run_script(site, NOTE_WRITES)
    first.go_on()
    await until(lambda: count_log(first, "session closed") == 20, what="the end of the stale sessions", within_s=30)
    first_id = await site.gateway_id(first)
    renewed = "SELECT FROM leases WHERE name = $1 AND expires_at > compute_now() + interval '10 seconds'"
    await until(lambda: site.database.query(renewed, first_id), what="the lease", within_s=30)
    # Whatever it had queued comes before a new session of its own, which it admits again.
    [newcomer] = await site.join(1, dial=site.dial_to(first))
    site.run([newcomer])
    await site.all_connected(within_s=30)
    stale = await site.database.query(
        "SELECT relation, key FROM noted_writes WHERE process = 'first' AND key <> $1", newcomer.node_id
    )
    assert [(row["relation"], row["key"]) for row in stale] == [], "every queued write matched nothing"
    after = await site.rows()
    for node_id, row in before.items():
        assert {**after[node_id]} == {**row}
    assert {row["gateway_id"] for row in before.values()} == {await site.gateway_id(second)}
    assert begun == Counter(command_ids)
    await until(lambda: not any(len(daemon.events) for daemon in daemons), what="the acks of all events", within_s=20)
    await site.assert_events_whole()
    await site.assert_no_clones()


async def run_script(site: Site, script: str) -> None:
    async with site.database.transaction() as transaction:
        await transaction.script(script)


async def wait_past_lease(site: Site, gateway_id: str, *, really: bool) -> None:
    """Wait until a lease has expired, or move its end."""
    if not really:
        await site.database.query(
            "UPDATE leases SET expires_at = compute_now() - interval '1 second' WHERE name = $1", gateway_id
        )
    expired = "SELECT FROM leases WHERE name = $1 AND expires_at < compute_now()"
    await until(lambda: site.database.query(expired, gateway_id), what="the lease's end", within_s=30)


def count_log(gateway: object, event: str) -> int:
    return sum(f'"event": "{event}"' in line for line in gateway.log.read_text().splitlines())  # type: ignore[attr-defined]


async def test_the_drain_command(site: Site, begun: Counter[str]) -> None:
    api_port = free_port()
    first = site.add_gateway("first", roles=("gateway", "api"), more=f"[api]\nport = {api_port}\n")
    second = site.add_gateway("second")
    await asyncio.gather(first.start(), second.start())
    first_id, second_id = await site.gateway_id(first), await site.gateway_id(second)
    daemons = await site.join(60)
    for daemon in daemons:
        daemon.levers.answer = Answer(delay_ms=1_500)
    site.run(daemons)
    await site.all_connected(within_s=30)
    on_first = sum(row["gateway_id"] == first_id for row in (await site.rows()).values())
    command_ids = await site.enqueue([daemon.node_id for daemon in daemons], per_node=2)
    environment = {
        **os.environ,
        "BETTER_COMPUTE_API": f"http://127.0.0.1:{api_port}",
        "BETTER_COMPUTE_TOKEN": (site.folder / "operator-token").read_text().strip(),
    }

    async def gateway_command(*arguments: str) -> list[dict[str, object]]:
        done = await asyncio.to_thread(
            subprocess.run,
            [*BETTER_COMPUTE, "gateway", *arguments, "--json"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    lines = await gateway_command("drain", first_id)
    assert (lines[-1]["event"], lines[-1]["nodes"], lines[-1]["refuses"]) == ("drained", 0, True)
    assert all(line["of"] == on_first for line in lines[:-1])
    await site.all_connected(within_s=30)
    assert {row["gateway_id"] for row in (await site.rows()).values()} == {second_id}
    await site.until_ended(command_ids, within_s=20)
    assert begun == Counter(command_ids)
    reasons = await site.database.query(
        "SELECT payload ->> 'reason' AS reason FROM outbox WHERE type LIKE '%disconnected'"
    )
    # A node that the other gateway has welcomed before its end was written has lost nothing, and no disconnect is told.
    assert {row["reason"] for row in reasons} <= {"stream-ended"}
    assert len(reasons) <= on_first
    await site.assert_no_clones()
    [undone] = await gateway_command("drain", first_id, "--undo")
    assert undone["drain_requested_at"] is None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[embedded.EmbeddedPostgres]:
    """A database server that a test may end."""
    running = embedded.start(tmp_path / "postgres", settings=CHEAP_SETTINGS, initdb_options=("--no-sync",))
    yield running
    running.stop()


@pytest.mark.parametrize("crash", [False, pytest.param(True, marks=pytest.mark.long)])
async def test_the_database_restarts_under_load(
    server: embedded.EmbeddedPostgres, tmp_path: Path, begun: Counter[str], crash: bool
) -> None:
    await migrations.migrate(server.dsn)
    async with open_site(tmp_path, server.dsn) as site:
        gateways = await site.start_gateways("first", "second")
        ids = [await site.gateway_id(gateway) for gateway in gateways]
        daemons = await site.join(60)
        for daemon in daemons:
            daemon.levers.answer = Answer(delay_ms=100)
        site.run(daemons)
        await site.all_connected(within_s=30)
        command_ids: list[str] = []
        load = asyncio.create_task(keep_busy(site, command_ids))
        await until(lambda: len(begun) > 100, what="the load", within_s=20)
        if crash:
            os.kill(server.process_id, signal.SIGQUIT)
            await until(lambda: not server.running(), what="the server's end", within_s=20)
        server.stop()
        server.start()
        before = len(begun)
        await until(lambda: len(begun) > before + 100, what="the load after the restart", within_s=30)
        load.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await load
        await site.until_ended(command_ids, within_s=40)
        assert begun == Counter(command_ids), "every command was begun exactly once"
        await until(
            lambda: not any(len(daemon.events) for daemon in daemons), what="the acks of all events", within_s=40
        )
        await site.assert_events_whole()
        await site.all_connected(within_s=30)
        await site.until_agreed(within_s=45)
        assert [await site.gateway_id(gateway) for gateway in gateways] == ids, "the leases held"
        await site.assert_no_clones()


async def keep_busy(site: Site, command_ids: list[str]) -> None:
    """Have commands run and events happen all the time."""
    node_ids = [daemon.node_id for daemon in site.daemons]
    number = 0
    while True:
        number += 1
        for daemon in site.daemons:
            daemon.record_events([EVENT])
        # Whether a batch was committed when the answer is lost is found out by its ids.
        wanted = [f"l{number}-{node_id}-0" for node_id in node_ids]
        while True:
            with contextlib.suppress(Unavailable):
                if not await site.database.query("SELECT FROM commands WHERE id = $1", wanted[0]):
                    await site.enqueue(node_ids, per_node=1, prefix=f"l{number}")
                break
            await asyncio.sleep(POLL_S)
        command_ids += wanted
        await asyncio.sleep(0.2)
