"""Keyset pages: a limit, where to go on, and the names of states in queries."""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

from fastapi import Query
from pydantic import BaseModel

from bettercompute.delivery.commands import CommandState
from bettercompute.protocol.statuses import Reason, refuse

PAGE_ROWS_MAX = 500
PAGE_ROWS = 100

Limit = Annotated[int, Query(ge=1, le=PAGE_ROWS_MAX, description="Rows of a page.")]
After = Annotated[str | None, Query(max_length=256, description="`next` of the page before.")]

Item = TypeVar("Item")


class Page(BaseModel, Generic[Item]):
    """One page. `next` goes on after it; None: this was the last."""

    items: list[Item]
    next: str | None


def command_state(name: str) -> CommandState:
    """Return the state of this name, or refuse another name."""
    try:
        return CommandState[name.upper()]
    except KeyError:
        names = ", ".join(state.name.lower() for state in CommandState)
        raise refuse(Reason.BAD_REQUEST, f"state {name!r}: one of {names}") from None
