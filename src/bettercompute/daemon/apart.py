"""Threads for what may never come back: a driver that hangs, a disk that does not answer.

The loop's own pool has a few threads, and the session's writes go through it: some hung questions to a GPU's driver
would stand in the way of all else, and of the daemon's end. Here each question has a thread of its own that nobody
waits for, and there are few places, so that what hangs is told instead of piling up. See docs/delivery.md, "At the
daemon"; decisions 0165.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Final, TypeVar

from bettercompute.errors import Unavailable

# As many as a lane has credits: no honest run asks more at once.
PLACES: Final = 8
HANGS: Final = "host-hangs"

T = TypeVar("T")


class ApartThreads(Executor):
    """Begins each piece of work at once, or refuses it."""

    def __init__(self, places: int = PLACES) -> None:
        self._places = threading.BoundedSemaphore(places)
        self._count = places

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Begin, or raise `Unavailable` where as much as may hang does."""
        if not self._places.acquire(blocking=False):
            raise Unavailable(
                f"{self._count} earlier questions to this host have no answer yet: a driver or a disk hangs; look at "
                "the kernel's log, and reboot when it does not come back",
                reason=HANGS,
            )
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        threading.Thread(target=self._run, args=(future, fn, args, kwargs), name="apart", daemon=True).start()
        return future

    def _run(self, future: Future[T], fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            result = fn(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - told to whoever asked
            self._places.release()
            future.set_exception(error)
        else:
            self._places.release()
            future.set_result(result)


THREADS: Final = ApartThreads()


async def apart(work: Callable[[], T]) -> T:
    """Return what `work` returns. A cancel leaves it to itself: it keeps its place until it comes back."""
    return await asyncio.get_running_loop().run_in_executor(THREADS, work)
