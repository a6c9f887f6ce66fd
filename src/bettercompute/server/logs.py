"""Logs of the control plane: readable lines on a terminal, JSON lines elsewhere, always on standard error."""

from __future__ import annotations

import logging
import sys

import structlog

from bettercompute import foreign_logs

# Libraries that log each request or frame at a level of their own choosing.
QUIET = ("uvicorn", "uvicorn.access", "uvicorn.error", "hpack", "h2", "httpx", "httpcore", "asyncio")


def configure(*, level: str = "info") -> None:
    """Set up structlog once per process."""
    number = logging.getLevelNamesMapping()[level.upper()]
    terminal = sys.stderr.isatty()
    # Plain: with every local of every frame, as rich would draw it, a traceback holds the event loop for seconds, and
    # shows what nobody should read over somebody's shoulder.
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if terminal
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            *([] if terminal else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    foreign_logs.take_in()
