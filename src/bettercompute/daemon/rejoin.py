"""Coming back by a certificate that has expired: Join with the attestor `x509pop`, without anybody's help.

The new key and its request are on disk before they are sent, and the proof is made anew for each time of asking, dated
by the server's time as far as it is known: by a refusal, by the session, or by the host's clock when that is ahead of a
mark whose age nobody knows. So a crash or a lost answer at any step is asked for again with the same request and gets
the same certificate. The keys and addresses are the expired identity's own. See docs/security.md, "Coming back after
expiry"; decisions 0146.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from bettercompute import __version__
from bettercompute.daemon.dial import DialSettings
from bettercompute.daemon.evidence import unanswerable
from bettercompute.daemon.identity import Identity, IdentityStore, Machine, Purpose
from bettercompute.daemon.join_attempt import Application, Dial, JoinAttempt, Route
from bettercompute.errors import BetterComputeError
from bettercompute.pki import signatures
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import x509pop_input
from bettercompute.protocol.statuses import SERVER_TIME_TRAILER, Reason, parse_server_time
from bettercompute.transport.streams import CallRefused
from bettercompute.world import Clock, World

X509POP = "x509pop"

log = structlog.get_logger("bcd.rejoin")


@dataclass(slots=True, kw_only=True)
class X509PopEvidence:
    """The certificate that has expired, and a proof that its key is here."""

    identity: Identity = field(repr=False)
    server_time_ms: Callable[[int | None], int]
    """The time that dates a proof, given what a refusal said of the server's."""
    clock: Clock
    attestor: str = X509POP
    told: tuple[int, int] | None = None
    """What a refusal said of the server's time, and when on the monotonic clock."""

    def show(self, request: messages.JoinRequest) -> None:
        """Prove possession of the key, for this request and now."""
        told_ms = None if self.told is None else self.told[0] + self.clock.monotonic_ms() - self.told[1]
        at_ms = self.server_time_ms(told_ms)
        proven = x509pop_input(csr=request.csr, node_id=self.identity.record.node_id, client_time_ms=at_ms)
        evidence = messages.X509PopEvidence(
            certificate_chain=self.identity.chain_der,
            client_time_ms=at_ms,
            proof=signatures.sign(self.identity.key, proven),
        )
        request.attestor, request.evidence = self.attestor, evidence.SerializeToString()

    def answer(self, challenge: bytes, request: messages.JoinRequest) -> bytes:  # noqa: ARG002 - the port's
        """Refuse: the proof is fresh by itself."""
        raise unanswerable(self.attestor)

    def cures(self, error: BetterComputeError) -> bool:
        """Say whether the proof was dated wrongly, and by what time it is to be dated."""
        if error.reason != Reason.BAD_PROOF or not isinstance(error, CallRefused):
            return False
        told_ms = parse_server_time(error.trailers.get(SERVER_TIME_TRAILER))
        self.told = None if told_ms is None else (told_ms, self.clock.monotonic_ms())
        return told_ms is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RejoinParts:
    """What a re-join is made with."""

    world: World
    identities: IdentityStore
    machine: Machine
    hardware: Callable[[], messages.HardwareClaims]
    settings: Callable[[], DialSettings]
    server_time_ms: Callable[[int | None], int]
    dial: Dial | None


async def rejoin(identity: Identity, parts: RejoinParts) -> Identity:
    """Join again by `identity`, however long the gateways cannot be reached, and return what is on disk then.

    Raises what no waiting cures.
    """
    record, settings = identity.record, parts.settings()
    log.warning("the certificate has expired: joining again by it", serial=record.certificate_serial)
    request = await asyncio.to_thread(parts.identities.pending, Purpose.REJOIN, label=record.certificate_serial)
    route = Route(
        gateway_urls=settings.gateway_url or record.gateway_urls,
        serving_ca_pins=identity.trust.content.serving_ca_pins,
        join_signing_keys=identity.trust.content.join_signing_keys,
        server_name=settings.server_name or None,
        environment=settings.environment or {},
    )
    application = Application(
        role=record.role, node_id=record.node_id, daemon_version=__version__, hardware=parts.hardware()
    )
    evidence = X509PopEvidence(identity=identity, server_time_ms=parts.server_time_ms, clock=parts.world.clock)
    attempt = JoinAttempt(
        route, application, evidence, request, world=parts.world, dial=parts.dial, held=identity.trust
    )
    issued = await attempt.until_answered(give_up_after_ms=None)
    rejoined = await asyncio.to_thread(
        parts.identities.install,
        Purpose.REJOIN,
        request,
        issued,
        machine=parts.machine,
        replacing=record.certificate_serial,
    )
    log.info(
        "joined again",
        node_id=rejoined.record.node_id,
        serial=rejoined.record.certificate_serial,
        generation=rejoined.record.identity_generation,
    )
    return rejoined
