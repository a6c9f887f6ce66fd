"""What a FakeDaemon sends: frames pass its levers and its profile, and updates of one turn share a frame."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from bettercompute.protocol import messages
from bettercompute.protocol.frames import encode_message
from bettercompute.testing.profiles import Levers, Profile
from bettercompute.transport.streams import CallEnded, ClientCall


class FakeOutgoing:
    """The sending half of the stream. Without a stream everything is dropped: what is owed rides in the next Hello."""

    def __init__(self, *, profile: Profile, levers: Levers) -> None:
        self.call: ClientCall | None = None
        self.update_batches = False
        """The gateway reads several updates in one frame."""
        self._profile = profile
        self._levers = levers
        self._updates: list[messages.CommandUpdate] = []
        self._due: asyncio.Handle | None = None

    def send(self, frame: messages.AgentFrame) -> None:
        """Send a frame as levers and profile allow."""
        self._flush()
        match frame.WhichOneof("frame"):
            case "heartbeat" if not self._levers.heartbeats:
                return
            case "hello":
                _clear(frame.hello, self._profile.lacks_fields)
            case "status":
                _clear(frame.status, self._profile.lacks_fields)
        if self._levers.rewrite is None:
            self.send_bytes(encode_message(frame))
        elif (message := self._levers.rewrite(frame)) is not None:
            self.send_bytes(message)

    def send_bytes(self, message: bytes) -> None:
        """Send a message that may be no frame at all."""
        if self.call is not None:
            # The reader tells how a stream ended.
            with contextlib.suppress(CallEnded):
                self.call.send(message)

    def tell(self, updates: Iterable[messages.CommandUpdate]) -> None:
        """Send updates at the end of this turn of the loop, or before any other frame."""
        if self.call is None:
            return
        self._updates += updates
        if self._due is None:
            self._due = asyncio.get_running_loop().call_soon(self._flush)

    def end(self) -> None:
        """Cancel the stream, and drop what has not been sent."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        self._updates.clear()
        if self.call is not None:
            self.call.cancel()
            self.call = None

    def _flush(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        updates, self._updates = self._updates, []
        if len(updates) > 1 and self.update_batches:
            self.send(messages.AgentFrame(updates=messages.CommandUpdateBatch(updates=updates)))
        else:
            for update in updates:
                self.send(messages.AgentFrame(update=update))


def _clear(message: messages.Hello | messages.StatusReport, names: frozenset[str]) -> None:
    for name in names:
        if name in message.DESCRIPTOR.fields_by_name:
            message.ClearField(name)  # type: ignore[arg-type] # the stubs list every name
