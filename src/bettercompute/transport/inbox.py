"""What has arrived on one call and waits for its reader, who is one task: messages in order, then the end, once."""

from __future__ import annotations

import asyncio
from collections import deque

from bettercompute.transport.calls import CallEnded


class Inbox:
    """Messages, then an ending: None (the peer is done) or the `CallEnded` to raise.

    Bounded by flow control, not here.
    """

    __slots__ = ("_end", "_ended", "_messages", "_waiter")

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._ended = False
        self._end: CallEnded | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, message: bytes) -> None:
        """Add a message; after the end there are none."""
        if not self._ended:
            self._messages.append(message)
            self._wake()

    def end(self, end: CallEnded | None) -> None:
        """Say that nothing more comes, and why.

        A cut overrules a proper end that has not been read, not the reverse.
        """
        if not self._ended or (self._end is None and end is not None):
            self._ended = True
            self._end = end
            self._wake()

    async def get(self) -> bytes | None:
        """Return the next message, or None at the end; raises the `CallEnded` of a cut, each time it is asked."""
        while not self._messages:
            if self._ended:
                if self._end is not None:
                    raise CallEnded(self._end.kind, self._end.message)
                return None
            assert self._waiter is None, "one task reads a call"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._messages.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
