"""What production code says in its log while it is simulated: a fault of ours that it reports is a broken promise."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, MutableMapping
from typing import Any, NoReturn

import structlog

from bettercompute.testing.sim.invariants import Verdict

RULE = "nothing is logged as a bug"


@contextlib.contextmanager
def overhearing(verdict: Verdict) -> Iterator[None]:
    """Take over the log for the time of the block."""
    before = structlog.get_config()

    def hear(_logger: object, _method: str, entry: MutableMapping[str, Any]) -> NoReturn:
        if entry.get("exc_info"):
            error = structlog.processors.format_exc_info(_logger, _method, dict(entry))
            verdict.broken(RULE, str(error.get("event")) + "\n" + str(error.get("exception")))
        raise structlog.DropEvent

    structlog.configure(
        processors=[hear],
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.ReturnLoggerFactory(),
        cache_logger_on_first_use=False,
    )
    try:
        yield
    finally:
        structlog.configure(**before)
