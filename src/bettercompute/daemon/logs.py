"""The daemon's log: one line an event, for people on a terminal, JSON for everything else."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog

from bettercompute import foreign_logs
from bettercompute.daemon.config import LogSettings

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def set_up(settings: LogSettings, *, stream: TextIO | None = None) -> None:
    """Configure the log; may be called again with another level or format."""
    out = sys.stderr if stream is None else stream
    text = settings.format == "text" or (settings.format == "auto" and out.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=out.isatty(), exception_formatter=structlog.dev.plain_traceback)
        if text
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            _without_nothing,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if text else [structlog.processors.dict_tracebacks]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[settings.level]),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=False,
    )
    foreign_logs.take_in()


def _without_nothing(_: object, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Leave out what there is nothing to say about."""
    return {name: value for name, value in event.items() if value is not None}
