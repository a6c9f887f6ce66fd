"""Every flood of a hostile client leaves a good one answered within 5 s, and the gateway's memory within its bounds.

The gateway is a process of its own behind real TLS; the attackers are another. The good client dials, says Hello and
waits for its Welcome, over and over. Memory is the gateway's resident set; what the kernel holds for sockets is
bounded by `SOCKET_BUFFER_BYTES` and not in it. The figures are printed: `pytest -s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import pytest

from bettercompute.protocol import messages, service
from bettercompute.protocol.frames import decode_message, encode_message
from bettercompute.protocol.limits import MIB
from bettercompute.testing.fake_dial import over_tls
from bettercompute.transport.streams import CallEnded, CallRefused, DialFailed, raise_for_status
from tests.e2e.flooding import FLOODS
from tests.e2e.gateways import WORLD, GatewayProcess, Site, open_site, until

ANSWERED_WITHIN_S = 5.0
PEAK_GROWTH_MAX_MIB = 256
KEPT_MAX_MIB = 64
KEPT_OF_ALL_MAX_MIB = 128
"""After all floods, one after the other: a leak would go on growing, what the allocator keeps does not."""
SETTLES_WITHIN_S = 15.0
GOOD_CLIENTS = 10
PROBE_EVERY_S = 0.1
ATTACKERS = {"half-open": (400, 10_000), "slowloris": (40, 1_000), "never-read": (8, 64), "zero-window": (5, 20)}
ATTACKERS_ELSE = (8, 64)
"""How many connections attack at once: in `make test`, and in full."""


@dataclass
class Memory:
    """The resident set of a process."""

    pid: int

    def _mib(self, key: str) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith(key))
        return int(line.split()[1]) / 1024

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    @property
    def now_mib(self) -> float:
        return self._mib("VmRSS")

    @property
    def peak_mib(self) -> float:
        return self._mib("VmHWM")


@dataclass
class GoodClient:
    """Says Hello on new connections, in turn for several nodes: a node may say it once a second."""

    site: Site
    gateway: GatewayProcess
    node_ids: list[str]
    answered_s: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    async def run(self, done: asyncio.Event) -> None:
        """Go on until told, and end with an answer: one that is overdue counts."""
        for node_id in cycle(self.node_ids):
            if done.is_set():
                return
            began = time.monotonic()
            try:
                async with asyncio.timeout(ANSWERED_WITHIN_S * 3):
                    await self._say_hello(node_id)
            except (CallEnded, CallRefused, DialFailed, TimeoutError) as error:
                self.refused.append(f"{type(error).__name__}: {error}")
            self.answered_s.append(time.monotonic() - began)
            await asyncio.sleep(PROBE_EVERY_S)

    async def _say_hello(self, node_id: str) -> None:
        hello = messages.Hello(
            node_id=node_id,
            role=messages.AGENT_ROLE_NODE,
            boot_id=f"boot-{node_id}",
            journal_id=f"journal-{node_id}",
            proto_min=1,
            proto_max=1,
            daemon_version="1.0.0",
            process_id="process",
        )
        connection = await over_tls(self.site.target(self.gateway.url, self.site.identities[node_id]), world=WORLD)()
        try:
            call = await connection.call(service.SESSION, {"x-bc-attempt": "0"})
            call.send(encode_message(messages.AgentFrame(hello=hello)))
            first = await call.receive()
            raise_for_status(call)
            assert first is not None
            assert decode_message(messages.ServerFrame, first).HasField("welcome")
        finally:
            connection.close()


async def test_floods_harm_nobody_else(tmp_path: Path, dsn: str) -> None:
    await flood_all(tmp_path, dsn, full=False, seconds=0.7)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_full_floods_harm_nobody_else(tmp_path: Path, dsn: str) -> None:
    await flood_all(tmp_path, dsn, full=True, seconds=5.0)


async def flood_all(folder: Path, dsn: str, *, full: bool, seconds: float) -> None:
    async with open_site(folder, dsn) as site:
        [gateway] = await site.start_gateways("flooded")
        nodes = [daemon.node_id for daemon in await site.join(GOOD_CLIENTS + ATTACKERS["zero-window"][full])]
        pems = []
        for node_id in nodes[GOOD_CLIENTS:]:
            pem = folder / f"{node_id}.pem"
            identity = site.identities[node_id]
            pem.write_bytes(identity.certificate_chain_pem + identity.private_key_pem)
            pems.append(str(pem))
        assert gateway.process is not None
        memory = Memory(gateway.process.pid)
        await attacked(site, gateway, nodes[:GOOD_CLIENTS], "ping", seconds=1, count=4, pems=[])
        at_first_mib = memory.now_mib
        failures = []
        for flood in FLOODS:
            before_mib = memory.now_mib
            memory.forget_peak()
            count = ATTACKERS.get(flood, ATTACKERS_ELSE)[full]
            good, figures = await attacked(
                site, gateway, nodes[:GOOD_CLIENTS], flood, seconds=seconds, count=count, pems=pems
            )
            peak_mib = memory.peak_mib - before_mib
            kept_mib = await settled(memory, before_mib)
            slowest_s = max(good.answered_s)
            print(  # noqa: T201 - the figures are the result
                f"{flood:20} {count:6} at once, {figures['connections']:6} connections, "
                f"{figures['ended_by_server']:6} ended by the server, {figures['sent_bytes'] / MIB:8.1f} MiB sent; "
                f"{len(good.answered_s):4} Hellos, slowest {slowest_s:.2f} s, {len(good.refused)} refused; "
                f"memory +{peak_mib:.0f} MiB at most, +{kept_mib:.0f} MiB kept",
                flush=True,
            )
            if slowest_s > ANSWERED_WITHIN_S or good.refused:
                failures.append(f"{flood}: slowest {slowest_s:.2f} s, refused {good.refused[:3]}")
            if peak_mib > PEAK_GROWTH_MAX_MIB or kept_mib > KEPT_MAX_MIB:
                failures.append(f"{flood}: +{peak_mib:.0f} MiB, +{kept_mib:.0f} MiB kept")
        assert memory.now_mib - at_first_mib <= KEPT_OF_ALL_MAX_MIB
        assert not failures, "\n".join(failures)


async def attacked(
    site: Site, gateway: GatewayProcess, node_ids: list[str], flood: str, *, seconds: float, count: int, pems: list[str]
) -> tuple[GoodClient, dict[str, int]]:
    """Run a flood, with a good client beside it all the while."""
    attacker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.e2e.flooding", flood, str(gateway.port), str(seconds), str(count), *pems),
        stdout=asyncio.subprocess.PIPE,
    )
    good = GoodClient(site, gateway, node_ids)
    done = asyncio.Event()
    probing = asyncio.create_task(good.run(done))
    try:
        async with asyncio.timeout(seconds + 30):
            out, _ = await attacker.communicate()
            done.set()
            await probing
    finally:
        probing.cancel()
        if attacker.returncode is None:
            attacker.kill()
            await attacker.wait()
    assert attacker.returncode == 0, f"the attacker of {flood} failed"
    return good, json.loads(out)


async def settled(memory: Memory, before_mib: float) -> float:
    """Return what is kept once the connections are gone."""
    with contextlib.suppress(AssertionError):
        within = lambda: memory.now_mib - before_mib <= KEPT_MAX_MIB  # noqa: E731 - said once
        await until(within, what="memory within its bound", within_s=SETTLES_WITHIN_S)
    return memory.now_mib - before_mib
