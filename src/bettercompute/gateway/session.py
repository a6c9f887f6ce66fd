"""One live session: the driver that turns what happens into inputs and obeys the effects of `gateway_side.step`.

It decides nothing. Inputs are taken one at a time, in the order in which they came, and their effects are obeyed in
order; an input that comes up while effects are being obeyed waits its turn. Nothing here is awaited between an input
and its effects, so no other session's trouble can come between them. A fault of ours in one session ends that session:
whoever gives an input serves all the others too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from bettercompute.delivery.facts import Fact
from bettercompute.errors import BetterComputeError, Bug, Refused
from bettercompute.gateway.fence import Fence
from bettercompute.protocol import messages
from bettercompute.protocol.frames import ProtocolError, decode_message, encode_message
from bettercompute.protocol.statuses import PUSHBACK_TRAILER, REASON_TRAILER, SERVER_TIME_TRAILER, format_pushback
from bettercompute.session import closing, gateway_side
from bettercompute.session.effects import (
    AskSecret,
    AskWorkloadToken,
    Close,
    GatewayEffect,
    PokeDispatch,
    PutBack,
    RecordFacts,
    RequestSpec,
    SendFrame,
)
from bettercompute.session.gateway_state import GatewaySession
from bettercompute.session.inputs import (
    FrameReceived,
    FrameRefused,
    GatewayInput,
    LeaseLost,
    PeerEnded,
    SecretAnswered,
    SlowConsumer,
    WorkloadTokenAnswered,
)
from bettercompute.store.sessions import SessionKey
from bettercompute.transport.streams import CallEnded, ServerCall
from bettercompute.world import World

log = structlog.get_logger("bettercompute.gateway.session")

INPUTS_WAITING_MAX = 10_000  # far above what one turn of the loop brings; more means that effects feed themselves


class Surroundings(Protocol):
    """What a session asks of its gateway. Every call returns at once."""

    def record(self, session: LiveSession, facts: Sequence[Fact]) -> None:
        """Add facts to the group commit; the session is given what became of them."""
        ...

    def put_back(self, session: LiveSession, effect: PutBack) -> None:
        """Put a command back to pending; the session is given `PutBackCommitted`."""
        ...

    def poke_dispatch(self, session: LiveSession) -> None:
        """Ask the session in the next dispatch transaction."""
        ...

    def request_spec(self, session: LiveSession) -> None:
        """Read the node's spec and give it to the session."""
        ...

    def closed(self, session: LiveSession, effect: Close) -> None:
        """Take note of the end: forget the session, and write the disconnect when the effect says so."""
        ...

    async def room(self, session: LiveSession) -> None:
        """Wait until the session's facts waiting to be written are within its share."""
        ...

    def server_time_ms(self) -> int:
        """Return the control plane's time."""
        ...


@dataclass(frozen=True, slots=True)
class SessionParts:
    """What a session is put together from."""

    call: ServerCall
    fence: Fence
    opening: int
    world: World
    surroundings: Surroundings


class LiveSession:
    """The only holder of one session's state."""

    def __init__(self, state: GatewaySession, parts: SessionParts) -> None:
        self.state = state
        self.opening = parts.opening
        self.ending: Close | None = None
        self.nothing_pending = False
        """The last dispatch found fewer commands than there were credits: only news can change that."""
        self._parts = parts
        self._waiting: deque[Callable[[], None]] = deque()
        self._busy = False
        self._receiver: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    @property
    def node_id(self) -> str:
        """Return the node."""
        return self.state.node_id

    @property
    def key(self) -> SessionKey:
        """Return what fenced writes compare."""
        return SessionKey(node_id=self.state.node_id, session_id=self.state.session_id, epoch=self.state.epoch)

    def begin(self, effects: Sequence[GatewayEffect]) -> None:
        """Obey the effects with which the session opens: Welcome first."""
        self._turn(lambda: self._obey_all(effects))

    def give(self, given: GatewayInput) -> None:
        """Take an input and obey what follows from it; a closed session ignores it."""
        self._turn(lambda: self._step(given))

    def _turn(self, work: Callable[[], None]) -> None:
        self._waiting.append(work)
        if self._busy:
            assert len(self._waiting) < INPUTS_WAITING_MAX, "effects feed themselves"
            return
        self._busy = True
        try:
            while self._waiting:
                self._take(self._waiting.popleft())
        finally:
            self._busy = False

    def _take(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            log.exception("session broken", node_id=self.node_id, session_id=self.state.session_id)
            if self.ending is None:
                self._close(closing.close_refused(Bug("internal error; the gateway's log says more")))

    def _step(self, given: GatewayInput) -> None:
        if self.ending is not None:
            return
        if not self._parts.fence.holds(self.opening):
            given = LeaseLost()
        self.state, effects = gateway_side.step(self.state, given, self._parts.world.clock.monotonic_ms())
        self._obey_all(effects)

    def _obey_all(self, effects: Sequence[GatewayEffect]) -> None:
        for effect in effects:
            if self.ending is not None:
                return
            self._obey(effect)

    def _obey(self, effect: GatewayEffect) -> None:
        around = self._parts.surroundings
        match effect:
            case SendFrame(frame):
                self._send(frame)
            case RecordFacts(facts):
                around.record(self, facts)
            case PutBack():
                around.put_back(self, effect)
            case PokeDispatch():
                around.poke_dispatch(self)
            case RequestSpec():
                around.request_spec(self)
            case AskSecret(request):
                # The broker's port comes with signed commands; until then nothing is bound to anything.
                answer = messages.SecretResponse(request_id=request.request_id, error="unavailable")
                self.give(SecretAnswered(answer))
            case AskWorkloadToken(request):
                token = messages.WorkloadTokenResponse(request_id=request.request_id, error="unavailable")
                self.give(WorkloadTokenAnswered(token))
            case Close():
                self._close(effect)

    def _send(self, frame: messages.ServerFrame) -> None:
        if not self._parts.fence.holds(self.opening):
            self.give(LeaseLost())
            return
        try:
            self._parts.call.send(encode_message(frame))
        except ProtocolError:
            # A stored body that no longer fits a frame: ours, and it must not end the session.
            log.exception("frame not sent", node_id=self.node_id, frame=frame.WhichOneof("frame"))
        except CallEnded as ended:
            self.give(PeerEnded(ended.message))
        except Refused:
            self.give(SlowConsumer(self._parts.call.queued_bytes))

    def _close(self, effect: Close) -> None:
        self.ending = effect
        trailers = {
            REASON_TRAILER: str(effect.reason),
            SERVER_TIME_TRAILER: str(self._parts.surroundings.server_time_ms()),
        }
        if effect.pushback_ms is not None:
            trailers[PUSHBACK_TRAILER] = format_pushback(effect.pushback_ms)
        self._parts.call.finish(effect.status, effect.message, trailers)
        self._parts.surroundings.closed(self, effect)
        self._ended.set()
        if self._receiver is not None:
            self._receiver.cancel()

    async def run(self) -> None:
        """Receive until the session has ended, from either side."""
        receiver = self._receiver = asyncio.create_task(self._receive(), name=f"session-{self.node_id}")
        try:
            if self.ending is None:
                await self._ended.wait()
        finally:
            receiver.cancel()
            await asyncio.gather(receiver, return_exceptions=True)

    async def _receive(self) -> None:
        try:
            while self.ending is None:
                message = await self._parts.call.receive()
                if message is None:
                    self.give(PeerEnded("the daemon ended the stream"))
                    return
                self.give(_input_of(message))
                await self._parts.surroundings.room(self)
        except CallEnded as ended:
            self.give(PeerEnded(ended.message))
        except BetterComputeError as error:
            self.give(FrameRefused(error.message))


def _input_of(message: bytes) -> GatewayInput:
    """Return a received message as an input."""
    try:
        return FrameReceived(decode_message(messages.AgentFrame, message))
    except ProtocolError as error:
        return FrameRefused(error.message)
