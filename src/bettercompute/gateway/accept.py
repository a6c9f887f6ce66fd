"""What becomes of a call at the gateway: admission, the first frame, the Hello, the session.

Routes by path, and turns every refusal into its status, reason, pushback and the control plane's time. The rules are
`session.opening`'s and `session.hello`'s. Join and Renew are relayed: they share the handshake bucket with Session. See
docs/sessions.md, "Opening"; docs/gateway.md, "A call, step by step".
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Protocol

import structlog
from cryptography import x509

from bettercompute.errors import BetterComputeError, Bug, Refused
from bettercompute.gateway.config import GatewayConfig
from bettercompute.gateway.hello import RefusedHello
from bettercompute.gateway.life import GatewayLife
from bettercompute.gateway.metrics import GatewayMetrics
from bettercompute.gateway.openings import Openings
from bettercompute.gateway.revocation import RevocationFeed
from bettercompute.gateway.server_time import ServerTime
from bettercompute.gateway.services import GatewayServices
from bettercompute.gateway.session import LiveSession, SessionParts
from bettercompute.gateway.trust import PublishedTrust
from bettercompute.pki import certificates, identity
from bettercompute.protocol import messages, service
from bettercompute.protocol.frames import decode_message, encode_message
from bettercompute.protocol.limits import MAX_JOIN_BYTES
from bettercompute.protocol.statuses import (
    ATTEMPT_METADATA,
    SERVER_TIME_TRAILER,
    Reason,
    Status,
    parse_attempt,
    refuse,
)
from bettercompute.protocol.validation import validate_for_store
from bettercompute.session import gateway_side, opening
from bettercompute.session.hello_plan import CertificateFacts, HelloPlan
from bettercompute.session.inputs import GatewayStopping, LeaseLost, PeerEnded, Revoked
from bettercompute.session.opening import AdmissionState, GatewayCondition, GatewayState
from bettercompute.store import sessions
from bettercompute.store.database import Database
from bettercompute.transport.streams import CallEnded, ServerCall, refusal_trailers, refuse_unknown_method
from bettercompute.world import World

log = structlog.get_logger("bettercompute.gateway.accept")

FIRST_FRAME_S = 10.0
RELAY_S = 20.0
# Reading one costs as much as refusing its stream, and a herd comes back with the same ones.
CERTIFICATES_KEPT = 8_192
ROLE_NUMBERS = {
    identity.ROLE_NODE: messages.AGENT_ROLE_NODE,
    identity.ROLE_SITE: messages.AGENT_ROLE_SITE,
    identity.ROLE_RAMDISK: messages.AGENT_ROLE_RAMDISK,
}
# A household's or a rack's IPv6 network: one source of joins.
IPV6_SOURCE_PREFIX = 64


class Lives(Protocol):
    """Where the present life and its surroundings are found."""

    @property
    def life(self) -> GatewayLife | None:
        """Return the present life, None between two."""
        ...

    @property
    def room_elsewhere(self) -> bool:
        """Return whether another live gateway has room."""
        ...


class Acceptor:
    """The handler of the gateway's listener."""

    def __init__(
        self,
        lives: Lives,
        *,
        config: GatewayConfig,
        database: Database,
        services: GatewayServices,
        world: World,
        revocations: RevocationFeed,
        trust: PublishedTrust,
        server_time: ServerTime,
        metrics: GatewayMetrics,
    ) -> None:
        self._lives = lives
        self._config = config
        self._database = database
        self._services = services
        self._world = world
        self._revocations = revocations
        self._trust = trust
        self._server_time = server_time
        self._metrics = metrics
        self._admission: AdmissionState = opening.open_admission(
            now_ms=world.clock.monotonic_ms(), rate_per_s=config.handshakes_per_s
        )
        self._openings = Openings(world)
        self._held = 0
        self._first_held = asyncio.Lock()

    async def handle(self, call: ServerCall) -> None:
        """Serve one call to its end."""
        try:
            await self._route(call)
        except CallEnded:
            return
        except Bug:
            log.exception("call failed", path=call.path)
            self._refuse(call, refuse(Reason.BUG, "internal error; the gateway's log says more"))
        except BetterComputeError as error:
            self._refuse(call, error)

    async def _route(self, call: ServerCall) -> None:
        match call.path:
            case service.SESSION:
                await self._session(call)
            case service.JOIN:
                await self._join(call)
            case service.RENEW:
                await self._renew(call)
            case service.TUNNEL:
                raise Refused(
                    "this gateway relays no tunnels; ask for the session only",
                    status=Status.UNIMPLEMENTED,
                    reason=Reason.UNKNOWN_METHOD,
                )
            case _:
                refuse_unknown_method(call)

    def _refuse(self, call: ServerCall, error: BetterComputeError) -> None:
        method = call.path.rpartition("/")[2] if call.path in service.PATHS else "unknown"
        self._metrics.refusals.labels(method=method, reason=str(error.reason)).inc()
        log.info(
            "refused",
            method=method,
            peer=call.peer.address,
            reason=str(error.reason),
            message=error.message,
            pushback_ms=error.pushback_ms,
        )
        trailers = {**refusal_trailers(error), SERVER_TIME_TRAILER: str(self._server_time.now_ms())}
        call.finish(error.status, error.message, trailers)

    # Session

    async def _session(self, call: ServerCall) -> None:
        certificate = self._certificate(call)
        with contextlib.ExitStack() as counted:
            with self._openings.add(call, certificate.node_id):
                await self._hold(call)
                if call.ended:
                    return
                life = self._admit_session(call, certificate)
                counted.enter_context(_counted(life))
                opened_under = life.fence.opening
                hello = await self._first_frame(call, certificate)
                async with life.turn(certificate.node_id, left=lambda: call.ended) as there:
                    if not there:
                        return
                    session = await self._open(call, life, hello, certificate=certificate, opened_under=opened_under)
            await session.run()

    def _certificate(self, call: ServerCall) -> CertificateFacts:
        """Return what the verified client certificate says; its bytes are the only source of the node's id."""
        if not call.peer.certificate_chain:
            raise refuse(Reason.NO_CERTIFICATE, "no client certificate was shown: join the machine first (`bcd join`)")
        return _certificate_facts(call.peer.certificate_chain[0], self._config.trust_domain)

    async def _hold(self, call: ServerCall) -> None:
        """Keep a stream that has waited before until it is its turn: first come, first served. Others do not wait."""
        attempt = parse_attempt(call.metadata.get(ATTEMPT_METADATA))
        if not opening.may_be_held(self._admission, self._condition(self._lives.life), attempt=attempt):
            return
        self._held += 1
        try:
            async with self._first_held:
                while not call.ended and (wait_ms := self._hold_ms()):  # noqa: ASYNC110 - it waits for time as well
                    await asyncio.sleep(wait_ms / 1000)
        finally:
            self._held -= 1

    def _hold_ms(self) -> int:
        condition = self._condition(self._lives.life)
        return opening.hold_ms(self._admission, condition, now_ms=self._world.clock.monotonic_ms())

    def _admit_session(self, call: ServerCall, certificate: CertificateFacts) -> GatewayLife:
        life = self._lives.life
        self._admission, refused = opening.admit_session(
            self._admission,
            self._condition(life),
            attempt=parse_attempt(call.metadata.get(ATTEMPT_METADATA)),
            revocation=self._revocations.notice(certificate.serial),
            locked=self._revocations.locked(certificate.node_id),
            now_ms=self._world.clock.monotonic_ms(),
            drawn=self._world.dice.uniform(0, 1),
        )
        if refused is not None:
            raise refused
        assert life is not None, "a gateway without a life is starting, and admits nobody"
        return life

    def _condition(self, life: GatewayLife | None) -> GatewayCondition:
        if life is None or not self._revocations.loaded:
            return GatewayCondition(state=GatewayState.STARTING)
        return replace(life.condition(room_elsewhere=self._lives.room_elsewhere), held=self._held)

    async def _first_frame(self, call: ServerCall, certificate: CertificateFacts) -> messages.Hello:
        try:
            async with asyncio.timeout(FIRST_FRAME_S):
                first = await call.receive()
        except TimeoutError:
            raise refuse(Reason.NOT_HELLO, f"no first frame within {FIRST_FRAME_S:g} s: it must be hello") from None
        if first is None:
            raise refuse(Reason.NOT_HELLO, "the stream was half-closed before its first frame: it must be hello")
        frame = decode_message(messages.AgentFrame, first)
        hello = opening.check_first_frame(frame)
        opening.check_hello(hello, certificate_node_id=certificate.node_id, certificate_role=certificate.role)
        validate_for_store(frame)
        return hello

    async def _open(
        self,
        call: ServerCall,
        life: GatewayLife,
        hello: messages.Hello,
        *,
        certificate: CertificateFacts,
        opened_under: int,
    ) -> LiveSession:
        """Run the Hello transaction and return the live session that it began."""
        life.hellos.admit()
        result = await life.hellos.run(
            hello,
            certificate=certificate,
            gateway=life.gateway_facts(peer_address=call.peer.address, trust_version=self._trust.version),
        )
        if isinstance(result, RefusedHello):
            self._tell_clone(life, certificate.node_id, result)
            raise result.refused
        return await self._begin(call, life, result, opened_under=opened_under)

    async def _begin(self, call: ServerCall, life: GatewayLife, plan: HelloPlan, *, opened_under: int) -> LiveSession:
        spec = None
        if plan.send_spec:
            # Welcome must not wait for a database that has just gone: without it the spec follows by the poll.
            with contextlib.suppress(BetterComputeError):
                found = await sessions.newer_specs(self._database, generations={plan.node_id: 0})
                spec = found.get(plan.node_id)
        state, effects = gateway_side.open_session(
            plan,
            spec=spec,
            trust=self._trust.bundle if plan.send_trust else None,
            server_time_ms=self._server_time.now_ms(),
            now_ms=self._world.clock.monotonic_ms(),
            trust_version=self._trust.version,
        )
        parts = SessionParts(call=call, fence=life.fence, opening=opened_under, world=self._world, surroundings=life)
        session = LiveSession(state, parts)
        life.registry.add(session)
        if not life.fence.holds(opened_under):
            session.give(LeaseLost())
        elif call.ended:
            session.give(PeerEnded("the daemon left during its Hello"))
        else:
            session.begin(effects)
            if life.stopping:
                session.give(GatewayStopping())
            # What the feed has read while this Hello was being committed.
            self._revocations.look_at(session)
            life.dispatcher.look_at(session.node_id)
            log.info("session open", node_id=plan.node_id, session_id=state.session_id, epoch=state.epoch)
        return session

    def _tell_clone(self, life: GatewayLife, node_id: str, refused: RefusedHello) -> None:
        """Tell the clone that is connected here why its certificate has just been revoked."""
        writes = refused.writes
        clone = life.registry.get(node_id)
        if writes is None or writes.notice is None or clone is None:
            return
        notice = messages.RevocationNotice(serials=refused.serials)
        notice.MergeFrom(writes.notice)
        clone.give(Revoked(notice))

    # Join and Renew

    async def _join(self, call: ServerCall) -> None:
        self._admit_join(call)
        request = decode_message(messages.JoinRequest, await self._request(call), limit=MAX_JOIN_BYTES)
        async with _relay_deadline():
            response = await self._services.join(request, source=call.peer.address)
        self._answer(call, response)

    async def _renew(self, call: ServerCall) -> None:
        self._certificate(call)
        self._admit_join(call)
        request = decode_message(messages.RenewRequest, await self._request(call), limit=MAX_JOIN_BYTES)
        async with _relay_deadline():
            response = await self._services.renew(request, peer_chain=call.peer.certificate_chain)
        self._answer(call, response)

    def _admit_join(self, call: ServerCall) -> None:
        self._admission, refused = opening.admit_join(
            self._admission,
            self._condition(self._lives.life),
            source=_source(call.peer.address),
            now_ms=self._world.clock.monotonic_ms(),
            drawn=self._world.dice.uniform(0, 1),
        )
        if refused is not None:
            raise refused

    async def _request(self, call: ServerCall) -> bytes:
        """Return the request of a unary call, once its caller has said that nothing follows it."""
        try:
            async with asyncio.timeout(FIRST_FRAME_S):
                request = await call.receive()
                another = None if request is None else await call.receive()
        except TimeoutError:
            raise refuse(
                Reason.BAD_REQUEST, f"no whole request within {FIRST_FRAME_S:g} s: send one message and half-close"
            ) from None
        if request is None:
            raise refuse(Reason.BAD_REQUEST, "the call was half-closed without a request")
        if another is not None:
            raise refuse(
                Reason.BAD_REQUEST, "the call has a second request message, one is the limit: make a call for each"
            )
        return request

    def _answer(self, call: ServerCall, response: messages.JoinResponse | messages.RenewResponse) -> None:
        call.send(encode_message(response))
        call.finish(Status.OK)


@functools.lru_cache(maxsize=CERTIFICATES_KEPT)
def _certificate_facts(leaf_der: bytes, trust_domain: str) -> CertificateFacts:
    """Return what a verified certificate says. Raises `Refused` for one that is no node's of this trust domain."""
    try:
        leaf = x509.load_der_x509_certificate(leaf_der)
    except identity.UNREADABLE as error:
        raise refuse(Reason.BAD_CERTIFICATE, f"the client certificate cannot be read: {error}") from error
    node = identity.identity_of(leaf)
    if node.trust_domain != trust_domain:
        raise refuse(
            Reason.BAD_CERTIFICATE,
            f"the certificate is of trust domain {node.trust_domain}, this gateway serves {trust_domain}",
        )
    return CertificateFacts(
        serial=certificates.serial_text(leaf),
        node_id=node.node_id,
        role=0 if node.role is None else ROLE_NUMBERS[node.role],
        tenant_controlled=node.tenant_controlled,
        not_after_ms=certificates.not_after_ms(leaf),
        recorded=False,
    )


@contextlib.contextmanager
def _counted(life: GatewayLife) -> Iterator[None]:
    """Count the stream among those that the gateway holds."""
    life.streams += 1
    try:
        yield
    finally:
        life.streams -= 1


@contextlib.asynccontextmanager
async def _relay_deadline() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(RELAY_S):
            yield
    except TimeoutError:
        raise refuse(Reason.UNAVAILABLE, f"the join service did not answer within {RELAY_S:g} s; try again") from None


def _source(address: str) -> str:
    """Return the network that an address counts for: an IPv6 /64, an IPv4 address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((parsed, IPV6_SOURCE_PREFIX), strict=False))
    return address
