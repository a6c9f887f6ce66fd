"""Renewing this node's certificate before it expires.

At two thirds of its life, with jitter, by the server's time; asked for with a new key that is on disk before it is
sent, proven with the present one. A lost answer is asked for again with the same request. Once the new identity is on
disk the session is dialed anew, because the old certificate's expiry would cut it. See docs/security.md, "Renewing";
decisions 0085 and 0111.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

import structlog

from bettercompute.daemon.dial import GatewayLink
from bettercompute.daemon.identity import Identity, IdentityStore, Machine, Purpose
from bettercompute.daemon.join import ANSWER_BYTES_MAX, ANSWER_TIMEOUT_S, Deferred, verify_answer
from bettercompute.errors import BetterComputeError, Refused, Unavailable
from bettercompute.pki import signatures
from bettercompute.protocol import messages, service
from bettercompute.protocol.envelopes import renew_pop_input
from bettercompute.protocol.frames import decode_message, encode_message
from bettercompute.protocol.limits import MAX_JOIN_BYTES
from bettercompute.protocol.statuses import SERVER_TIME_TRAILER, parse_server_time
from bettercompute.transport.streams import CallRefused
from bettercompute.world import World

log = structlog.get_logger("bcd.renewal")

# A fleet joined at one moment must not renew at one moment: up to this share of the certificate's life later.
JITTER_SHARE = 0.05
# How often a renewal that failed is tried again, at most; a certificate leaves 8 h for it.
RETRY_MS = (60_000, 300_000)
# A clock may be set while this waits.
WAKE_MAX_MS = 60_000


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
    refused: Callable[[str], None] = lambda _: None
    """Told why an answer was not believed."""


class Renewal:
    """Keeps the certificate young."""

    def __init__(self, parts: RenewalParts) -> None:
        self._parts = parts
        self._told: tuple[int, int] | None = None
        """What a refusal said of the server's time, and when on the monotonic clock."""

    async def run(self) -> None:
        """Renew whenever it is time, for ever."""
        identity = await self._parts.load_identity()
        while True:
            life_ms = identity.not_after_ms - identity.renew_at_ms
            due_ms = identity.renew_at_ms + int(self._parts.world.dice.uniform(0, JITTER_SHARE * life_ms))
            wait_ms = due_ms - self._parts.server_time_ms(None)
            while wait_ms > 0:
                await asyncio.sleep(min(wait_ms, WAKE_MAX_MS) / 1000)
                wait_ms = due_ms - self._parts.server_time_ms(None)
            identity = await self._renew_until_done(identity)
            self._parts.renewed(identity)

    async def _renew_until_done(self, identity: Identity) -> Identity:
        while True:
            try:
                return await self.renew(identity)
            except BetterComputeError as error:
                if isinstance(error, Refused) and not isinstance(error, CallRefused):
                    self._parts.refused(error.reason)
                if isinstance(error, CallRefused):
                    self._note(parse_server_time(error.trailers.get(SERVER_TIME_TRAILER)))
                wait_ms = error.pushback_ms or int(self._parts.world.dice.uniform(*RETRY_MS))
                log.warning("the certificate was not renewed", why=error.message, reason=error.reason, retry_ms=wait_ms)
            await asyncio.sleep(wait_ms / 1000)

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
        renewed = await asyncio.to_thread(
            parts.identities.install, Purpose.RENEW, pending, issued, machine=parts.machine
        )
        log.info("certificate renewed", serial=renewed.record.certificate_serial, not_after_ms=renewed.not_after_ms)
        return renewed
