"""One join, until it is answered: which gateway is asked, when it is asked again, and what is answered on the way.

Every attempt is made with the same certificate request. A deferral and a refusal that say when to come back are obeyed
exactly; other passing faults are waited out with full jitter. All waiting together is bounded, unless whoever asks
waits for ever. See docs/security.md, "Joining"; decisions 0145.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog
from cryptography.hazmat.primitives.asymmetric import ec

from bettercompute.daemon.evidence import Evidence
from bettercompute.daemon.identity import Issued, PendingRequest
from bettercompute.daemon.join_answer import ANSWER_BYTES_MAX, Challenged, Deferred, verify_answer
from bettercompute.errors import BetterComputeError, Unavailable
from bettercompute.pki.identity import agent_role
from bettercompute.pki.trust import Trust
from bettercompute.protocol import messages, service
from bettercompute.protocol.frames import decode_message, encode_message
from bettercompute.protocol.limits import MAX_JOIN_BYTES
from bettercompute.protocol.statuses import Reason, Status, refuse
from bettercompute.session.reconnect import Backoff, Ending, next_wait
from bettercompute.transport import streams
from bettercompute.transport.streams import Connection, DialFailed, DialKind, DialTarget
from bettercompute.world import World

ANSWER_TIMEOUT_S = 30.0
# An attestor challenges once; whoever challenges for ever is not ours.
CHALLENGES_MAX = 3

# What the same request may meet with better luck later; anything else needs somebody to change something.
_TRY_AGAIN = frozenset({Status.UNAVAILABLE, Status.RESOURCE_EXHAUSTED, Status.DEADLINE_EXCEEDED, Status.ABORTED})

# A gateway of another installation, a wrong address, an unusable proxy: no waiting makes it the right one.
_BAD_GATEWAY = frozenset({DialKind.BAD_TARGET, DialKind.PIN_MISMATCH, DialKind.SERVER_NAME})

Dial = Callable[[DialTarget], Awaitable[Connection]]

log = structlog.get_logger("bcd.join")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where JoinService is reached, and by which keys it is known."""

    gateway_urls: tuple[str, ...]
    serving_ca_pins: tuple[str, ...]
    join_signing_keys: Sequence[ec.EllipticCurvePublicKey]
    server_name: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Names the proxies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """What a machine says of itself beside its evidence."""

    role: str
    node_id: str
    """Empty: the evidence or JoinService names the node."""
    daemon_version: str
    hardware: messages.HardwareClaims = field(default_factory=messages.HardwareClaims)


class JoinAttempt:
    """Asks with one certificate request."""

    def __init__(
        self,
        route: Route,
        application: Application,
        evidence: Evidence,
        request: PendingRequest,
        *,
        world: World,
        dial: Dial | None,
        held: Trust | None,
    ) -> None:
        self._route = route
        self._application = application
        self._evidence = evidence
        self._request = request
        self._world = world
        self._dial = dial or _socket_dial(world)
        self._held = held

    async def until_answered(self, *, give_up_after_ms: int | None) -> Issued:
        """Ask until there is an identity; raise what only a change can cure, or, in the end, what came last."""
        begun_ms = self._world.clock.monotonic_ms()
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
            waited_ms = self._world.clock.monotonic_ms() - begun_ms
            if give_up_after_ms is not None and waited_ms + delay_ms >= give_up_after_ms:
                raise why
            log.warning("join is tried again", why=why.message, delay_ms=delay_ms)
            await asyncio.sleep(delay_ms / 1000)

    async def _ask_each_gateway(self) -> Issued | Deferred:
        """Ask the gateways in random order; the first that can be reached answers for all."""
        unreachable: BetterComputeError | None = None
        for url in sorted(self._route.gateway_urls, key=lambda _: self._world.dice.uniform(0, 1)):
            try:
                connection = await self._connect(url)
            except Unavailable as error:
                unreachable = error
                continue
            try:
                return await self._converse(connection)
            finally:
                connection.close()
        raise unreachable or Unavailable(
            "no gateway to dial: set gateway_url in the configuration", reason="no-gateway"
        )

    async def _connect(self, url: str) -> Connection:
        mismatch: DialFailed | None = None
        for pin in self._route.serving_ca_pins:
            target = DialTarget(
                url=url,
                serving_ca_spki_sha256=bytes.fromhex(pin),
                server_name=self._route.server_name,
                environment=self._route.environment,
            )
            try:
                return await self._dial(target)
            except DialFailed as failure:
                if failure.kind is not DialKind.PIN_MISMATCH:
                    raise
                mismatch = failure
        raise mismatch or Unavailable("no serving CA is pinned: join this node with a new token", reason="no-pin")

    async def _converse(self, connection: Connection) -> Issued | Deferred:
        """Ask, and answer what is asked in return; a refusal that says what was lacking is met once."""
        request = self._form()
        answer = await self._ask_once_more(connection, request)
        for _ in range(CHALLENGES_MAX):
            if not isinstance(answer, Challenged):
                return answer
            request.challenge_answer = self._evidence.answer(answer.challenge, request)
            answer = await self._ask(connection, request)
        if not isinstance(answer, Challenged):
            return answer
        raise refuse(
            Reason.ATTESTATION,
            f"the control plane challenged {CHALLENGES_MAX + 1} times in a row and took no answer ({answer.message}): "
            "this bcd and it do not understand each other; upgrade bcd",
        )

    async def _ask_once_more(
        self, connection: Connection, request: messages.JoinRequest
    ) -> Issued | Deferred | Challenged:
        try:
            return await self._ask(connection, request)
        except BetterComputeError as error:
            if not self._evidence.cures(error):
                raise
        self._evidence.show(request)
        return await self._ask(connection, request)

    def _form(self) -> messages.JoinRequest:
        application = self._application
        request = messages.JoinRequest(
            csr=self._request.csr_der,
            hardware=application.hardware,
            daemon_version=application.daemon_version,
            role=agent_role(application.role),
            node_id=application.node_id,
        )
        self._evidence.show(request)
        return request

    async def _ask(self, connection: Connection, request: messages.JoinRequest) -> Issued | Deferred | Challenged:
        data = await connection.unary(
            service.JOIN, encode_message(request, limit=MAX_JOIN_BYTES), timeout_s=ANSWER_TIMEOUT_S
        )
        return verify_answer(
            decode_message(messages.JoinResponse, data, limit=ANSWER_BYTES_MAX),
            self._request,
            role=self._application.role,
            pinned_keys=self._route.join_signing_keys,
            held=self._held,
        )


def _socket_dial(world: World) -> Dial:
    async def dial(target: DialTarget) -> Connection:
        return await streams.dial(target, world=world)

    return dial
