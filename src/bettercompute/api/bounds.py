"""What a request may cost before anybody has looked at it: bounds on its head and body, and who asks, checked first.

Pure ASGI, outside the routes, because FastAPI reads and parses a body before it resolves any dependency. The order is:
the head's size, then the caller (`admit`), then room for one more request, and only then the body, counted as it comes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bettercompute.api.auth import Principal
from bettercompute.api.problems import answer, problem
from bettercompute.errors import BetterComputeError
from bettercompute.protocol.limits import KIB, MIB

# A run names up to 20,000 nodes and carries a payload of up to 1 MiB.
RUN_BODY_BYTES_MAX: Final = 2 * MIB
# A spec as JSON. Its bytes may be twice as many, which only a control plane's own module would write.
SPEC_BODY_BYTES_MAX: Final = 2 * MIB
# The largest of the others carries a certificate request of 16 KiB.
BODY_BYTES_MAX: Final = 64 * KIB
# A body is sent in one go: who pauses for longer than this holds a request open for its own sake.
BODY_WAIT_S: Final = 30
# A bearer token, an idempotency key, a proxy's own dozen; the same as a gateway's bound on a header list.
HEADER_BYTES_MAX: Final = 16 * KIB
HEADERS_MAX: Final = 100
# An id of 256 characters, each of up to four bytes, each byte percent-encoded, is 3 KiB; and a few words around it.
PATH_BYTES_MAX: Final = 4 * KIB
# Five such filters never come together.
QUERY_BYTES_MAX: Final = 8 * KIB
# Callers that wait for commands to end hold one each. With full bodies these are 1 GiB, of callers who have a token.
REQUESTS_MAX: Final = 512
# A refused client that still sends only sees the answer when its connection is not reset: this much is thrown away.
LINGER_BYTES_MAX: Final = 4 * MIB
LINGER_S: Final = 1

Admit = Callable[[str], Awaitable[Principal]]
"""Takes the `authorization` header ("" without one) and returns who asks, or raises a `BetterComputeError`."""


def needs_principal(path: str) -> bool:
    """Say whether a path is answered only to a bearer of a token."""
    return path == "/v1" or path.startswith("/v1/")


def body_bytes_max(method: str, path: str) -> int:
    """Return how large this request's body may be."""
    if method == "POST" and path in {"/v1/commands", "/v1/commands/preview"}:
        return RUN_BODY_BYTES_MAX
    if method in {"PUT", "PATCH"} and path.startswith("/v1/nodes/") and path.endswith("/spec"):
        return SPEC_BODY_BYTES_MAX
    return BODY_BYTES_MAX


class Bounds:
    """The ASGI middleware; hands the caller on as `request.state.principal`."""

    def __init__(self, app: ASGIApp, *, admit: Admit) -> None:
        self._app = app
        self._admit = admit
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        refusal = _head_refusal(scope, body_bytes=exchange.declared_bytes)
        if refusal is not None or not needs_principal(scope["path"]):
            await (refusal or self._app)(scope, exchange.receive, exchange.send)
            return
        try:
            principal = await self._admit(Headers(scope=scope).get("authorization", ""))
        except BetterComputeError as error:
            await answer(error, path=scope["path"])(scope, exchange.receive, exchange.send)
            return
        if self._open >= REQUESTS_MAX:
            await _overloaded()(scope, exchange.receive, exchange.send)
            return
        scope = {**scope, "state": {**scope.get("state", {}), "principal": principal}}
        self._open += 1
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            self._open -= 1


def _head_refusal(scope: Scope, *, body_bytes: int) -> Response | None:
    header_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
    if header_bytes > HEADER_BYTES_MAX or len(scope["headers"]) > HEADERS_MAX:
        return problem(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"{len(scope['headers'])} headers of {header_bytes} bytes: at most {HEADERS_MAX} headers of "
            f"{HEADER_BYTES_MAX} bytes together are read; send fewer",
            reason="headers-too-large",
        )
    path_bytes = len(scope.get("raw_path") or scope["path"].encode("utf-8", "replace"))
    for what, size, limit in (
        ("path", path_bytes, PATH_BYTES_MAX),
        ("query", len(scope["query_string"]), QUERY_BYTES_MAX),
    ):
        if size > limit:
            detail = f"the {what} has {size} bytes: at most {limit} are read; shorten it"
            return problem(HTTPStatus.REQUEST_URI_TOO_LONG, detail, reason="uri-too-long")
    limit = body_bytes_max(scope["method"], scope["path"])
    if body_bytes > limit:
        return problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _too_large(scope, limit), reason="too-large")
    return None


def _too_large(scope: Scope, limit: int) -> str:
    cure = "name fewer nodes in each of several runs" if limit == RUN_BODY_BYTES_MAX else "send less"
    return f"the body is larger than the {limit} bytes that a {scope['method']} takes here: {cure}"


def _overloaded() -> Response:
    return problem(
        HTTPStatus.SERVICE_UNAVAILABLE,
        f"{REQUESTS_MAX} requests are being answered, which is the most at once: try again in a second",
        reason="overloaded",
        headers={"retry-after": "1"},
    )


class _Exchange:
    """One request and its answer: counts the body, and throws away what nobody read before the answer ends."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        self.declared_bytes = int(length[:20]) if length.isascii() and length.isdigit() else 0
        # Who asks first whether to send ("100-continue") sends nothing after a refusal.
        self._unread = (self.declared_bytes > 0 or "transfer-encoding" in headers) and "expect" not in headers
        self._complete = False
        self._received_bytes = 0
        self._scope = scope
        self._receive = receive
        self._send = send

    async def receive(self) -> Message:
        """Return the next message; raises HTTPException, which routes let pass, for a body too large or too slow."""
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout(BODY_WAIT_S):
                message = await self._next()
        except TimeoutError:
            detail = f"no more of the body came for {BODY_WAIT_S} s: send it in one go"
            raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, detail, headers={"connection": "close"}) from None
        limit = body_bytes_max(self._scope["method"], self._scope["path"])
        if self._received_bytes > limit:
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _too_large(self._scope, limit))
        return message

    async def send(self, message: Message) -> None:
        """Send, holding back the end of the answer until the client has had a moment to finish sending."""
        ends = message["type"] == "http.response.body" and not message.get("more_body", False)
        if ends and self._unread and not self._complete:
            await self._send({**message, "more_body": True})
            await self._discard()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def _next(self) -> Message:
        message = await self._receive()
        self._received_bytes += len(message.get("body", b""))
        self._complete = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def _discard(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while not self._complete and self._received_bytes < LINGER_BYTES_MAX:
                    await self._next()
