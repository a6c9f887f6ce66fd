"""A gateway's end of the internal HTTP: the port `GatewayServices` for a gateway that holds no key of JoinService.

Every call may be asked again, because the same certificate request gets the same certificate and reading the trust
bundle changes nothing; so a connection that is lost is tried anew, within one deadline. While the services are away a
node hears UNAVAILABLE in words that tell it nothing of our inside, and the log says where and why. Nothing here touches
the sessions of nodes that have joined.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import httpx
import structlog
from pydantic import ValidationError

from bettercompute.errors import Unavailable
from bettercompute.gateway.accept import RELAY_S
from bettercompute.protocol import messages
from bettercompute.protocol.frames import ProtocolError, decode_message, encode_message
from bettercompute.protocol.limits import MAX_JOIN_BYTES
from bettercompute.protocol.statuses import Reason
from bettercompute.server.internal_rpc import (
    ANSWER_BYTES_MAX,
    ANSWER_S,
    JOIN_PATH,
    MESSAGE_TYPE,
    REFUSAL_TYPE,
    RENEW_PATH,
    SOURCE_HEADER,
    TRUST_PATH,
    TRUST_VERSION_HEADER,
    Refusal,
    format_peer_chain,
)
from bettercompute.world import World

# Whoever waits for another waits longer than it, so that each hears why from the next.
DEADLINE_S = 16.0
# The trust bundle is asked for again a minute later anyway, and a gateway that starts waits for the first answer.
TRUST_DEADLINE_S = 5.0
CONNECT_S = 2.0
ATTEMPTS_MAX = 3
RETRY_S = 0.3
# A gateway admits at most 50 joins a second; the rest wait here, within the deadline.
CONNECTIONS_MAX = 32
# Less than the 5 s that the services keep an idle connection, so that they seldom close one that is about to be used.
IDLE_S = 3.0

assert ANSWER_S < DEADLINE_S < RELAY_S, "the services, this call, the gateway that relays it"

# A connection that failed: whether the call was served is unknown, and asking again is harmless. Not the timeouts
# after it stood: whoever is slow is not helped by a second call.
_LOST = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
# X509_V_ERR_HOSTNAME_MISMATCH and X509_V_ERR_IP_ADDRESS_MISMATCH
_NAME_MISMATCH = frozenset({62, 64})

_log = structlog.get_logger("bettercompute.server.internal")

M = TypeVar("M", bound=messages.ProtoMessage)


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    headers: httpx.Headers
    body: bytes

    @property
    def media_type(self) -> str:
        return str(self.headers.get("content-type", "")).partition(";")[0].strip()


class RemoteServices:
    """JoinService in another process. Satisfies the gateway's port `GatewayServices`."""

    def __init__(self, url: str, *, tls: Callable[[], ssl.SSLContext], world: World) -> None:
        """Nothing is dialed yet. `url` is `https://HOST:PORT`; `tls` is asked before each call."""
        self._url = url
        self._tls = tls
        self._world = world
        self._client: tuple[ssl.SSLContext, httpx.AsyncClient] | None = None
        self._replaced: httpx.AsyncClient | None = None
        self._away = ""

    async def join(self, request: messages.JoinRequest, *, source: str) -> messages.JoinResponse:
        """Relay a join; `source` is the address that the node called from."""
        return await self._relay(JOIN_PATH, request, {SOURCE_HEADER: source}, messages.JoinResponse)

    async def renew(self, request: messages.RenewRequest, *, peer_chain: Sequence[bytes]) -> messages.RenewResponse:
        """Relay a renewal; `peer_chain` (DER, leaf first) is what TLS verified, or empty."""
        return await self._relay(RENEW_PATH, request, format_peer_chain(peer_chain), messages.RenewResponse)

    async def trust_bundle(self) -> tuple[int, bytes] | None:
        """Return version and bytes of the bundle published last; None before the first."""
        answer = await self._ask("GET", TRUST_PATH, headers={}, content=None, deadline_s=TRUST_DEADLINE_S)
        if answer is None:
            self._reached()
            return None
        version = answer.headers.get(TRUST_VERSION_HEADER, "")
        if not (version.isascii() and version.isdigit()):
            raise self._gone(f"a trust bundle without a version ({version[:20]!a})")
        self._reached()
        return int(version), answer.body

    async def close(self) -> None:
        """Close every connection."""
        for client in (self._replaced, self._client[1] if self._client is not None else None):
            if client is not None:
                await client.aclose()

    async def _relay(self, path: str, request: messages.ProtoMessage, headers: Mapping[str, str], cls: type[M]) -> M:
        content = encode_message(request, limit=MAX_JOIN_BYTES)
        headers = {"content-type": MESSAGE_TYPE, **headers}
        answer = await self._ask("POST", path, headers=headers, content=content, deadline_s=DEADLINE_S)
        if answer is None:
            raise self._gone("an empty answer")
        try:
            response = decode_message(cls, answer.body, limit=ANSWER_BYTES_MAX)
        except ProtocolError as error:
            raise self._gone(error.message) from error
        self._reached()
        return response

    async def _ask(
        self, method: str, path: str, *, headers: Mapping[str, str], content: bytes | None, deadline_s: float
    ) -> _Answer | None:
        """Return what was answered, None for nothing; raise what was refused, or Unavailable."""
        try:
            async with asyncio.timeout(deadline_s):
                answer = await self._tried(method, path, headers=headers, content=content)
        except TimeoutError as error:
            raise self._gone(f"no answer within {deadline_s:g} s") from error
        except httpx.HTTPError as error:
            raise self._gone(_explain(error)) from error
        refusal = _refusal(answer)
        expected = answer.status == httpx.codes.OK and answer.media_type == MESSAGE_TYPE
        if refusal is None and not expected and answer.status != httpx.codes.NO_CONTENT:
            told = answer.body[:300].decode("utf-8", "replace")
            raise self._gone(f"HTTP {answer.status}, which is no answer of the join service: {told!a}")
        if refusal is not None:
            self._reached()
            raise refusal.as_error()
        return answer if expected else None

    async def _tried(self, method: str, path: str, *, headers: Mapping[str, str], content: bytes | None) -> _Answer:
        for attempt in range(1, ATTEMPTS_MAX):
            try:
                return await self._once(method, path, headers=headers, content=content)
            except _LOST as error:
                if _certificate_error(error) is not None:
                    raise
                await asyncio.sleep(self._world.dice.uniform(RETRY_S / 2, RETRY_S) * attempt)
        return await self._once(method, path, headers=headers, content=content)

    async def _once(self, method: str, path: str, *, headers: Mapping[str, str], content: bytes | None) -> _Answer:
        client = await self._present_client()
        async with client.stream(method, path, headers=headers, content=content) as response:
            body = bytearray()
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > ANSWER_BYTES_MAX:
                    raise httpx.DecodingError(f"an answer of more than {ANSWER_BYTES_MAX} bytes")
            return _Answer(response.status_code, response.headers, bytes(body))

    async def _present_client(self) -> httpx.AsyncClient:
        """Return the client that shows our present certificate."""
        context = self._tls()
        if self._client is not None and self._client[0] is context:
            return self._client[1]
        # Calls in flight end on the client that they began with; the one before it has had a certificate's lifetime.
        outlived, self._replaced = self._replaced, self._client[1] if self._client is not None else None
        client = httpx.AsyncClient(
            base_url=self._url,
            verify=context,
            # Neither a proxy nor a redirect may come between a gateway and the services.
            trust_env=False,
            follow_redirects=False,
            headers={"accept-encoding": "identity", "user-agent": "better-compute gateway"},
            timeout=httpx.Timeout(DEADLINE_S, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=CONNECTIONS_MAX, keepalive_expiry=IDLE_S),
        )
        self._client = context, client
        if outlived is not None:
            await outlived.aclose()
        return client

    def _reached(self) -> None:
        if self._away:
            _log.info("join service is back", url=self._url)
            self._away = ""

    def _gone(self, why: str) -> Unavailable:
        """Log why the services cannot be used, once for each reason, and return what the node is told."""
        if self._away != why:
            self._away = why
            _log.error("join service cannot be reached", url=self._url, why=why)
        return Unavailable("this gateway cannot reach the join service now: try again", reason=Reason.UNAVAILABLE)


def _refusal(answer: _Answer) -> Refusal | None:
    if answer.status == httpx.codes.OK or answer.media_type != REFUSAL_TYPE:
        return None
    try:
        return Refusal.model_validate_json(answer.body)
    except ValidationError:
        return None


def _explain(error: httpx.HTTPError) -> str:
    certificate = _certificate_error(error)
    if certificate is not None:
        if certificate.verify_code in _NAME_MISMATCH:
            return (
                f"its certificate is for another name ({certificate.verify_message}): issue it one with "
                "`better-compute pki issue-gateway --san NAME`, or dial it by the name that it has"
            )
        return f"its certificate does not come from the serving CA, or is out of date ({certificate.verify_message})"
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError):
        return f"it ended the connection unanswered ({error}); where it refused our certificate, its log says why"
    if isinstance(error, httpx.ConnectError):
        return f"it takes no connections ({error})"
    return f"{type(error).__name__}: {error}"


def _certificate_error(error: BaseException | None) -> ssl.SSLCertVerificationError | None:
    """Return what our own TLS found wrong with the other end, if that is the cause."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return error
        error = error.__cause__ or error.__context__
    return None
