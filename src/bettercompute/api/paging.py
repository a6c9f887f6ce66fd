"""Keyset pages: a limit, where to go on, and the names of states in queries."""

from __future__ import annotations

import re
from typing import Annotated, Generic, TypeVar

from fastapi import Query
from pydantic import AfterValidator, BaseModel, StringConstraints

from bettercompute.api.invalid import shown
from bettercompute.api.storable import Id, Storable
from bettercompute.delivery.commands import CommandState
from bettercompute.delivery.selectors import SELECTOR_CHARACTERS_MAX
from bettercompute.pki.identity import is_name
from bettercompute.protocol.statuses import Reason, refuse

PAGE_ROWS_MAX = 500
PAGE_ROWS = 100

Limit = Annotated[int, Query(ge=1, le=PAGE_ROWS_MAX, description="Rows of a page.")]

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)
_NO_CURSOR = "that is no place in this list; pass `next` of the page before as it came"


def _check_after_id(text: str) -> str:
    if _UUID.fullmatch(text) is None:
        raise ValueError(_NO_CURSOR)
    return text


def _check_after_node(text: str) -> str:
    if not is_name(text):
        raise ValueError(_NO_CURSOR)
    return text


SelectorText = Annotated[
    str,
    StringConstraints(max_length=SELECTOR_CHARACTERS_MAX),
    Storable,
    Query(description="Which nodes: gpu=h100,site!=x; also in (a,b), notin (a,b), key, !key."),
]

_AFTER = Query(description="`next` of the page before.")
AfterId = Annotated[Annotated[Id, AfterValidator(_check_after_id)] | None, _AFTER]
AfterNode = Annotated[Annotated[Id, AfterValidator(_check_after_node)] | None, _AFTER]

Item = TypeVar("Item")


class Page(BaseModel, Generic[Item]):
    """One page. `next` goes on after it; None: this was the last."""

    items: list[Item]
    next: str | None


def command_state(name: str) -> CommandState:
    """Return the state of this name, or refuse another name; REJECTED is only ever said on the wire."""
    stored = {state.name.lower(): state for state in CommandState if state is not CommandState.REJECTED}
    if name.lower() not in stored:
        raise refuse(Reason.BAD_REQUEST, f"state {shown(name)}: one of {', '.join(stored)}")
    return stored[name.lower()]
