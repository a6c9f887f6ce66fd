"""Who asks, and what they may: bearer tokens with one of three roles."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum

from fastapi import Request

from bettercompute.errors import Refused
from bettercompute.protocol.statuses import Reason, Status
from bettercompute.store import api_tokens

TOKEN_CHARACTERS_MAX = 512


class Role(IntEnum):
    """What a token may do; each role may also do what the ones before it may."""

    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody whose token was accepted."""

    name: str
    role: Role


def token_sha256(token: str) -> bytes:
    """Return what the database keeps of a token: enough to recognise it, nothing to use it by."""
    return hashlib.sha256(token.encode()).digest()


def require(role: Role) -> Callable[[Request], Awaitable[Principal]]:
    """Return a dependency that gives the caller's `Principal`, or refuses one below `role`."""

    async def principal(request: Request) -> Principal:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token or len(token) > TOKEN_CHARACTERS_MAX:
            raise Refused("a bearer token is needed", status=Status.UNAUTHENTICATED, reason=Reason.UNAUTHENTICATED)
        found = await api_tokens.find(request.app.state.context.database, sha256=token_sha256(token.strip()))
        if found is None:
            raise Refused("this token is not known", status=Status.UNAUTHENTICATED, reason=Reason.UNAUTHENTICATED)
        caller = Principal(name=found.name, role=Role[found.role.upper()])
        if caller.role < role:
            raise Refused(
                f"{caller.name} is {caller.role.name.lower()}; this needs {role.name.lower()}",
                status=Status.PERMISSION_DENIED,
                reason=Reason.ACCESS_DENIED,
            )
        return caller

    return principal
