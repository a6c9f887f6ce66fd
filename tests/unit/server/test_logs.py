"""What the control plane writes to its log."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest
import structlog

from bettercompute.foreign_logs import ForeignLogs
from bettercompute.server import logs


@pytest.mark.parametrize("terminal", [True, False])
def test_a_traceback_tells_where_and_no_values(monkeypatch: pytest.MonkeyPatch, *, terminal: bool) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    logs.configure()
    held = "a secret that a frame holds"
    try:
        raise ValueError("no such thing")
    except ValueError:
        structlog.get_logger("test").exception("failed")
    assert "no such thing" in stream.getvalue()
    assert "test_logs.py" in stream.getvalue()
    assert held not in stream.getvalue()


def test_what_a_library_says_is_one_line_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [*logging.getLogger().handlers])
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    logs.configure()
    logs.configure()
    try:
        raise TimeoutError
    except TimeoutError:
        logging.getLogger("some.pool").exception("the floor of %d connections; retrying", 3)
    logging.getLogger("some.pool").info("of no interest")
    ForeignLogs().emit(logging.LogRecord("some.pool", logging.WARNING, __file__, 1, "%d", ("no number",), None))
    failed, odd = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert failed["library"] == "some.pool"
    assert (failed["said"], failed["level"]) == ("the floor of 3 connections; retrying", "error")
    assert "TimeoutError" in failed["exception"]
    assert (odd["said"], odd["level"]) == ("%d", "warning")
