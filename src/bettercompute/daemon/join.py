"""The daemon's half of Join.

The key and its request are on disk before anything is sent, so a lost answer, a crash or a deferral is asked for again
with the same request and gets the same certificate. The token goes sealed to JoinService; the answer is believed only
when the join-signing key that the token pins signed it, for this very request. Then the identity is put on disk in one
step. See docs/security.md, "Joining"; decisions 0111.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog
from cryptography.hazmat.primitives.asymmetric import ec

from bettercompute.daemon.identity import Identity, IdentityStore, Issued, Machine, PendingRequest, Purpose
from bettercompute.errors import BetterComputeError, Refused, Unavailable
from bettercompute.pki import certificates, join_token, signatures, trust
from bettercompute.pki.identity import NodeIdentity, agent_role, check_role, identity_of, role_of
from bettercompute.pki.join_token import JoinToken, check_gateway_url
from bettercompute.pki.trust import Trust
from bettercompute.protocol import messages, service
from bettercompute.protocol.envelopes import join_response_input
from bettercompute.protocol.frames import decode_message, encode_message
from bettercompute.protocol.limits import MAX_JOIN_BYTES, MAX_PUSHBACK_MS, MAX_TRUST_BUNDLE_BYTES
from bettercompute.protocol.statuses import Reason, Status, refuse
from bettercompute.session.reconnect import Backoff, Ending, next_wait
from bettercompute.transport import streams
from bettercompute.transport.streams import Connection, DialFailed, DialKind, DialTarget
from bettercompute.world import World

ATTESTOR = "join-token"
ANSWER_TIMEOUT_S = 30.0
ANSWER_BYTES_MAX = MAX_TRUST_BUNDLE_BYTES + MAX_JOIN_BYTES  # a bundle, a chain and a few names
GIVE_UP_AFTER_MS = (
    10 * 60 * 1000
)  # long enough for a herd of ten thousand to pass, short enough for a provisioning tool

# What the same request may meet with better luck later; anything else needs somebody to change something.
_TRY_AGAIN = frozenset({Status.UNAVAILABLE, Status.RESOURCE_EXHAUSTED, Status.DEADLINE_EXCEEDED, Status.ABORTED})

# A gateway of another installation, a wrong address, an unusable proxy: no waiting makes it the right one.
_BAD_GATEWAY = frozenset({DialKind.BAD_TARGET, DialKind.PIN_MISMATCH, DialKind.SERVER_NAME})

Dial = Callable[[DialTarget], Awaitable[Connection]]

log = structlog.get_logger("bcd.join")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSettings:
    """What an operator, the configuration and the machine say about a join."""

    token: str = field(repr=False)
    daemon_version: str
    role: str = "node"
    node_id: str = ""
    """Empty: the token or JoinService names the node."""
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


@dataclass(frozen=True, slots=True)
class Deferred:
    """Not yet: ask again with the same request."""

    retry_after_ms: int
    message: str


async def join(store: IdentityStore, settings: JoinSettings, *, world: World, dial: Dial | None = None) -> Identity:
    """Join and return the identity, which is on disk then.

    Tries every gateway, waits as told, and asks again with the same request, until `give_up_after_ms`; then raises what
    the last attempt met. Raises `Refused` at once for what waiting does not cure.
    """
    token = join_token.parse_token(settings.token)
    check_role(settings.role)
    held = await asyncio.to_thread(_held, store, rejoin=settings.rejoin)
    label = join_token.secret_sha256(token.secret)
    request = await asyncio.to_thread(store.pending, Purpose.JOIN, label=label)
    attempt = _Attempt(token, settings, request, world=world, dial=dial or _socket_dial(world), held=held)
    issued = await attempt.until_answered()
    identity = await asyncio.to_thread(store.install, Purpose.JOIN, request, issued, machine=settings.machine)
    log.info("joined", node_id=identity.record.node_id, site=identity.record.site, role=identity.record.role)
    return identity


def verify_answer(
    answer: messages.JoinResponse | messages.RenewResponse,
    request: PendingRequest,
    *,
    role: str,
    pinned_keys: Sequence[ec.EllipticCurvePublicKey],
    held: Trust | None,
) -> Issued | Deferred:
    """Return what the services said, if a pinned join-signing key signed it for this request; refuse anything else."""
    signatures.verify_pinned(answer.signature, pinned_keys, join_response_input(answer.body))
    body = decode_message(messages.JoinResponseBody, answer.body, limit=ANSWER_BYTES_MAX)
    if body.csr_sha256 != hashlib.sha256(request.csr_der).digest():
        raise _bad_answer("it answers another certificate request")
    if body.HasField("deferral"):
        return _deferred(body.deferral)
    node = _verified_node(body, request)
    if (node.role, role_of(body.role)) != (role, role):
        raise _bad_answer(f"it gives role {node.role}, and {role} was asked for")
    if not body.gateway_urls:
        raise _bad_answer("it names no gateway")
    return Issued(
        chain_der=tuple(body.certificate_chain),
        trust=_accepted_trust(body, pinned_keys=pinned_keys, held=held),
        identity_generation=body.identity_generation,
        gateway_urls=tuple(check_gateway_url(url) for url in body.gateway_urls),
        server_time_ms=body.server_time_ms,
    )


def _verified_node(body: messages.JoinResponseBody, request: PendingRequest) -> NodeIdentity:
    """Check that the certificate is for the key that asked, in time, and names what the answer names."""
    if not 1 <= len(body.certificate_chain) <= certificates.CHAIN_LENGTH_MAX:
        raise _bad_answer(f"its chain has {len(body.certificate_chain)} certificates")
    leaf, *above = [certificates.load_certificate(der) for der in body.certificate_chain]
    if leaf.public_key() != request.key.public_key():
        raise _bad_answer("its certificate is for another key")
    # By the answer's own time: this host may not have a clock yet.
    if not certificates.not_before_ms(leaf) <= body.server_time_ms <= certificates.not_after_ms(leaf):
        raise _bad_answer("its certificate is not valid at the server's time")
    certificates.verify_chain(
        body.certificate_chain[:-1] or body.certificate_chain,
        roots=above[-1:],
        use=certificates.Use.CLIENT,
        now_ms=body.server_time_ms,
    )
    node = identity_of(leaf)
    if (node.node_id, node.site, node.trust_domain) != (body.node_id, body.site, body.trust_domain):
        raise _bad_answer(f"its certificate is of {node.spiffe_id}, its body of another node")
    return node


def _accepted_trust(
    body: messages.JoinResponseBody, *, pinned_keys: Sequence[ec.EllipticCurvePublicKey], held: Trust | None
) -> Trust:
    """Return the answer's bundle, or the newer one that is held, if it is of the same installation."""
    offered = body.trust.SerializeToString(deterministic=True)
    if held is not None:
        try:
            trust.verify(held.signed, pinned_keys=pinned_keys)
        except Refused:
            held = None
    accepted = trust.accept(offered, held=held, trust_domain=body.trust_domain, pinned_keys=pinned_keys)
    if accepted is not None:
        return accepted
    assert held is not None, "without one held, every verified bundle is newer"
    return held


def _deferred(deferral: messages.JoinDeferral) -> Deferred:
    if deferral.challenge:
        raise refuse(Reason.ATTESTATION, f"the join needs the answer to a challenge ({deferral.reason}): upgrade bcd")
    return Deferred(min(deferral.retry_after_seconds * 1000, MAX_PUSHBACK_MS), deferral.message or deferral.reason)


class _Attempt:
    """One join, until it is answered."""

    def __init__(
        self,
        token: JoinToken,
        settings: JoinSettings,
        request: PendingRequest,
        *,
        world: World,
        dial: Dial,
        held: Trust | None,
    ) -> None:
        self._token = token
        self._settings = settings
        self._request = request
        self._world = world
        self._dial = dial
        self._held = held

    async def until_answered(self) -> Issued:
        """Ask until there is an identity; raise what only a change can cure, or, in the end, what came last."""
        give_up_ms = self._world.clock.monotonic_ms() + self._settings.give_up_after_ms
        backoff = Backoff()
        while True:
            try:
                answer = await self._ask_each_gateway()
                if isinstance(answer, Issued):
                    return answer
                delay_ms, why = answer.retry_after_ms, Unavailable(f"the join is deferred: {answer.message}")
            except BetterComputeError as error:
                if isinstance(error, DialFailed) and error.kind in _BAD_GATEWAY:
                    raise refuse(Reason.INVALID_CONFIG, error.message) from error
                if error.status not in _TRY_AGAIN:
                    raise
                ending = Ending(status=Status(error.status), reason=error.reason, pushback_ms=error.pushback_ms)
                backoff, wait = next_wait(backoff, ending, drawn=self._world.dice.uniform(0, 1))
                delay_ms, why = wait.delay_ms, Unavailable(error.message, reason=error.reason)
            if self._world.clock.monotonic_ms() + delay_ms >= give_up_ms:
                raise why
            log.warning("join is tried again", why=why.message, delay_ms=delay_ms)
            await asyncio.sleep(delay_ms / 1000)

    async def _ask_each_gateway(self) -> Issued | Deferred:
        """Ask the gateways in random order; the first that can be reached answers for all."""
        urls = self._settings.gateway_url or self._token.gateway_urls
        unreachable: BetterComputeError | None = None
        for url in sorted(urls, key=lambda _: self._world.dice.uniform(0, 1)):
            try:
                connection = await self._connect(url)
            except Unavailable as error:
                unreachable = error
                continue
            try:
                return await self._ask(connection)
            finally:
                connection.close()
        assert unreachable is not None, "a token names a gateway"
        raise unreachable

    async def _connect(self, url: str) -> Connection:
        mismatch: DialFailed | None = None
        for pin in self._token.serving_ca_pins:
            target = DialTarget(
                url=url,
                serving_ca_spki_sha256=bytes.fromhex(pin),
                server_name=self._settings.server_name,
                environment=self._settings.environment,
            )
            try:
                return await self._dial(target)
            except DialFailed as failure:
                if failure.kind is not DialKind.PIN_MISMATCH:
                    raise
                mismatch = failure
        assert mismatch is not None, "a token pins a serving CA"
        raise mismatch

    async def _ask(self, connection: Connection) -> Issued | Deferred:
        sealed = join_token.seal_proof(
            self._token.secret,
            join_encryption_key=self._token.join_encryption_key,
            csr_der=self._request.csr_der,
            role=self._settings.role,
            now_ms=self._world.clock.now_ms(),
        )
        request = messages.JoinRequest(
            sealed_token=sealed,
            csr=self._request.csr_der,
            hardware=self._settings.hardware,
            attestor=ATTESTOR,
            daemon_version=self._settings.daemon_version,
            role=agent_role(self._settings.role),
            node_id=self._settings.node_id,
        )
        data = await connection.unary(
            service.JOIN, encode_message(request, limit=MAX_JOIN_BYTES), timeout_s=ANSWER_TIMEOUT_S
        )
        return verify_answer(
            decode_message(messages.JoinResponse, data, limit=ANSWER_BYTES_MAX),
            self._request,
            role=self._settings.role,
            pinned_keys=[self._token.join_signing_key],
            held=self._held,
        )


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


def _socket_dial(world: World) -> Dial:
    async def dial(target: DialTarget) -> Connection:
        return await streams.dial(target, world=world)

    return dial


def _bad_answer(why: str) -> Refused:
    return refuse(Reason.BAD_PROOF, f"the answer to the join is refused: {why}")
