"""The daemon's half of Join, as an operator asks for it.

The key and its request are on disk before anything is sent, so a lost answer, a crash or a deferral is asked for again
with the same request and gets the same certificate. The token goes sealed to JoinService; the answer is believed only
when the join-signing key that the token pins signed it, for this very request. Then the identity is put on disk in one
step. See docs/security.md, "Joining"; decisions 0111.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import structlog

from bettercompute.daemon import evidence
from bettercompute.daemon.evidence import DISCOVERY, Evidence, SealedEvidence, TokenEvidence
from bettercompute.daemon.identity import Identity, IdentityStore, Machine, Purpose
from bettercompute.daemon.join_attempt import Application, Dial, JoinAttempt, Route
from bettercompute.errors import Refused
from bettercompute.pki import join_token
from bettercompute.pki.identity import check_role
from bettercompute.pki.join_token import JoinToken
from bettercompute.pki.trust import Trust
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.world import Clock, World

# Long enough for a herd of ten thousand to pass, short enough for a provisioning tool.
GIVE_UP_AFTER_MS = 10 * 60 * 1000

# Named by the protocol, and shown nothing for yet.
LATER = frozenset({"cloud-iid", "tpm"})

log = structlog.get_logger("bcd.join")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSettings:
    """What an operator, the configuration and the machine say about a join."""

    token: str = field(repr=False)
    daemon_version: str
    role: str = "node"
    node_id: str = ""
    """Empty: the token or JoinService names the node."""
    attestor: str = ""
    """Empty: the token's."""
    evidence: bytes = field(default=b"", repr=False)
    """What the attestor wants beside the token."""
    hardware: messages.HardwareClaims = field(default_factory=messages.HardwareClaims)
    machine: Machine = field(default_factory=Machine)
    gateway_url: tuple[str, ...] = ()
    """Empty: the token's."""
    server_name: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Names the proxies."""
    give_up_after_ms: int = GIVE_UP_AFTER_MS
    rejoin: bool = False
    """Replace an identity that is there."""


async def join(store: IdentityStore, settings: JoinSettings, *, world: World, dial: Dial | None = None) -> Identity:
    """Join and return the identity, which is on disk then.

    Tries every gateway, waits as told, and asks again with the same request, until `give_up_after_ms`; then raises what
    the last attempt met. Raises `Refused` at once for what waiting does not cure.
    """
    token = join_token.parse_token(settings.token)
    check_role(settings.role)
    shown = _evidence(settings, token, clock=world.clock)
    held = await asyncio.to_thread(_held, store, rejoin=settings.rejoin)
    label = join_token.secret_sha256(token.secret)
    request = await asyncio.to_thread(store.pending, Purpose.JOIN, label=label)
    route = Route(
        gateway_urls=settings.gateway_url or token.gateway_urls,
        serving_ca_pins=token.serving_ca_pins,
        join_signing_keys=(token.join_signing_key,),
        server_name=settings.server_name,
        environment=settings.environment,
    )
    application = Application(
        role=settings.role,
        node_id=settings.node_id,
        daemon_version=settings.daemon_version,
        hardware=settings.hardware,
    )
    attempt = JoinAttempt(route, application, shown, request, world=world, dial=dial, held=held)
    issued = await attempt.until_answered(give_up_after_ms=settings.give_up_after_ms)
    identity = await asyncio.to_thread(store.install, Purpose.JOIN, request, issued, machine=settings.machine)
    log.info("joined", node_id=identity.record.node_id, site=identity.record.site, role=identity.record.role)
    return identity


def _evidence(settings: JoinSettings, token: JoinToken, *, clock: Clock) -> Evidence:
    attestor = settings.attestor or token.attestor
    if settings.evidence and attestor != DISCOVERY:
        raise refuse(Reason.BAD_REQUEST, f"attestor {attestor} takes no evidence beside the token: leave it out")
    match attestor:
        case join_token.JOIN_TOKEN:
            return TokenEvidence(token=token, clock=clock)
        case evidence.PROVISIONED:
            return SealedEvidence(token=token, clock=clock, attestor=attestor)
        case evidence.DISCOVERY:
            if not settings.evidence:
                raise refuse(
                    Reason.BAD_REQUEST,
                    f"attestor {attestor} needs the site agent's assertion: name it by --evidence-file",
                )
            return SealedEvidence(token=token, clock=clock, attestor=attestor, assertion=settings.evidence)
    known = f"{join_token.JOIN_TOKEN}, {evidence.PROVISIONED} or {evidence.DISCOVERY}"
    if attestor in LATER:
        raise refuse(
            Reason.ATTESTOR_UNKNOWN, f"attestor {attestor} is not supported by this version of bcd: join by {known}"
        )
    raise refuse(Reason.ATTESTOR_UNKNOWN, f"attestor {attestor[:40]!a} is not known to bcd: join by {known}")


def _held(store: IdentityStore, *, rejoin: bool) -> Trust | None:
    """Return the bundle of the identity that is there, which a re-join replaces; refuse to replace it unasked."""
    try:
        identity = store.load()
    except Refused:
        return None  # damaged, and joining anew is the cure
    if identity is None:
        return None
    if not rejoin:
        raise refuse(
            Reason.CONFLICT,
            f"this node has joined already, as {identity.record.node_id}: start it with `bcd node`, "
            "or give it a new identity with `bcd rejoin TOKEN`",
        )
    return identity.trust
