"""A real `bcd node` process over real TLS, against a gateway that a test plays: kill -9, signals, weight."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from bettercompute.daemon.config import Config
from bettercompute.pki import certificates, keyfiles
from bettercompute.pki.certificates import Authority
from bettercompute.protocol import messages
from bettercompute.system import system_world
from bettercompute.transport.streams import ServerSecrets, serve, server_context
from tests.unit.daemon.fake_gateway import FakeGateway, control_plane, join

SUCCEEDED = messages.COMMAND_STATE_SUCCEEDED
FAILED = messages.COMMAND_STATE_FAILED


@dataclass
class Bcd:
    """A node whose only collector of facts can be held by a named pipe."""

    gateway: FakeGateway
    config: Path
    facts: Path
    log: Path
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)

    async def start(self) -> asyncio.subprocess.Process:
        with self.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "bettercompute.cli.bcd", "node", "--config", str(self.config)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    async def run(self, *arguments: str) -> tuple[int, str, str]:
        """Run another `bcd` command; return its exit code and what it printed."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bettercompute.cli.bcd", *arguments, "--config", str(self.config)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()

    def hold_with(self, script: str) -> None:
        """Make the one fact program do this."""
        program = self.facts / "held"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)


def serving(ca: Authority) -> ServerSecrets:
    now_ms = system_world().clock.now_ms()
    key = certificates.generate_key()
    leaf = certificates.make_serving_leaf(
        ca, public_key=key.public_key(), names=("127.0.0.1",), serial=bytes(15) + b"\2", now_ms=now_ms
    )
    chain = (leaf.public_bytes(Encoding.DER), ca.certificate.public_bytes(Encoding.DER))
    return ServerSecrets(certificates.chain_to_pem(chain), keyfiles.key_to_pem(key), client_ca_pem=b"")


@pytest.fixture
async def bcd(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Bcd]:
    """A node and its gateway; the parameter spoils what one of them believes."""
    spoiled = getattr(request, "param", "")
    gateway, keys = FakeGateway(), control_plane()
    client_ca = control_plane().node_ca if spoiled == "client-ca" else keys.node_ca
    ca = certificates.make_serving_ca(serial=bytes(16), now_ms=system_world().clock.now_ms())
    secrets = serving(ca)
    secrets = ServerSecrets(
        secrets.certificate_chain_pem,
        secrets.private_key_pem,
        client_ca_pem=client_ca.certificate.public_bytes(Encoding.PEM),
    )
    context = server_context(secrets)
    server = await serve(gateway.handle, tls=lambda: context, world=system_world())
    state, facts = tmp_path / "state", tmp_path / "facts"
    facts.mkdir(mode=0o700)
    config = tmp_path / "config.toml"
    config.write_text(f'state_dir = "{state}"\n[inventory]\nfacts_dir = "{facts}"\nfact_timeout_ms = 60000\n')
    join(
        Config(state_dir=state),
        keys=keys,
        gateway_urls=(f"https://127.0.0.1:{server.port}",),
        serving_ca_pins=("ab" * 32 if spoiled == "pin" else certificates.spki_sha256(ca.certificate),),
        age_ms=48 * 3_600_000 if spoiled == "age" else 0,
    )
    node = Bcd(gateway, config, facts, tmp_path / "bcd.log")
    yield node
    for process in node.processes:
        if process.returncode is None:
            process.kill()
        await process.wait()
    await server.close()


async def line_of(pipe: Path) -> str:
    """Wait for a line that a program writes into a named pipe."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    file = os.fdopen(os.open(pipe, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), file)
    try:
        return (await asyncio.wait_for(reader.readline(), 60)).decode().strip()
    finally:
        transport.close()


async def test_kill_9_in_the_middle_of_a_command_ends_its_program_and_the_command_once(
    bcd: Bcd, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    bcd.hold_with(f"echo $$ > {pipe}; sleep 600 & sleep 600")
    daemon = await bcd.start()
    session = await bcd.gateway.session()
    session.welcome()
    session.command("c1", payload=messages.InventoryRefreshPayload(sections=["facts"]))
    program = os.pidfd_open(int(await line_of(pipe)))
    daemon.kill()
    await daemon.wait()
    bcd.hold_with('echo \'{"rack": "r1"}\'')
    await bcd.start()
    again = await bcd.gateway.session()
    # What the killed daemon left running has ended before the next one says Hello.
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(program, ended.set)
    await asyncio.wait_for(ended.wait(), 30)
    loop.remove_reader(program)
    os.close(program)
    assert again.hello.journal_id == session.hello.journal_id
    assert list(again.hello.running_command_ids) == []
    again.welcome()
    events = await again.frame("events")
    assert isinstance(events, messages.EventBatch)
    again.command("c1", payload=messages.InventoryRefreshPayload(sections=["facts"]))
    update = await again.update("c1", SUCCEEDED, FAILED)
    assert update.state == SUCCEEDED, update.message
    started = json.loads(
        next(event.payload_json for event in reversed(events.events) if event.type == "daemon.started")
    )
    assert started["ended_processes"] == 1


async def test_a_result_that_was_not_acked_survives_kill_9(bcd: Bcd) -> None:
    bcd.hold_with('echo \'{"rack": "r1"}\'')
    daemon = await bcd.start()
    session = await bcd.gateway.session()
    session.welcome()
    session.command("c1", payload=messages.InventoryRefreshPayload(sections=["facts"]))
    first = await session.update("c1", SUCCEEDED, FAILED)
    daemon.kill()
    await daemon.wait()
    await bcd.start()
    again = await bcd.gateway.session()
    assert list(again.hello.done_results) == [first]


async def test_term_is_an_orderly_end_and_status_says_how_it_is(bcd: Bcd) -> None:
    daemon = await bcd.start()
    session = await bcd.gateway.session()
    code, out, _ = await bcd.run("status", "--json")
    assert (code, json.loads(out)["state"]) == (1, "connecting")
    session.welcome()
    await session.frame("heartbeat")
    code, out, _ = await bcd.run("status")
    assert code == 0
    assert re.search(r"^state +connected$", out, re.MULTILINE)
    code, _, err = await bcd.run("journal", "check")
    assert (code, "another bcd" in err) == (3, True)
    daemon.send_signal(signal.SIGTERM)
    await session.ended()
    assert await asyncio.wait_for(daemon.wait(), 30) == 0
    code, out, _ = await bcd.run("journal", "check", "--json")
    assert (code, json.loads(out)["sound"]) == (0, True)
    for line in bcd.log.read_text().splitlines():
        assert json.loads(line)["level"] in ("info", "warning"), line


@pytest.mark.parametrize(
    ("bcd", "reason", "words", "code"),
    [
        ("pin", "pin-mismatch", "serving CA", 1),
        ("client-ca", "unknown-ca", "certificate", 1),
        ("age", "certificate-expired", "expired", 4),
    ],
    indirect=["bcd"],
)
async def test_log_and_status_say_in_words_what_tls_refused(bcd: Bcd, reason: str, words: str, code: int) -> None:
    await bcd.start()
    async with asyncio.timeout(60):
        while True:
            found, out, _ = await bcd.run("status", "--json")
            if found == code and json.loads(out)["reason_code"] == reason:
                break
    assert words in json.loads(out)["reason"]
    lines = [json.loads(line) for line in bcd.log.read_text().splitlines()]
    assert any(line["event"] == "no session" and words in line["why"] for line in lines)


async def test_an_idle_daemon_is_light(bcd: Bcd) -> None:
    daemon = await bcd.start()
    session = await bcd.gateway.session()
    session.welcome(heartbeat_interval_ms=1_000)
    await session.frame("heartbeat")
    before = cpu_ticks(daemon.pid)
    for _ in range(5):
        await session.frame("heartbeat")
    share = (cpu_ticks(daemon.pid) - before) / os.sysconf("SC_CLK_TCK") / 5
    resident_mb = resident_bytes(daemon.pid) / 2**20
    # Ten times the usual heartbeat rate, so ten times the share that an idle daemon may take.
    assert share <= 0.03, f"{share:.2%} of a core"
    assert resident_mb <= 60, f"{resident_mb:.1f} MB"


def cpu_ticks(process_id: int) -> int:
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def resident_bytes(process_id: int) -> int:
    return int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
