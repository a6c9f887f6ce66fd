"""`/v1/batches`: await what becomes of a run.

What waiters cost grows with what ends, not with how often they ask: a batch is read once, then only those of its
commands that a notification names, and each waiter is told only what has ended since it last asked. Behind the
notifications stands a poll of what is open, the rarer the more that is.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, StringConstraints

from bettercompute.api import label_scopes
from bettercompute.api.auth import Principal, Role, require
from bettercompute.api.context import ApiContext, Context
from bettercompute.api.shapes import OutputShape, next_offset, output_shapes, progress_json
from bettercompute.api.storable import Id
from bettercompute.api.targets import BATCH_NODES_MAX
from bettercompute.delivery.commands import TERMINAL
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import commands
from bettercompute.store.commands import StateOf

# Longer than proxies keep a silent request.
WAIT_MS_MAX: Final = 30_000
# A batch of 20,000 takes some 8 MB here; who comes back to one that was let go is told it whole again.
WATCHES_MAX: Final = 32
# What is open is read again after this long without a word of it, and at most so many rows a second.
POLL_MS_MIN: Final = 1_000
POLL_ROWS_PER_MS: Final = 2
CURSOR_CHARACTERS_MAX: Final = 64
# Their ids and offsets fit into the query of one request.
FOLLOWED_MAX: Final = 100

_CURSOR = re.compile(r"([0-9a-f-]{36})\.([0-9]{1,6})", re.ASCII)

_FROM: Final = r"^[0-9a-f-]{36}:[0-9]{1,18}$"

router = APIRouter(prefix="/v1/batches", tags=["commands"])


class BatchItem(BaseModel):
    """How one command of a batch stands."""

    id: str
    node_id: str
    state: str
    reason: str
    message: str


class Batch(BaseModel):
    """How a batch stands: all of it, or, after a cursor, what has ended since then."""

    batch_id: str
    open: int
    items: list[BatchItem]
    cursor: str
    """Pass it as `since` to be told only of what ends from now on."""


class CommandOutput(BaseModel):
    """What one command has written since the offset that was named, and what it says it is doing."""

    id: str
    pieces: list[OutputShape]
    next_offset: int
    progress: dict[str, Any] | None


class BatchOutput(BaseModel):
    """Those of the commands asked for that have something to show."""

    items: list[CommandOutput]


class BatchWatch:
    """One batch as it stands, and in which order its commands were seen to end."""

    def __init__(self, context: ApiContext, batch_id: str) -> None:
        self._context = context
        self._batch_id = batch_id
        self._token = context.world.ids.uuid7()
        self._states: dict[str, StateOf] = {}
        self._open: dict[str, None] = {}
        self._ended: list[str] = []
        self._doubted: set[str] = set()
        self._looked_at_ms = 0
        self._lock = asyncio.Lock()

    @property
    def is_known(self) -> bool:
        """Whether there is such a batch, as far as was looked."""
        return bool(self._states)

    @property
    def all_ended(self) -> bool:
        """Whether nothing of it is open."""
        return not self._open

    def doubt(self, command_ids: frozenset[str] | None) -> None:
        """Hear that these have ended; None: anything may have."""
        if command_ids is None:
            self._doubted.update(self._open)
        else:
            # While it is being read, nobody knows yet which are its own.
            self._doubted.update(self._open.keys() & command_ids if self._states else command_ids)

    async def refresh(self, *, size: int) -> None:
        """Read what is in doubt. `size`: how many commands the caller knows of; fewer here means that some are new."""
        async with self._lock:
            now_ms = self._context.world.clock.monotonic_ms()
            if not self._states:
                await self._read_new("")
                self._doubted &= self._open.keys()
                self._looked_at_ms = now_ms
            elif len(self._states) < size:
                await self._read_new(max(self._states))
                if len(self._states) < size:
                    await self._read_new("")
            if now_ms - self._looked_at_ms >= max(POLL_MS_MIN, len(self._open) // POLL_ROWS_PER_MS):
                self._doubted.update(self._open)
                self._looked_at_ms = now_ms
            if self._doubted:
                doubted = sorted(self._doubted)
                self._doubted.clear()
                self._take(await commands.states(self._context.database, command_ids=doubted))

    async def _read_new(self, after: str) -> None:
        self._take(await commands.states_of_batch(self._context.database, batch_id=self._batch_id, after=after))

    def _take(self, states: list[StateOf]) -> None:
        for state in states:
            before = self._states.get(state.command_id)
            self._states[state.command_id] = state
            if state.state not in TERMINAL:
                self._open[state.command_id] = None
            elif before is None or state.command_id in self._open:
                self._open.pop(state.command_id, None)
                self._ended.append(state.command_id)

    def news(self, since: str | None) -> Batch | None:
        """Return all of it, or what has ended after a cursor of this watch; None: nothing has."""
        told = _CURSOR.fullmatch(since or "")
        if told is None or told[1] != self._token:
            wanted = list(self._states)
        else:
            wanted = self._ended[int(told[2]) :]
            if not wanted:
                return None
        return self._batch(wanted)

    def nothing_new(self) -> Batch:
        """Return the answer to whoever has waited in vain."""
        return self._batch([])

    def _batch(self, command_ids: list[str]) -> Batch:
        items = [
            BatchItem(
                id=state.command_id,
                node_id=state.node_id,
                state=state.state.name.lower(),
                reason=state.reason,
                message=state.message,
            )
            for state in (self._states[command_id] for command_id in command_ids)
        ]
        cursor = f"{self._token}.{len(self._ended)}"
        return Batch(batch_id=self._batch_id, open=len(self._open), items=items, cursor=cursor)


class BatchBoard:
    """The batches that somebody waits for, the last asked for kept."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._watches: OrderedDict[str, BatchWatch] = OrderedDict()
        self._hears = False

    def _heard(self, command_ids: frozenset[str] | None) -> None:
        for watch in self._watches.values():
            watch.doubt(command_ids)

    async def watch(self, batch_id: str, *, size: int) -> BatchWatch:
        """Return the batch, refreshed, or refuse one that there is not."""
        if not self._hears:
            self._context.finished.on_finished(self._heard)
            self._hears = True
        watch = self._watches.get(batch_id) or BatchWatch(self._context, batch_id)
        # Known to the feed before it is read: what ends meanwhile is read again.
        self._watches[batch_id] = watch
        self._watches.move_to_end(batch_id)
        if len(self._watches) > WATCHES_MAX:
            self._watches.popitem(last=False)
        await watch.refresh(size=size)
        if not watch.is_known:
            self._watches.pop(batch_id, None)
            raise refuse(
                Reason.NOT_FOUND, f"no batch {batch_id}: `commands list` shows the latest commands with theirs"
            )
        return watch


@router.get("/{batch_id}")
async def get_batch(
    batch_id: Id,
    request: Request,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.VIEWER, scoped=True))],
    wait_ms: Annotated[int, Query(ge=0, le=WAIT_MS_MAX, description="Wait this long for news.")] = 0,
    since: Annotated[
        Annotated[Id, StringConstraints(max_length=CURSOR_CHARACTERS_MAX)] | None,
        Query(description="`cursor` of the answer before: only what has ended since then is told."),
    ] = None,
    size: Annotated[
        int, Query(ge=0, le=BATCH_NODES_MAX, description="How many commands the caller knows the batch to have.")
    ] = 0,
) -> Batch:
    """Return how a run stands, or, with `since`, wait until more of it has ended and return that."""
    await label_scopes.check_batch(context.database, caller, batch_id)
    board: BatchBoard = request.app.state.batches
    deadline_ms = context.world.clock.monotonic_ms() + wait_ms
    while True:
        watch = await board.watch(batch_id, size=size)
        found = watch.news(since)
        if found is not None:
            return found
        left_ms = deadline_ms - context.world.clock.monotonic_ms()
        if left_ms <= 0 or watch.all_ended:
            return watch.nothing_new()
        await context.finished.wait(timeout_s=left_ms / 1000)


@router.get("/{batch_id}/output")
async def get_output(
    batch_id: Id,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.VIEWER, scoped=True))],
    command: Annotated[
        list[Annotated[Id, StringConstraints(pattern=_FROM, max_length=CURSOR_CHARACTERS_MAX)]],
        Query(max_length=FOLLOWED_MAX, description="COMMAND_ID:FROM_OFFSET; may be repeated."),
    ],
) -> BatchOutput:
    """Return what these commands of the batch have written since; ask again from each `next_offset`."""
    await label_scopes.check_batch(context.database, caller, batch_id)
    offsets = {name: int(offset) for name, _, offset in (item.rpartition(":") for item in command)}
    found = await commands.output_of_batch(context.database, batch_id=batch_id, from_offsets=offsets)
    return BatchOutput(
        items=[
            CommandOutput(
                id=item.command_id,
                pieces=output_shapes(item.pieces, from_offset=offsets[item.command_id]),
                next_offset=next_offset(item.pieces, from_offset=offsets[item.command_id]),
                progress=progress_json(item.progress),
            )
            for item in found
        ]
    )
