"""`bcd status` asks the living daemon, and says why there is none."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import pytest

from bettercompute.daemon import status as status_module
from bettercompute.daemon.status import SOCKET_NAME, ConditionStatus, DaemonStatus, StatusServer, ask
from bettercompute.errors import Unavailable

STATUS = DaemonStatus(
    state="waiting",
    reason="the gateway refused",
    running_commands=("c1",),
    conditions=(ConditionStatus(type="JournalFull", reason="", message="no room"),),
    inventory={"cpu": "00"},
)


async def test_the_answer_is_the_status_whole(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)  # longer than a socket's address may be
    folder.mkdir()
    (folder / SOCKET_NAME).write_text("left by a daemon that was killed")
    server = StatusServer(folder, lambda: STATUS)
    await server.start()
    assert (folder / SOCKET_NAME).stat().st_mode & 0o777 == 0o600
    answers = await asyncio.gather(*(asyncio.to_thread(ask, folder) for _ in range(3)))
    assert answers == [STATUS] * 3
    assert not STATUS.connected
    await server.close()
    assert not (folder / SOCKET_NAME).exists()


def test_no_daemon_is_said_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="no bcd runs there: start it with `bcd node`"):
        ask(tmp_path / "missing")
    with pytest.raises(Unavailable, match="no bcd runs there"):
        ask(tmp_path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / SOCKET_NAME))
    listener.close()  # as after a kill -9
    with pytest.raises(Unavailable, match="no bcd runs there"):
        ask(tmp_path)


def test_a_daemon_that_hangs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_module, "ANSWER_TIMEOUT_S", 0.05)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / SOCKET_NAME))
        listener.listen()
        with pytest.raises(Unavailable, match=r"did not answer within 0\.05 s: it hangs"):
            ask(tmp_path)


@pytest.mark.parametrize("answer", [b"nonsense", json.dumps({"state": "connected"}).encode(), b"{}", b"[]"])
async def test_a_foreign_answer_is_said(tmp_path: Path, answer: bytes) -> None:
    async def reply(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with await asyncio.start_unix_server(reply, path=tmp_path / SOCKET_NAME):
        with pytest.raises(Unavailable, match="bcd's answer cannot be read"):
            await asyncio.to_thread(ask, tmp_path)
