"""What the control plane writes to its log."""

from __future__ import annotations

import io
import sys

import pytest
import structlog

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
