"""The services' end of the internal HTTP: JoinService for gateways that run elsewhere and hold no key of it.

Who may call: whoever shows a leaf of the serving CA, which is what makes a gateway a gateway. `[internal]
gateway_names` narrows that to leaves that carry one of its names, so that a stolen one is shut out at once. What
JoinService refuses is answered as a `Refusal`; a call that no gateway of ours makes gets a plain HTTP error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from http import HTTPStatus
from typing import TypeVar

import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from bettercompute.errors import BetterComputeError, Bug, Unavailable
from bettercompute.gateway.services import GatewayServices
from bettercompute.protocol import messages
from bettercompute.protocol.frames import ProtocolError, decode_message, encode_message, refuse_oversize
from bettercompute.protocol.limits import MAX_JOIN_BYTES
from bettercompute.protocol.statuses import Reason, Status, refuse
from bettercompute.server.internal_rpc import (
    ANSWER_BYTES_MAX,
    ANSWER_S,
    JOIN_PATH,
    MESSAGE_TYPE,
    REFUSAL_TYPE,
    RENEW_PATH,
    SOURCE_CHARACTERS_MAX,
    SOURCE_HEADER,
    TRUST_PATH,
    TRUST_VERSION_HEADER,
    Refusal,
    parse_peer_chain,
)
from bettercompute.server.internal_tls import caller_names, canonical_name

# Open connections: a few a gateway.
CONNECTIONS_MAX = 512

_log = structlog.get_logger("bettercompute.server.internal")

M = TypeVar("M", bound=messages.ProtoMessage)
Work = Callable[[Request], Awaitable[Response]]


class CallerProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which also tells the application the names in the caller's certificate."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in its superclass
        """Read the certificate once a connection."""
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        names = () if tls is None else caller_names(tls.getpeercert(binary_form=True))
        self.app_state = {**self.app_state, "caller_names": names}


def create_internal_app(services: GatewayServices, *, gateway_names: Iterable[str] = ()) -> Starlette:
    """Return the application. It must be served over mutual TLS, by `CallerProtocol`.

    `gateway_names`: which names a caller's certificate may carry; empty: any.
    """
    allowed = frozenset(map(canonical_name, gateway_names))

    async def join(request: Request) -> Response:
        source = request.headers.get(SOURCE_HEADER, "")
        if not 0 < len(source) <= SOURCE_CHARACTERS_MAX or not source.isprintable():
            raise HTTPException(HTTPStatus.BAD_REQUEST, f"{SOURCE_HEADER} must say from where the join came")
        asked = await _message(request, messages.JoinRequest)
        return _answer(await services.join(asked, source=source))

    async def renew(request: Request) -> Response:
        try:
            chain = parse_peer_chain(request.headers)
        except ValueError as error:
            raise HTTPException(HTTPStatus.BAD_REQUEST, str(error)) from error
        asked = await _message(request, messages.RenewRequest)
        return _answer(await services.renew(asked, peer_chain=chain))

    async def trust_bundle(_: Request) -> Response:
        published = await services.trust_bundle()
        if published is None:
            return Response(status_code=HTTPStatus.NO_CONTENT)
        version, bundle = published
        return Response(bundle, media_type=MESSAGE_TYPE, headers={TRUST_VERSION_HEADER: str(version)})

    def told(work: Work) -> Work:
        async def endpoint(request: Request) -> Response:
            _check_caller(request.state.caller_names, allowed=allowed)
            try:
                async with asyncio.timeout(ANSWER_S):
                    return await work(request)
            except TimeoutError:
                return _refusal(Unavailable(f"the join service had no answer within {ANSWER_S:g} s: try again"))
            except HTTPException:
                raise
            except Bug:
                return _fault(request)
            except BetterComputeError as error:
                return _refusal(error)
            except Exception:  # noqa: BLE001 - logged; the gateway must hear that it is our fault
                return _fault(request)

        return endpoint

    return Starlette(
        routes=[
            Route(JOIN_PATH, told(join), methods=["POST"]),
            Route(RENEW_PATH, told(renew), methods=["POST"]),
            Route(TRUST_PATH, told(trust_bundle), methods=["GET"]),
        ]
    )


def _check_caller(names: tuple[str, ...], *, allowed: frozenset[str]) -> None:
    if allowed and allowed.isdisjoint(map(canonical_name, names)):
        why = f"the caller's certificate names {', '.join(names)}, none of which is in [internal] gateway_names"
        _log.warning("caller refused", why=why)
        raise HTTPException(HTTPStatus.FORBIDDEN, why)


async def _message(request: Request, cls: type[M]) -> M:
    """Read a bounded body. The gateway has parsed and bounded the message itself: what is wrong here is between us."""
    if request.headers.get("content-type") != MESSAGE_TYPE:
        raise HTTPException(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"the body must be {MESSAGE_TYPE}")
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            refuse_oversize(cls.DESCRIPTOR.name, size_bytes=len(body), limit=MAX_JOIN_BYTES)
        return decode_message(cls, bytes(body), limit=MAX_JOIN_BYTES)
    except ProtocolError as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, error.message) from error
    except ClientDisconnect as error:
        raise HTTPException(HTTPStatus.BAD_REQUEST, "the body ended early") from error


def _answer(message: messages.ProtoMessage) -> Response:
    return Response(encode_message(message, limit=ANSWER_BYTES_MAX), media_type=MESSAGE_TYPE)


def _refusal(error: BetterComputeError) -> Response:
    passing = error.status == Status.UNAVAILABLE
    status = HTTPStatus.SERVICE_UNAVAILABLE if passing else HTTPStatus.UNPROCESSABLE_ENTITY
    return Response(Refusal.of(error).model_dump_json(), status_code=status, media_type=REFUSAL_TYPE)


def _fault(request: Request) -> Response:
    _log.exception("call failed", path=request.url.path)
    return _refusal(refuse(Reason.BUG, "internal error; the log of the join service says more"))
