"""Who asks, and what they may: bearer tokens with one of three roles, for all nodes or those with certain labels."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from fastapi import Request

from bettercompute.errors import Bug
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import api_tokens
from bettercompute.store.database import Queries

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
    labels: Mapping[str, str] | None = None
    """None: every node; else those that carry all of these, see `label_scopes`."""

    @property
    def scope_text(self) -> str:
        """Return the scope as a selector."""
        return ",".join(f"{key}={value}" for key, value in sorted((self.labels or {}).items()))


async def authenticate(queries: Queries, authorization: str) -> Principal:
    """Return whose token an `authorization` header carries. Raises `Refused` when there is none that is good."""
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token or len(token) > TOKEN_CHARACTERS_MAX:
        raise refuse(Reason.UNAUTHENTICATED, "a bearer token is needed")
    found = await api_tokens.find(queries, sha256=api_tokens.sha256_of(token.strip()))
    if found is None:
        raise refuse(Reason.UNAUTHENTICATED, "this token is not known")
    return Principal(name=found.name, role=Role[found.role.upper()], labels=found.label_scope)


def require(role: Role, *, scoped: bool = False) -> Callable[[Request], Awaitable[Principal]]:
    """Return a dependency that gives the caller's `Principal`, as `bounds` found it, or refuses one below `role`.

    Only a route that is `scoped` takes a token with a label scope, and asks `label_scopes` what of it is within.
    """

    async def principal(request: Request) -> Principal:
        caller = getattr(request.state, "principal", None)
        if not isinstance(caller, Principal):
            raise Bug(f"{request.url.path} asks for a role, and nobody was authenticated for it")
        if caller.role < role:
            raise refuse(
                Reason.ACCESS_DENIED, f"{caller.name} is {caller.role.name.lower()}; this needs {role.name.lower()}"
            )
        if caller.labels is not None and not scoped:
            raise refuse(
                Reason.ACCESS_DENIED,
                f"the token of {caller.name} is for nodes with {caller.scope_text} only, and this is not about single "
                "nodes: use one without a label scope",
            )
        return caller

    return principal
