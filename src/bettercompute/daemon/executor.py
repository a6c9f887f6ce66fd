"""Runs commands: one task each, a deadline, a cancel, bounded live output, and an ending told exactly once.

What may run, on which lane and with which credit, has been decided before (`session.daemon_side`); the effect's begin
is durable when `start` is called. Here it is only carried out. An ending is told when the handler has ended *and* every
process it started has been reaped, so that a freed credit never stands for work that goes on. A daemon that stops tells
nothing: what it left unfinished is judged by the next process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from google.protobuf.message import Message

from bettercompute.daemon.group_commit import Journal
from bettercompute.daemon.handlers import Handler, HandlerCancelled, HandlerConfig, HandlerFailed
from bettercompute.daemon.inventory.canonical import CanonicalSection
from bettercompute.daemon.inventory_held import HeldInventory
from bettercompute.daemon.programs import Programs
from bettercompute.delivery.commands import CommandState
from bettercompute.errors import BetterComputeError
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import KINDS, CommandKind, unpack_payload
from bettercompute.protocol.limits import MAX_COMMAND_BODY_BYTES, MAX_OUTPUT_BYTES, MAX_SENTENCE_CHARS
from bettercompute.session.inputs import HandlerFinished, HandlerProgressed
from bettercompute.world import World

# News of one command are sent this often at most; what comes in between is joined.
PROGRESS_INTERVAL_S = 0.5

log = structlog.get_logger("bcd.executor")

Told = HandlerFinished | HandlerProgressed


@dataclass(frozen=True, slots=True)
class ExecutorParts:
    """What every command is run with."""

    world: World
    journal: Journal
    config: HandlerConfig
    state_dir: Path
    space: str
    """`process_groups.process_space` of this process."""
    inventory: HeldInventory
    sign: Callable[[CommandKind, str, CommandState, bytes], messages.Signature | None]
    """Signs the terminal update of an attested kind with the node's key."""
    tell: Callable[[Told], None]
    crowded: Callable[[], bool] = lambda: False
    """Whether whoever is told has so much to take that what can wait should."""


class Executor:
    """The commands that are running."""

    def __init__(self, parts: ExecutorParts, handlers: Mapping[str, Handler]) -> None:
        self._parts = parts
        self._handlers = handlers
        self._running: dict[str, _Run] = {}
        self._closing = False

    @property
    def running_ids(self) -> tuple[str, ...]:
        """The commands that have begun and not been told to have ended."""
        return tuple(self._running)

    def start(self, command_id: str, *, attempt: int, body: messages.CommandBody) -> None:
        """Begin a command whose start is durable."""
        kind = KINDS[body.kind]
        run = _Run(
            parts=self._parts,
            command_id=command_id,
            attempt=attempt,
            body=body,
            command_kind=kind,
            running=self._running,
        )
        self._running[command_id] = run
        run.task = asyncio.create_task(self._carry_out(run), name=f"command-{command_id}")

    def stop(self, command_id: str, reason: str) -> None:
        """Ask a command to stop between two actions; its ending follows, whichever it will be."""
        run = self._running.get(command_id)
        if run is not None and not run.cancelled.is_set():  # the gateway says it again while the command goes on
            log.info("the control plane cancels a command", command_id=command_id, kind=run.kind, reason=reason)
            run.cancelled.set()

    async def close(self) -> None:
        """End everything that runs, with its processes, and tell nothing."""
        self._closing = True
        tasks = [run.task for run in self._running.values() if run.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry_out(self, run: _Run) -> None:
        log.info("command begins", command_id=run.command_id, kind=run.kind, attempt=run.attempt)
        try:
            finished = await self._outcome(run)
            await run.news.flush()
        except Exception as error:
            # Outside its handler, while its end was signed or its news told: it has ended all the same.
            log.exception("a command could not be ended as it should", command_id=run.command_id, kind=run.kind)
            finished = run.unsigned_failure("handler-fault", f"{type(error).__name__}: {error}")
        del self._running[run.command_id]
        log.info(
            "command ended",
            command_id=run.command_id,
            kind=run.kind,
            state=finished.state.name.lower(),
            reason=finished.reason or None,
            message=finished.message or None,
        )
        self._parts.tell(finished)

    async def _outcome(self, run: _Run) -> HandlerFinished:
        handler = self._handlers.get(run.kind)
        if handler is None:
            return run.failed("unsupported", f"this bcd has no handler for {run.kind}: upgrade it")
        try:
            run.payload = unpack_payload(run.command_kind, run.body)
        except BetterComputeError as error:
            return run.failed("invalid-payload", error.message)
        try:
            async with asyncio.timeout(run.body.timeout_ms / 1000):
                result = await handler.run(run)
        except TimeoutError:
            return run.failed("timeout", f"it ran longer than its timeout of {run.body.timeout_ms} ms and was ended")
        except HandlerCancelled:
            return run.finished(CommandState.CANCELLED, reason="cancelled")
        except HandlerFailed as error:
            return run.failed(error.reason, error.message)
        except asyncio.CancelledError:
            if self._closing:
                raise
            return run.failed("interrupted", "the handler was ended from within")
        except Exception as error:
            log.exception("a handler failed in a way it should not", command_id=run.command_id, kind=run.kind)
            return run.failed("handler-fault", f"{type(error).__name__}: {error}")
        if len(result) > MAX_COMMAND_BODY_BYTES:
            return run.failed(
                "result-too-large", f"the result has {len(result)} bytes, at most {MAX_COMMAND_BODY_BYTES} are allowed"
            )
        return run.finished(CommandState.SUCCEEDED, result=result)


@dataclass(slots=True, kw_only=True)
class _Run:
    """One delivery of one command: the `HandlerContext` that its handler sees."""

    parts: ExecutorParts
    command_id: str
    attempt: int
    body: messages.CommandBody
    command_kind: CommandKind
    running: Mapping[str, _Run]
    """All that run, this one too."""
    payload: Message = field(default_factory=messages.CommandBody)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    news: _News = field(init=False)
    run_program: Programs = field(init=False)

    def __post_init__(self) -> None:
        self.news = _News(self.command_id, self.parts.tell, crowded=self.parts.crowded)
        self.run_program = Programs(
            command_id=self.command_id,
            space=self.parts.space,
            write=self.parts.journal.write,
            cancelled=self.cancelled,
            interruptible=not self.command_kind.destructive,
            tell=self._printed,
        )

    @property
    def kind(self) -> str:
        return self.command_kind.name

    @property
    def world(self) -> World:
        return self.parts.world

    @property
    def state_dir(self) -> Path:
        return self.parts.state_dir

    @property
    def config(self) -> HandlerConfig:
        return self.parts.config

    async def progress(self, message: str, percent: int | None = None) -> None:
        self.news.progress = messages.CommandProgress(stage=message[:MAX_SENTENCE_CHARS])
        if percent is not None:
            self.news.progress.done = max(0, min(100, percent))
            self.news.progress.total = 100
            self.news.progress.unit = "percent"
        self.news.due()

    async def output(self, data: bytes) -> None:
        self._printed(data)

    def _printed(self, data: bytes) -> None:
        self.news.add_output(data)
        self.news.due()

    def unrepeatable_running(self) -> list[str]:
        return [
            command_id
            for command_id, run in self.running.items()
            if run is not self and not run.command_kind.retry_safe
        ]

    def held_sections(self) -> Mapping[str, CanonicalSection]:
        return self.parts.inventory.sections

    async def send_sections(self, changed: Mapping[str, CanonicalSection]) -> None:
        await self.parts.inventory.hold(changed)

    def failed(self, reason: str, message: str) -> HandlerFinished:
        return self.finished(CommandState.FAILED, reason=reason, message=message)

    def unsigned_failure(self, reason: str, message: str) -> HandlerFinished:
        """Return an end that signing itself stood in the way of."""
        return HandlerFinished(
            command_id=self.command_id, state=CommandState.FAILED, reason=reason, message=message[:MAX_SENTENCE_CHARS]
        )

    def finished(
        self, state: CommandState, *, result: bytes = b"", reason: str = "", message: str = ""
    ) -> HandlerFinished:
        signature = self.parts.sign(self.command_kind, self.command_id, state, result)
        return HandlerFinished(
            command_id=self.command_id,
            state=state,
            result=result,
            reason=reason,
            message=message[:MAX_SENTENCE_CHARS],
            signature=signature,
        )


class _News:
    """Progress and output of one command, joined so that they are told twice a second at most.

    And not while the driver has much to take: it may stand in a journal write that waits for room, and all that is told
    meanwhile would pile up.
    """

    def __init__(self, command_id: str, tell: Callable[[Told], None], *, crowded: Callable[[], bool]) -> None:
        self.progress: messages.CommandProgress | None = None
        self._command_id = command_id
        self._tell = tell
        self._crowded = crowded
        self._output = bytearray()
        self._offset = 0
        """Where `_output` begins in all that was ever printed."""
        self._dropped_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._told_at = float("-inf")

    def add_output(self, data: bytes) -> None:
        """Keep the last bytes of what has not been told; the rest is counted."""
        self._output += data
        over = len(self._output) - MAX_OUTPUT_BYTES
        if over > 0:
            del self._output[:over]
            self._offset += over
            self._dropped_bytes += over

    def due(self) -> None:
        """Tell it now, or when the last telling is long enough ago."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._told_at + PROGRESS_INTERVAL_S), self._tell_in_turn)

    async def flush(self) -> None:
        """Tell what is left, before the ending is told."""
        if self._timer is not None:
            self._timer.cancel()
            self._tell_now()

    def _tell_in_turn(self) -> None:
        if self._crowded():
            self._timer = asyncio.get_running_loop().call_later(PROGRESS_INTERVAL_S, self._tell_in_turn)
        else:
            self._tell_now()

    def _tell_now(self) -> None:
        self._timer = None
        self._told_at = asyncio.get_running_loop().time()
        output = None
        if self._output:
            output = messages.CommandOutput(
                offset=self._offset, data=bytes(self._output), dropped_bytes=self._dropped_bytes
            )
            self._offset += len(self._output)
            self._output.clear()
            self._dropped_bytes = 0
        progress, self.progress = self.progress, None
        if progress is not None or output is not None:
            self._tell(HandlerProgressed(self._command_id, progress=progress, output=output))
