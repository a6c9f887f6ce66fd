"""The documented kind: the page shows the example as it is, and the example runs under the real executor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from docs.examples import host_ping

from bettercompute.daemon import executor
from bettercompute.daemon.config import Config
from bettercompute.daemon.handlers import HandlerContext, ProgramOutcome
from bettercompute.delivery.commands import CommandState
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import KINDS
from tests.unit.daemon.handler_bench import handler_bench

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_shows_the_example() -> None:
    page, example = (DOCS / "adding-a-kind.md").read_text(), (DOCS / "examples" / "host_ping.py").read_text()
    shown = page.partition("```python\n")[2].partition("```")[0]
    assert shown == example[example.index("class HostPing") :]


class Answering:
    """The example with a recorded ping, which not every machine has or may use."""

    kind = "host.ping"

    async def run(self, context: HandlerContext) -> bytes:
        async def ping(argv: list[str], **_: object) -> ProgramOutcome:
            return ProgramOutcome(1 if argv[-1] == "away" else 0, b"1 received\n", b"")

        context.run_program = ping  # type: ignore[misc,assignment]  # the one thing that is recorded
        return await host_ping.HANDLER.run(context)


async def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: Mapping[str, object] = {**KINDS, host_ping.ROW.name: host_ping.ROW}
    monkeypatch.setattr(executor, "KINDS", rows)
    async with handler_bench(tmp_path, Config(), Answering()) as bench:
        ending = await bench.run("host.ping", messages.InventoryRefreshPayload(sections=["here"]))
        assert ending.state is CommandState.SUCCEEDED, ending.message
        ending = await bench.run("host.ping", messages.InventoryRefreshPayload(sections=["here", "away"]))
    assert (ending.reason, ending.message) == ("unreachable", "away did not answer")
