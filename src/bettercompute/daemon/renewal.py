"""Keeping this node's certificate good: renewing it in time, and coming back by it when it has expired.

Renewed at two thirds of its life, with jitter, by the server's time; asked for with a new key that is on disk before it
is sent, proven with the present one. A lost answer is asked for again with the same request. Once the new identity is
on disk the session is dialed anew, because the old certificate's expiry would cut it. A certificate that has expired,
by the server's time or by what a gateway says, leads to a re-join by it (`daemon.rejoin`); only where JoinService
refuses that, a person is needed. See docs/security.md, "Renewing", "Coming back after expiry"; decisions 0085, 0111 and
0146.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

import structlog

from bettercompute.daemon.dial import GatewayLink
from bettercompute.daemon.endings import EXPIRED
from bettercompute.daemon.identity import Identity, IdentityStore, Machine, Purpose
from bettercompute.daemon.join_answer import ANSWER_BYTES_MAX, Challenged, Deferred, verify_answer
from bettercompute.daemon.join_attempt import ANSWER_TIMEOUT_S
from bettercompute.errors import BetterComputeError, Refused, Unavailable
from bettercompute.pki import signatures
from bettercompute.protocol import messages, service
from bettercompute.protocol.envelopes import renew_pop_input
from bettercompute.protocol.frames import decode_message, encode_message
from bettercompute.protocol.limits import MAX_JOIN_BYTES
from bettercompute.protocol.statuses import SERVER_TIME_TRAILER, Reason, Status, parse_server_time
from bettercompute.transport.streams import CallRefused
from bettercompute.world import World

log = structlog.get_logger("bcd.renewal")

# A fleet joined at one moment must not renew at one moment: up to this share of the certificate's life later.
JITTER_SHARE = 0.05
# How often a renewal that failed is tried again, at most; a certificate leaves 8 h for it.
RETRY_MS = (60_000, 300_000)
# A clock may be set while this waits.
WAKE_MAX_MS = 60_000


# A re-join that was refused is tried again this often, at most: whoever relays a refusal may have invented it.
REFUSED_RETRY_MS = (600_000, 1_200_000)

# JoinService's word that this certificate leads nowhere any more.
_FINAL = frozenset(
    {Status.UNAUTHENTICATED, Status.PERMISSION_DENIED, Status.INVALID_ARGUMENT, Status.UNIMPLEMENTED, Status.NOT_FOUND}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalParts:
    """What a renewal is made with."""

    world: World
    link: GatewayLink
    identities: IdentityStore
    machine: Machine
    load_identity: Callable[[], Coroutine[None, None, Identity]]
    server_time_ms: Callable[[int | None], int]
    """The time that dates a proof, given what a refusal said of the server's."""
    renewed: Callable[[Identity], None]
    rejoin: Callable[[Identity], Coroutine[None, None, Identity]]
    """Comes back by an expired certificate; the identity is on disk then."""
    needs_rejoin: Callable[[str, str], None] = lambda _, __: None
    """Told why, as a reason and in words, when only a new token helps."""
    refused: Callable[[str], None] = lambda _: None
    """Told why an answer was not believed."""


class Renewal:
    """Keeps the certificate good."""

    def __init__(self, parts: RenewalParts) -> None:
        self._parts = parts
        self._told: tuple[int, int] | None = None
        """What a refusal said of the server's time, and when on the monotonic clock."""
        self._expired_serial = ""
        """The certificate that a gateway says has expired."""
        self._woken = asyncio.Event()
        self._replaced = asyncio.Event()

    def expired(self, serial: str) -> None:
        """Come back by this certificate, if it is the present one: a gateway says that it has expired."""
        self._expired_serial = serial
        self._woken.set()

    def replaced(self) -> None:
        """Begin anew with the identity that is on disk now."""
        self._replaced.set()

    async def run(self) -> None:
        """Keep it good, for ever."""
        while True:
            self._replaced.clear()
            keeping = asyncio.ensure_future(self._keep())
            replaced = asyncio.ensure_future(self._replaced.wait())
            try:
                await asyncio.wait({keeping, replaced}, return_when=asyncio.FIRST_COMPLETED)
                if keeping.done():
                    keeping.result()
            finally:
                keeping.cancel()
                replaced.cancel()
                await asyncio.gather(keeping, replaced, return_exceptions=True)

    async def _keep(self) -> None:
        identity = await self._parts.load_identity()
        while True:
            life_ms = identity.not_after_ms - identity.renew_at_ms
            due_ms = identity.renew_at_ms + int(self._parts.world.dice.uniform(0, JITTER_SHARE * life_ms))
            wait_ms = due_ms - self._parts.server_time_ms(None)
            while wait_ms > 0 and not self._is_over(identity):
                await self._pause(min(wait_ms, WAKE_MAX_MS))
                wait_ms = due_ms - self._parts.server_time_ms(None)
            identity = await self._replacement(identity)
            self._parts.renewed(identity)
            await self._rest(identity)

    async def _rest(self, identity: Identity) -> None:
        """Wait after a success for as long as after a failure, whatever is said of the new certificate.

        By a clock that is ahead, here or at a gateway, it is due or over the moment it is issued, and so is the next.
        """
        clock = self._parts.world.clock
        life_left_ms = identity.not_after_ms - identity.renew_at_ms
        until_ms = clock.monotonic_ms() + min(int(self._parts.world.dice.uniform(*RETRY_MS)), life_left_ms)
        while (wait_ms := until_ms - clock.monotonic_ms()) > 0:
            await self._pause(wait_ms)

    def _is_over(self, identity: Identity) -> bool:
        told = self._expired_serial == identity.record.certificate_serial
        return told or self._parts.server_time_ms(None) >= identity.not_after_ms

    async def _replacement(self, identity: Identity) -> Identity:
        """Renew the certificate, or come back by it, however long that takes."""
        while True:
            over = self._is_over(identity)
            try:
                return await (self._parts.rejoin(identity) if over else self.renew(identity))
            except BetterComputeError as error:
                wait_ms = self._after(error, identity, over=over)
            await self._pause(wait_ms)

    def _after(self, error: BetterComputeError, identity: Identity, *, over: bool) -> int:
        """Return how long to wait after an attempt that failed, and see whether anybody is needed."""
        if isinstance(error, CallRefused):
            self._note(parse_server_time(error.trailers.get(SERVER_TIME_TRAILER)))
        elif isinstance(error, Refused) and error.reason not in {Reason.CONFLICT, Reason.INVALID_CONFIG}:
            self._parts.refused(error.reason)
        drawn = self._parts.world.dice.uniform
        wait_ms = error.pushback_ms or int(drawn(*RETRY_MS))
        if not over and error.reason in EXPIRED:
            self._expired_serial, wait_ms = identity.record.certificate_serial, 0
        elif over and error.reason == Reason.CONFLICT:
            self._expired_serial = ""  # not expired, says who issued it
        elif over and isinstance(error, CallRefused) and error.status in _FINAL and error.reason != Reason.BAD_PROOF:
            self._parts.needs_rejoin(error.reason, error.message)
            wait_ms = int(drawn(*REFUSED_RETRY_MS))
        what = "this node could not join again by its certificate" if over else "the certificate was not renewed"
        log.warning(what, why=error.message, reason=error.reason, retry_ms=wait_ms)
        return wait_ms

    async def _pause(self, wait_ms: int) -> None:
        """Wait, or until a gateway says that the certificate has expired."""
        self._woken.clear()
        sleeping = asyncio.ensure_future(asyncio.sleep(wait_ms / 1000))
        woken = asyncio.ensure_future(self._woken.wait())
        try:
            await asyncio.wait({sleeping, woken}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleeping.cancel()
            woken.cancel()

    def _note(self, server_time_ms: int | None) -> None:
        clock = self._parts.world.clock
        self._told = None if server_time_ms is None else (server_time_ms, clock.monotonic_ms())

    def _refusal_time_ms(self) -> int | None:
        """Return the server's time by the last refusal: the wait since then is longer than a proof is good for."""
        if self._told is None:
            return None
        told_ms, heard_ms = self._told
        return told_ms + self._parts.world.clock.monotonic_ms() - heard_ms

    async def renew(self, identity: Identity) -> Identity:
        """Renew once and return the new identity, which is on disk then."""
        parts = self._parts
        pending = await asyncio.to_thread(
            parts.identities.pending, Purpose.RENEW, label=identity.record.certificate_serial
        )
        at_ms = parts.server_time_ms(self._refusal_time_ms())
        proven = renew_pop_input(csr=pending.csr_der, node_id=identity.record.node_id, client_time_ms=at_ms)
        request = messages.RenewRequest(
            csr=pending.csr_der,
            client_time_ms=at_ms,
            proof=signatures.sign(identity.key, proven),
            certificate_chain=identity.chain_der,
        )
        connection = await parts.link.connected()
        data = await connection.unary(
            service.RENEW, encode_message(request, limit=MAX_JOIN_BYTES), timeout_s=ANSWER_TIMEOUT_S
        )
        issued = verify_answer(
            decode_message(messages.RenewResponse, data, limit=ANSWER_BYTES_MAX),
            pending,
            role=identity.record.role,
            pinned_keys=identity.trust.content.join_signing_keys,
            held=identity.trust,
        )
        if isinstance(issued, Deferred):
            raise Unavailable(f"the renewal is deferred: {issued.message}", pushback_ms=issued.retry_after_ms)
        if isinstance(issued, Challenged):
            raise Unavailable(
                "the renewal asks for the answer to a challenge, which this bcd does not know: upgrade bcd"
            )
        renewed = await asyncio.to_thread(
            parts.identities.install,
            Purpose.RENEW,
            pending,
            issued,
            machine=parts.machine,
            replacing=identity.record.certificate_serial,
        )
        log.info("certificate renewed", serial=renewed.record.certificate_serial, not_after_ms=renewed.not_after_ms)
        return renewed
