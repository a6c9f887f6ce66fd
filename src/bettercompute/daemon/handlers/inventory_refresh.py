"""`inventory.refresh`: collect the sections anew, hand on what changed, and tell the hash of each.

Stops between two sections when it is cancelled. A section that cannot be collected is a section that says why, so the
command fails only for a section that does not exist.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

from bettercompute.daemon.apart import HANGS, apart
from bettercompute.daemon.handlers import Handler, HandlerCancelled, HandlerContext, HandlerFailed, ProgramRunner
from bettercompute.daemon.inventory.canonical import (
    FACTS,
    SECTION_CLASSES,
    SECTION_NAMES,
    CanonicalSection,
    changed_sections,
)
from bettercompute.daemon.inventory.collection import collect_all
from bettercompute.daemon.inventory.facts import (
    MAX_FACT_OUTPUT_BYTES,
    MAX_REASON_CHARACTERS,
    RunFact,
    collect_facts,
    keep_facts,
)
from bettercompute.daemon.inventory.host import PROGRAM_FAILED, TIMED_OUT, TOO_LARGE, HostRoot, Unreadable, unreadable
from bettercompute.errors import Unavailable
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import KINDS, encode_result

# Where a fact program finds what it runs. Nothing of the daemon's own environment reaches it.
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


class InventoryRefresh:
    """Collects from the machine that `root` gives, which a test replaces by a recorded one."""

    kind = "inventory.refresh"

    def __init__(self, root: Callable[[], HostRoot] = HostRoot.live) -> None:
        self._root = root

    async def run(self, context: HandlerContext) -> bytes:
        """Collect the payload's sections, all for none; returns the serialized `InventoryRefreshResult`."""
        payload = context.payload
        assert isinstance(payload, messages.InventoryRefreshPayload), "the kind table names the payload"
        names = _chosen(payload.sections, has_facts=context.config.facts.facts_dir is not None)
        root = self._root()
        held = context.held_sections()
        result = messages.InventoryRefreshResult()
        collected: dict[str, CanonicalSection] = {}
        for done, name in enumerate(names):
            if context.cancelled.is_set():
                raise HandlerCancelled
            await context.progress(f"collecting {name}", 100 * done // len(names))
            begun_ms = context.world.clock.monotonic_ms()
            section = await _collect(context, root, name)
            collected[name] = section
            result.sections.append(
                _refreshed(
                    section,
                    changed=held.get(name) != section,
                    duration_ms=context.world.clock.monotonic_ms() - begun_ms,
                )
            )
        await context.send_sections(changed_sections(held, collected))
        return encode_result(KINDS[self.kind], result)


HANDLER: Handler = InventoryRefresh()


def _chosen(sections: Collection[str], *, has_facts: bool) -> list[str]:
    """Return the named sections in order, all that this node has for no name."""
    unknown = sorted(set(sections) - set(SECTION_NAMES))
    if unknown:
        raise HandlerFailed(
            "unknown-section",
            f"inventory section {unknown[0]!r} does not exist; the sections are {', '.join(SECTION_NAMES)}",
        )
    if FACTS in sections and not has_facts:
        raise HandlerFailed("no-facts", "section facts needs `facts_dir` under [inventory] in the node's configuration")
    return [name for name in SECTION_NAMES if (name in sections if sections else name != FACTS or has_facts)]


async def _collect(context: HandlerContext, root: HostRoot, name: str) -> CanonicalSection:
    settings = context.config.facts
    if name == FACTS and settings.facts_dir is not None:
        run = _fact_runner(context.run_program, timeout_ms=settings.fact_timeout_ms)
        section = await collect_facts(settings.facts_dir, run=run)
        await asyncio.to_thread(_keep, context.state_dir, section)
        return section
    try:
        sections: Mapping[str, CanonicalSection] = await apart(partial(collect_all, root, sections=(name,)))
    except Unavailable as error:
        raise HandlerFailed(HANGS, error.message) from None
    return sections[name]


def _keep(state_dir: Path, section: CanonicalSection) -> None:
    try:
        keep_facts(state_dir, section)
    except OSError:
        # A full disk: this process holds the section all the same, and the next one collects it at its first refresh.
        return


def _fact_runner(run_program: ProgramRunner, *, timeout_ms: int) -> RunFact:
    async def run(program: Path) -> bytes:
        name = program.name
        try:
            outcome = await run_program(
                [str(program)], environment=_ENVIRONMENT, timeout_ms=timeout_ms, limit_bytes=MAX_FACT_OUTPUT_BYTES
            )
        except OSError as error:
            raise unreadable(name, error) from None
        if outcome.timed_out:
            raise Unreadable(name, TIMED_OUT, f"ended after {timeout_ms} ms, see fact_timeout_ms")
        if outcome.exit_code != 0:
            said = outcome.stderr.decode(errors="replace").replace("\0", " ").strip()[-MAX_REASON_CHARACTERS:]
            raise Unreadable(name, PROGRAM_FAILED, f"exit code {outcome.exit_code}{f', {said}' if said else ''}")
        if outcome.truncated:
            raise Unreadable(name, TOO_LARGE, f"printed more than {MAX_FACT_OUTPUT_BYTES} bytes")
        return outcome.stdout

    return run


def _refreshed(section: CanonicalSection, *, changed: bool, duration_ms: int) -> messages.RefreshedSection:
    content = SECTION_CLASSES[section.name].FromString(section.body)
    return messages.RefreshedSection(
        name=section.name,
        sha256=section.sha256,
        changed=changed,
        size_bytes=len(section.body),
        duration_ms=duration_ms,
        unreadable=content.unreadable,  # type: ignore[attr-defined]  # every section's class has the list
    )
