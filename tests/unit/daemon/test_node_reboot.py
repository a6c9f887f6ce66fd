"""`node.reboot`: inhibited, forced, cancelled, refused by the host, never told as a success by this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bettercompute.daemon.config import Config
from bettercompute.daemon.handlers import HandlerContext
from bettercompute.daemon.handlers.node_reboot import NodeReboot
from bettercompute.daemon.inventory.capabilities import RebootSettings
from bettercompute.delivery.commands import CommandState
from bettercompute.protocol import messages
from tests.unit.daemon.handler_bench import HandlerBench, handler_bench

KIND = "node.reboot"


class HeldReset:
    """A command that must not be repeated, running until it is ended."""

    kind = "gpu.reset"

    async def run(self, context: HandlerContext) -> bytes:
        await context.cancelled.wait()
        return b""


def rebooting_with(folder: Path, script: str) -> Config:
    program = folder / "reboot"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    return Config(reboot=RebootSettings(command=(str(program), "now"), boot_id_file=folder / "boot_id"))


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[HandlerBench]:
    config = rebooting_with(tmp_path, f'echo "$1 $BC_COMMAND_ID $BC_REASON" >> {tmp_path}/asked')
    async with handler_bench(tmp_path, config, NodeReboot(), HeldReset()) as made:
        yield made


async def test_a_request_that_ends_nothing_is_a_failure_in_the_end(bench: HandlerBench, tmp_path: Path) -> None:
    ending = await bench.run(KIND, messages.NodeRebootPayload(reason="new\nkernel"), timeout_ms=1_500)
    assert (ending.state, ending.reason) == (CommandState.FAILED, "timeout")
    assert (tmp_path / "asked").read_text() == "now c1 new kernel\n"


async def test_it_waits_for_commands_that_must_not_be_repeated_unless_forced(
    bench: HandlerBench, tmp_path: Path
) -> None:
    bench.start("gpu.reset", messages.GpuResetPayload(), command_id="reset")
    ending = await bench.run(KIND, messages.NodeRebootPayload())
    assert (ending.state, ending.reason) == (CommandState.FAILED, "inhibited")
    assert "command reset runs" in ending.message
    assert not (tmp_path / "asked").exists()
    assert (await bench.run(KIND, messages.NodeRebootPayload(force=True), timeout_ms=1_500)).reason == "timeout"
    assert (tmp_path / "asked").exists()


async def test_it_can_be_cancelled_before_the_request(bench: HandlerBench, tmp_path: Path) -> None:
    bench.start(KIND, messages.NodeRebootPayload(delay_ms=60_000))
    await asyncio.wait_for(bench.told.get(), 30)
    bench.executor.stop("c1", "not now")
    assert (await bench.ending()).state is CommandState.CANCELLED
    assert not (tmp_path / "asked").exists()


async def test_a_host_that_refuses_is_quoted(bench: HandlerBench, tmp_path: Path) -> None:
    bench.settings.value = rebooting_with(tmp_path, "echo held by an inhibitor >&2; exit 3")
    ending = await bench.run(KIND, messages.NodeRebootPayload())
    assert ending.reason == "reboot-failed"
    assert ending.message.endswith("ended with exit code 3: held by an inhibitor")
    missing = RebootSettings(command=(str(tmp_path / "nothing"),), boot_id_file=tmp_path)
    bench.settings.value = Config(reboot=missing)
    assert "cannot be started" in (await bench.run(KIND, messages.NodeRebootPayload())).message


async def test_a_node_that_may_not_is_not_rebooted(bench: HandlerBench) -> None:
    bench.settings.value = Config(reboot=RebootSettings(allowed=False))
    assert (await bench.run(KIND, messages.NodeRebootPayload())).reason == "reboot-not-allowed"
