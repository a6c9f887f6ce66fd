"""The port between the executor and what carries out a command: one module per kind, found by its name.

Decides what a handler may see and do. Adding a kind is a row in `protocol.kinds` and a module here, named as the kind
with its dots as underscores, that exports `HANDLER`. The executor owns everything that must survive a crash: the
journal, the lanes, deadlines and process groups; a handler only acts, reports, and looks at `cancelled` between its
actions.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from google.protobuf.message import Message

from bettercompute.daemon.inventory.canonical import CanonicalSection
from bettercompute.daemon.inventory.facts import FactSettings
from bettercompute.errors import Bug
from bettercompute.world import World

if TYPE_CHECKING:
    from bettercompute.daemon.config import Config


class HandlerFailed(Exception):
    """The command ends FAILED: a short stable reason code for programs and a sentence for the operator."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


class HandlerCancelled(Exception):
    """The handler saw `cancelled` between two actions and stopped: the command ends CANCELLED."""


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """How a program ended. `exit_code` is the negative signal number for one that a signal ended."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False  # more was printed than asked for; the rest was read and dropped


class ProgramRunner(Protocol):
    """Starts a program in a process group of its own, which is journaled before the program may begin.

    The program gets no standard input and exactly the given environment. It has ended, with its whole group, when this
    returns: by itself, at `timeout_ms`, or because the command was cancelled (which raises `HandlerCancelled`) or timed
    out. Raises OSError when it cannot be started.
    """

    async def __call__(
        self,
        argv: Sequence[str],
        *,
        environment: Mapping[str, str],
        timeout_ms: int,
        limit_bytes: int,
        live: bool = False,
    ) -> ProgramOutcome:
        """Run to the end; at most `limit_bytes` of each output stream are kept.

        With `live`, what is printed also becomes the command's live output as it comes, unbounded by `limit_bytes`.
        """
        ...


class CancelSignal(Protocol):
    """Set once the control plane asked to stop; never unset. `asyncio.Event` is one."""

    def is_set(self) -> bool:
        """Return whether to stop before the next action."""
        ...

    async def wait(self) -> object:
        """Return when it is set."""
        ...


class HandlerConfig(Protocol):
    """The part of the daemon's configuration that handlers read."""

    @property
    def facts(self) -> FactSettings:
        """The `[inventory]` table."""
        ...

    @property
    def value(self) -> Config:
        """The whole file, as it was last read."""
        ...


class HandlerContext(Protocol):
    """One delivery of one command, as its handler sees it."""

    @property
    def command_id(self) -> str:
        """The command's id."""
        ...

    @property
    def kind(self) -> str:
        """The command's kind, which is the handler's."""
        ...

    @property
    def attempt(self) -> int:
        """The delivery attempt, from 1."""
        ...

    @property
    def payload(self) -> Message:
        """The decoded payload, of the class that the kind table names."""
        ...

    @property
    def world(self) -> World:
        """Clocks, dice and ids."""
        ...

    @property
    def state_dir(self) -> Path:
        """The daemon's own folder."""
        ...

    @property
    def config(self) -> HandlerConfig:
        """The daemon's configuration."""
        ...

    @property
    def cancelled(self) -> CancelSignal:
        """Set when the command should stop between two actions."""
        ...

    @property
    def run_program(self) -> ProgramRunner:
        """Starts programs that do not outlive the daemon."""
        ...

    async def progress(self, message: str, percent: int | None = None) -> None:
        """Tell the operator what is being done; may be dropped when the link is slow."""
        ...

    async def output(self, data: bytes) -> None:
        """Hand on a piece of live output; the last 64 KiB are kept."""
        ...

    def unrepeatable_running(self) -> Sequence[str]:
        """Return the other commands that run now and must not run twice: what a reboot would leave in the open."""
        ...

    def held_sections(self) -> Mapping[str, CanonicalSection]:
        """Return the inventory sections whose hashes the control plane was last told."""
        ...

    async def send_sections(self, changed: Mapping[str, CanonicalSection]) -> None:
        """Hold these sections from now on, send them as `inventory` frames and their hashes in the next heartbeat."""
        ...


class Handler(Protocol):
    """Carries out the commands of one kind. One instance serves all of them, also at the same time."""

    @property
    def kind(self) -> str:
        """The kind's name in `protocol.kinds`."""
        ...

    async def run(self, context: HandlerContext) -> bytes:
        """Act, and return the serialized result; raises `HandlerFailed` or `HandlerCancelled`."""
        ...


def _registry() -> Mapping[str, Handler]:
    found: dict[str, Handler] = {}
    for module_info in pkgutil.iter_modules(__path__):
        if module_info.name.startswith("_"):  # what several handlers share
            continue
        handler: Handler = importlib.import_module(f"{__name__}.{module_info.name}").HANDLER
        if handler.kind.replace(".", "_") != module_info.name:
            raise Bug(f"handlers/{module_info.name}.py exports a handler of kind {handler.kind!r}")
        found[handler.kind] = handler
    return MappingProxyType(found)


# Last, because the modules import the port above.
REGISTRY: Mapping[str, Handler] = _registry()
"""Every kind that this daemon carries out; any other is rejected UNSUPPORTED."""
