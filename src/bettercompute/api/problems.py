"""Errors as RFC 9457 problem documents: `type`, `title`, `status`, `detail` and our own stable `reason`."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import compile_path

from bettercompute.api import invalid
from bettercompute.errors import BetterComputeError, Bug, Unavailable
from bettercompute.protocol.statuses import Reason, Status
from bettercompute.store.database import StatementFailed

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


# Reasons of what the framework, or `bounds` through it, refuses.
_REASONS = {HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "too-large", HTTPStatus.REQUEST_TIMEOUT: "slow-body"}

# SQLSTATE class 22, data exception: the statement is right, a value that it was given is not.
_DATA_EXCEPTION = "22"


def problem(
    status: int, detail: str, *, reason: str, headers: dict[str, str] | None = None, **more: Any
) -> JSONResponse:
    """Return the response for one problem; `more` are members of its own."""
    title = HTTPStatus(status).phrase
    # A foreign text with half of a surrogate pair must not fail the answer that refuses it.
    detail = detail.encode("utf-8", "backslashreplace").decode()
    body = {"type": "about:blank", "title": title, "status": int(status), "detail": detail, "reason": reason, **more}
    return JSONResponse(body, status_code=status, media_type=MEDIA_TYPE, headers=headers)


def answer(error: BetterComputeError, *, path: str) -> JSONResponse:
    """Return the problem document of one of our errors; what only concerns us is logged and not told."""
    if isinstance(error, StatementFailed) and error.sqlstate.startswith(_DATA_EXCEPTION):
        _log.warning("a value that the database cannot hold came through the api", path=path, error=str(error))
        detail = "a value in this request cannot be stored: send plain text without NUL, and numbers within their range"
        return problem(HTTPStatus.BAD_REQUEST, detail, reason=Reason.BAD_REQUEST)
    if isinstance(error, Bug):
        return _fault(error, path=path)
    detail = error.message
    if isinstance(error, Unavailable) and error.reason == Reason.DATABASE:
        _log.warning("the api cannot use the database", path=path, error=str(error))
        detail = "the database cannot serve this now: try again soon; the control plane's log says why"
    status = _HTTP.get(Status(error.status), HTTPStatus.INTERNAL_SERVER_ERROR)
    headers = {}
    if status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = "Bearer"
    if error.pushback_ms is not None:
        headers["retry-after"] = str(-(-error.pushback_ms // 1000))
    return problem(status, detail, reason=str(error.reason), headers=headers)


def install(app: FastAPI) -> None:
    """Make every error of `app` a problem document; a fault of ours is logged and told without its inside."""

    async def ours(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, BetterComputeError)
        return answer(error, path=request.url.path)

    async def validation(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        errors = error.errors()
        status = HTTPStatus.UNPROCESSABLE_ENTITY if invalid.in_body(errors) else HTTPStatus.BAD_REQUEST
        return problem(status, invalid.sentences(errors), reason="invalid-request")

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, ValueError | RecursionError):  # of the JSON parser, by FastAPI's hand
            detail = f"the body is no JSON that can be read (not UTF-8, or nested too deeply): {invalid.NOT_JSON}"
            return problem(HTTPStatus.UNPROCESSABLE_ENTITY, detail, reason="invalid-request")
        detail = str(error.detail)
        asked = f"{request.method} {invalid.shown(request.url.path)}"
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = ", ".join(_methods(request))
            detail = f"there is no {asked}: this path takes {allowed}; /openapi.json lists what there is"
            return problem(error.status_code, detail, reason="http", headers={"allow": allowed})
        if error.status_code == HTTPStatus.NOT_FOUND:
            detail = f"there is no {asked}: /openapi.json lists what there is"
        headers = dict(error.headers) if error.headers else None
        reason = _REASONS.get(HTTPStatus(error.status_code), "http")
        return problem(error.status_code, detail, reason=reason, headers=headers)

    async def bug(request: Request, error: Exception) -> JSONResponse:
        return _fault(error, path=request.url.path)

    app.add_exception_handler(BetterComputeError, ours)
    app.add_exception_handler(RequestValidationError, validation)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, bug)


def _methods(request: Request) -> list[str]:
    """Return the methods that this path takes; the framework names those of the first route only."""
    described = request.app.openapi()["paths"].items()
    taken = [methods for path, methods in described if compile_path(path)[0].match(request.url.path)]
    return sorted({method.upper() for methods in taken for method in methods})


def _fault(error: Exception, *, path: str) -> JSONResponse:
    _log.error("api request failed", path=path, error=repr(error), exc_info=error)
    detail = "the control plane failed at this request; its log says why"
    return problem(HTTPStatus.INTERNAL_SERVER_ERROR, detail, reason="bug")
