"""Errors as RFC 9457 problem documents: `type`, `title`, `status`, `detail` and our own stable `reason`."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from bettercompute.errors import BetterComputeError
from bettercompute.protocol.statuses import Status

MEDIA_TYPE = "application/problem+json"

_log = structlog.get_logger(__name__)

# Which HTTP status says what a gRPC status says.
_HTTP = {
    Status.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    Status.NOT_FOUND: HTTPStatus.NOT_FOUND,
    Status.ALREADY_EXISTS: HTTPStatus.CONFLICT,
    Status.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    Status.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    Status.FAILED_PRECONDITION: HTTPStatus.CONFLICT,
    Status.ABORTED: HTTPStatus.CONFLICT,
    Status.UNIMPLEMENTED: HTTPStatus.NOT_IMPLEMENTED,
    Status.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    Status.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
}


def problem(
    status: int, detail: str, *, reason: str, headers: dict[str, str] | None = None, **more: Any
) -> JSONResponse:
    """Return the response for one problem; `more` are members of its own."""
    title = HTTPStatus(status).phrase
    body = {"type": "about:blank", "title": title, "status": int(status), "detail": detail, "reason": reason, **more}
    return JSONResponse(body, status_code=status, media_type=MEDIA_TYPE, headers=headers)


def install(app: FastAPI) -> None:
    """Make every error of `app` a problem document; a fault of ours is logged and told without its inside."""

    async def ours(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, BetterComputeError)
        status = _HTTP.get(Status(error.status), HTTPStatus.INTERNAL_SERVER_ERROR)
        headers = {}
        if status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        if error.pushback_ms is not None:
            headers["retry-after"] = str(-(-error.pushback_ms // 1000))
        return problem(status, error.message, reason=str(error.reason), headers=headers)

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        clauses = [
            f"{'.'.join(str(part) for part in item['loc'])}: {str(item['msg'])[:200]}" for item in error.errors()[:20]
        ]
        return problem(HTTPStatus.UNPROCESSABLE_ENTITY, "; ".join(clauses), reason="invalid-request")

    async def http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        headers = dict(error.headers) if error.headers else None
        return problem(error.status_code, str(error.detail), reason="http", headers=headers)

    async def bug(request: Request, error: Exception) -> JSONResponse:
        _log.error("api request failed", path=request.url.path, error=repr(error), exc_info=error)
        detail = "the control plane failed at this request; its log says why"
        return problem(HTTPStatus.INTERNAL_SERVER_ERROR, detail, reason="bug")

    app.add_exception_handler(BetterComputeError, ours)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, bug)
