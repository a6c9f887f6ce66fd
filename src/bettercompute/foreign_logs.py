"""What libraries say by `logging` goes into our own log: one event each, so that what machines read stays JSON.

Among it is what asyncio says of a task that failed and that nobody awaited. See docs/operations.md, "Watching".
"""

from __future__ import annotations

import logging

import structlog

log = structlog.get_logger("bettercompute.library")


class ForeignLogs(logging.Handler):
    """Hands records on."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record as an event; a traceback comes as all of ours do."""
        try:
            said = record.getMessage()
        except Exception:  # noqa: BLE001 - arguments that do not fit the message are no reason to lose it
            said = str(record.msg)
        log.log(
            record.levelno,
            "a library says",
            library=record.name,
            said=said,
            **({"exc_info": record.exc_info} if record.exc_info and record.exc_info[0] else {}),
        )


def take_in() -> None:
    """Have all that libraries say from WARNING on logged here; may be called again."""
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, ForeignLogs)]:
        root.removeHandler(handler)
    root.addHandler(ForeignLogs(logging.WARNING))
