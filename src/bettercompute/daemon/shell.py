"""Obeys what the session's rules ask of the outside: the stream, dialing, handlers, sections, trust, conditions.

One stream at a time; each tells its end exactly once. Everything that keeps this node from its control plane is said in
the log and in `bcd status` in words: who refused what, why, and when it is tried again. See docs/daemon.md, "When it is
not connected".
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from bettercompute.daemon.conditions import Conditions
from bettercompute.daemon.desired import DesiredState
from bettercompute.daemon.dial import GatewayLink, Stream
from bettercompute.daemon.driver import Driver
from bettercompute.daemon.endings import EXPIRED, IDENTITY_LOST, refusal_text, status_of
from bettercompute.daemon.executor import Executor
from bettercompute.daemon.identity import IdentityStore
from bettercompute.daemon.inventory_held import HeldInventory
from bettercompute.errors import BetterComputeError, Refused
from bettercompute.pki.quorum import SetChange
from bettercompute.protocol import messages
from bettercompute.protocol.frames import ProtocolError, decode_message, encode_message
from bettercompute.protocol.limits import HELLO_NONCE_BYTES
from bettercompute.protocol.statuses import PUSHBACK_TRAILER, REASON_TRAILER, Reason, Status, parse_pushback
from bettercompute.session import clock as session_clock
from bettercompute.session import effects
from bettercompute.session.authority import Authority
from bettercompute.session.daemon_side import IDENTITY_REVOKED
from bettercompute.session.daemon_state import Advertised, Phase
from bettercompute.session.effects import DaemonEffect
from bettercompute.session.inputs import (
    DaemonInput,
    DaemonTick,
    Dialed,
    RelayRefused,
    ServerFrameReceived,
    StreamEnded,
    TrustHeld,
)
from bettercompute.session.refusals import Relayed
from bettercompute.transport.streams import CallEnded
from bettercompute.world import World

log = structlog.get_logger("bcd.session")

TRUST_REFUSED = "TrustBundleRefused"
APPROVERS_KEPT = "ApproverSetRefused"
NEEDS_REJOIN = "NeedsRejoin"

# How long the gateway may take to see the end of a stream that closes in order.
CLOSE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class ShellParts:
    """What the shell is made of."""

    world: World
    link: GatewayLink
    identities: IdentityStore
    inventory: HeldInventory
    desired: DesiredState
    conditions: Conditions
    advertised: Callable[[], Advertised]
    """What the next Hello claims."""
    authority: Callable[[], Authority]
    """Whom the identity in memory lets command this node."""
    reload_identity: Callable[[], Awaitable[object]]
    """Brings into memory what is on disk."""
    load: Callable[[], messages.NodeLoad]


@dataclass(slots=True)
class Outlook:
    """Where the daemon is with its gateway, for people."""

    state: str = "starting"
    reason: str = "the daemon is starting"
    reason_code: str = "starting"
    since_ms: int = 0
    next_dial_at_ms: int | None = None
    gateway_id: str = ""


class NodeShell:
    """The shell of one `Driver`, which `driver` must be set to, as `executor` to what runs the commands."""

    def __init__(self, parts: ShellParts) -> None:
        self.driver: Driver
        self.executor: Executor
        self.outlook = Outlook(since_ms=parts.world.clock.now_ms())
        self.on_outlook: Callable[[Outlook], None] = lambda _: None
        self.on_expired: Callable[[], None] = lambda: None
        self._parts = parts
        self._stream: Stream | None = None
        self._reader: asyncio.Task[None] | None = None
        self._dialing: asyncio.Task[None] | None = None
        self._skip_wait = asyncio.Event()
        self._rejoin_told = ""
        """The reason for which the log has said last that only a new token helps."""

    def send(self, frame: messages.AgentFrame) -> None:
        """Queue a frame on the stream; dropped without one."""
        stream = self._stream
        if stream is None:
            return
        try:
            stream.call.send(encode_message(frame))
        except CallEnded:
            return  # the reader tells how it ended
        except Refused as refusal:
            self._ended(stream, reason=refusal.reason, message=refusal.message)

    def tick(self) -> DaemonTick:
        """Return the host's time, load and what was heard."""
        return DaemonTick(
            wall_ms=self._parts.world.clock.now_ms(),
            load=self._parts.load(),
            last_heard_ms=self._parts.link.last_heard_ms if self._stream is not None else 0,
        )

    async def obey(self, effect: DaemonEffect) -> None:
        """Obey one effect."""
        match effect:
            case effects.StartHandler(command_id, attempt, body):
                self.executor.start(command_id, attempt=attempt, body=body)
            case effects.StopHandler(command_id, reason):
                self.executor.stop(command_id, reason)
            case effects.SendInventory(sections):
                for frame in self._parts.inventory.frames(sections, now_ms=self._parts.world.clock.now_ms()):
                    self.send(frame)
            case effects.SetCondition(name, holds, reason, message):
                self._parts.conditions.set(name, holds=holds, reason=reason, message=message)
            case effects.StoreTime(mark_ms):
                try:
                    await asyncio.to_thread(self._parts.identities.raise_marks, server_time_ms=mark_ms)
                except OSError as error:
                    # The journal has it too. A full disk is no reason to end: the next one comes within a minute.
                    log.warning("the mark of time beside the identity cannot be raised", error=error.strerror)
            case effects.ApplyTrust(bundle):
                await self._apply_trust(bundle)
            case effects.ApplyDesired(desired):
                await self._apply_desired(desired)
            case effects.EndSession(reason, message):
                if self._stream is not None:
                    self._ended(self._stream, reason=reason, message=message)
            case effects.WaitThenDial():
                self._dialing = asyncio.create_task(self._wait_and_dial(effect), name="dial")
            case effects.OpenTunnel(request):
                log.warning("a tunnel was asked for, and this bcd opens none", tunnel_id=request.tunnel_id)
            case effects.DeliverSecret() | effects.DeliverWorkloadToken():
                log.debug("an answer came that nobody here waits for")
            case _:
                raise AssertionError(f"not an effect of the shell: {effect!r}")

    def stepped(self, _: DaemonInput) -> None:
        """See where the session is after a step, for people."""
        phase = self.driver.state.phase
        # A step that was queued before the stream ended connects nobody.
        if self._stream is not None and phase is Phase.LIVE and self.outlook.state != "connected":
            log.info(
                "connected",
                gateway=self._parts.link.url,
                epoch=self.driver.state.epoch,
                session=self.driver.state.session_id,
            )
            self._look(state="connected")
            self._parts.conditions.set(NEEDS_REJOIN, holds=False)
            self._rejoin_told = ""

    def dial_now(self) -> None:
        """Cut a wait short: an operator asked, or the configuration changed. A session is no wait, nor is its next."""
        if self._stream is None:
            self._skip_wait.set()

    def redial(self, reason: str, message: str) -> None:
        """End the stream, if there is one, so that the next one is dialed under what has changed."""
        if self._stream is not None:
            self._ended(self._stream, reason=reason, message=message)

    def needs_rejoin(self, reason: str, message: str) -> None:
        """Say in the log and in the status that only a new token helps."""
        cure = "re-join this machine with a new token: `bcd rejoin`"
        if reason != self._rejoin_told:  # not at each dial: this goes on until somebody comes
            log.error("NEEDS_REJOIN", why=message, cure=cure, reason=reason)
        self._rejoin_told = reason
        self._parts.conditions.set(NEEDS_REJOIN, holds=True, reason=reason, message=f"{message}; {cure}")

    async def close(self) -> None:
        """End the stream in order, so that the gateway sees a farewell and not a loss."""
        tasks = [task for task in (self._dialing, self._reader) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        stream, self._stream = self._stream, None
        self._look(state="stopping", reason="bcd is stopping", code="stopping")
        if stream is not None:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    stream.call.half_close()
                    while await stream.call.receive() is not None:
                        pass
            except (TimeoutError, BetterComputeError):
                log.debug("the gateway did not see the end of the stream in time")
        self._parts.link.close()

    # The stream.

    async def _wait_and_dial(self, effect: effects.WaitThenDial) -> None:
        if effect.delay_ms:
            self._look(
                state="waiting",
                reason=self.outlook.reason or "waiting to dial",
                code=self.outlook.reason_code,
                next_dial_in_ms=effect.delay_ms,
            )
        try:
            async with asyncio.timeout(effect.delay_ms / 1000):
                await self._skip_wait.wait()
        except TimeoutError:
            pass
        self._skip_wait.clear()
        self._look(state="connecting", reason=self.outlook.reason or "dialing", code=self.outlook.reason_code)
        try:
            stream = await self._parts.link.open_stream(redial=effect.redial, attempt=effect.attempt)
        except BetterComputeError as error:
            log.warning("no session", why=error.message, gateway=self._parts.link.url, reason=error.reason)
            self._tell_end(reason=error.reason, message=error.message)
            return
        except Exception as error:
            # Ours, and still no reason to dial never again.
            log.exception("dialing failed in a way it should not", gateway=self._parts.link.url)
            self._tell_end(reason=Reason.BUG, message=f"{type(error).__name__}: {error}")
            return
        self._stream = stream
        leaf = stream.connection.server_certificate
        self.driver.advertise(self._parts.advertised(), self._parts.authority())
        self.driver.give(
            Dialed(
                fresh_nonce=self._parts.world.ids.random_bytes(HELLO_NONCE_BYTES),
                serving_not_before_ms=None if leaf is None else leaf.not_before_ms,
                serving_not_after_ms=None if leaf is None else leaf.not_after_ms,
            )
        )
        self._reader = asyncio.create_task(self._read(stream), name="session")

    async def _read(self, stream: Stream) -> None:
        call = stream.call
        try:
            while (data := await call.receive()) is not None:
                frame = decode_message(messages.ServerFrame, data)
                if frame.WhichOneof("frame") == "welcome":
                    self._forget_refusals()
                    self.outlook.gateway_id = frame.welcome.gateway_id
                await self.driver.feed(ServerFrameReceived(frame, self._parts.world.clock.now_ms()))
        except BetterComputeError as error:
            log.warning("the session was lost", why=error.message, gateway=stream.url, reason=error.reason)
            if isinstance(error, ProtocolError):
                self.driver.give(RelayRefused(Relayed.FRAME, error.reason))
            self._ended(stream, reason=error.reason, message=error.message)
            return
        except Exception as error:
            log.exception("a frame could not be obeyed", gateway=stream.url)
            self._ended(stream, reason=Reason.BUG, message=f"{type(error).__name__}: {error}")
            return
        status = status_of(call.status)
        self._ended(
            stream,
            status=status,
            reason=call.trailers.get(REASON_TRAILER, ""),
            pushback_ms=parse_pushback(call.trailers.get(PUSHBACK_TRAILER)),
            message=refusal_text(status, call.status_message),
        )

    def _forget_refusals(self) -> None:
        """Let the conditions about what an earlier gateway relayed go with its session; the counts stay."""
        for name in (IDENTITY_REVOKED, TRUST_REFUSED):
            self._parts.conditions.set(name, holds=False)
        if self._parts.desired.refused is not None:
            self._parts.desired.forget_refusal()
            self.tell_spec()

    def _ended(
        self,
        stream: Stream,
        *,
        status: Status | None = None,
        reason: str = "",
        pushback_ms: int | None = None,
        message: str = "",
    ) -> None:
        if self._stream is not stream:
            return
        self._stream = None
        stream.call.cancel()
        self._tell_end(status=status, reason=reason, pushback_ms=pushback_ms, message=message)

    def _tell_end(
        self, *, status: Status | None = None, reason: str = "", pushback_ms: int | None = None, message: str = ""
    ) -> None:
        self._look(state="waiting", reason=message or "the gateway ended the session", code=reason)
        if reason in EXPIRED:
            self.on_expired()
        elif reason in IDENTITY_LOST:
            self.needs_rejoin(reason, message)
        self.driver.give(
            StreamEnded(
                drawn=min(self._parts.world.dice.uniform(0, 1), 1 - 1e-9),
                status=status,
                reason=reason,
                pushback_ms=pushback_ms,
                message=message,
            )
        )

    def _look(self, *, state: str, reason: str = "", code: str = "", next_dial_in_ms: int | None = None) -> None:
        clock = self._parts.world.clock
        if state != self.outlook.state:
            self.outlook.since_ms = clock.now_ms()
        self.outlook.state, self.outlook.reason, self.outlook.reason_code = state, reason, code
        self.outlook.next_dial_at_ms = None if next_dial_in_ms is None else clock.monotonic_ms() + next_dial_in_ms
        self.on_outlook(self.outlook)

    # What is held.

    async def _apply_trust(self, bundle: messages.SignedTrustBundle) -> None:
        try:
            taken = await asyncio.to_thread(self._parts.identities.take_trust, bundle.SerializeToString())
        except Refused as refusal:
            log.warning("a trust bundle was refused", why=refusal.message, reason=refusal.reason)
            self._parts.conditions.set(TRUST_REFUSED, holds=True, reason=refusal.reason, message=refusal.message)
            self.driver.give(RelayRefused(Relayed.TRUST_BUNDLE, refusal.reason))
            return
        if taken is None:
            # Honest when it crosses the Hello that told of the one held.
            self.driver.give(RelayRefused(Relayed.TRUST_BUNDLE, "not-newer"))
            return
        # A stream on the same connection asks the identity in memory for what it may obey.
        await self._parts.reload_identity()
        version, change = taken.trust.version, taken.change
        log.info("a newer trust bundle is in force", version=version, approver_set=change.value)
        kept = change not in (SetChange.SAME, SetChange.TAKE)
        if kept:
            self.driver.give(RelayRefused(Relayed.APPROVER_SET, change.value))
        self._parts.conditions.set(
            APPROVERS_KEPT,
            holds=kept,
            reason=change.value,
            message="the bundle's approver set was not taken; this node goes on enforcing its own" if kept else "",
        )
        # Before what the session has brought meanwhile: Welcome is a barrier, and this is a part of it.
        self.driver.give_first(TrustHeld(version, Authority.of(taken.trust.content, taken.approvers)))

    async def _apply_desired(self, desired: messages.DesiredState) -> None:
        held = self._parts.desired
        held.forget_refusal()
        state = self.driver.state
        now_ms = session_clock.session_time(state.clock, now_ms=self._parts.world.clock.monotonic_ms())
        request = await held.take(desired, roots=state.authority.command_roots, now_ms=now_ms)
        if held.refused is not None:
            self.driver.give(RelayRefused(Relayed.DESIRED_STATE, held.refused[0].value))
        self.spec_changed()
        if request is not None:
            self.send(messages.AgentFrame(spec_request=request))

    def spec_changed(self) -> None:
        """Give the rules what is held of the desired state now, and report it."""
        self.driver.give(self._parts.desired.held)
        self.tell_spec()

    def tell_spec(self) -> None:
        """Raise what is wrong with the desired state, and report it."""
        held, conditions = self._parts.desired, self._parts.conditions
        unsupported = [
            state.reason for state in held.states if state.convergence == messages.SECTION_CONVERGENCE_UNSUPPORTED
        ]
        conditions.set(
            "SectionUnsupported",
            holds=bool(unsupported),
            reason=",".join(unsupported),
            message="this bcd does not converge these sections of the desired state: upgrade it" if unsupported else "",
        )
        refused = held.refused
        conditions.set(
            "SpecRefused",
            holds=refused is not None,
            reason="" if refused is None else refused[0].value,
            message="" if refused is None else f"generation {refused[1]} of the desired state was not taken",
        )
        conditions.changed()
