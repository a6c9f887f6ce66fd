"""The desired state that this node holds: taken, kept, converged section by section, again and again.

Whether a generation is taken is judged by `delivery.desired_state`. It is in the journal before anything follows from
it, and enforced offline and after a restart; its number goes into identity.json once every section has converged,
before anybody is told. Converging runs beside the session, in a thread: the kernel may take its time. See
docs/desired-state.md, "At the daemon"; decisions 0058 and 0106.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog
from google.protobuf.message import DecodeError

from bettercompute.daemon.journal_records import PutDocument, Write
from bettercompute.daemon.sections import Section, SectionFailed
from bettercompute.delivery.desired_state import ASK_FOR_FULL, HeldSpec, Verdict, judge, of_another
from bettercompute.delivery.spec_generations import SECTIONS, merged, spec_sha256
from bettercompute.errors import BetterComputeError, Refused
from bettercompute.pki.intent import check_desired_state
from bettercompute.pki.trust import CommandRoot
from bettercompute.protocol import messages
from bettercompute.protocol.frames import unknown_field_numbers
from bettercompute.protocol.limits import MAX_SENTENCE_CHARS
from bettercompute.session.inputs import SpecHeld

DOCUMENT: Final = "desired-state"
# How often what was brought about is looked at again: somebody may have changed it by hand. A look that finds all well
# reads a few files.
LOOK_AGAIN_S: Final = 60.0

log = structlog.get_logger("bcd.desired")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecOwner:
    """Whose spec it must be, and the highest generation that was ever applied here."""

    node_id: str
    trust_domain: str
    floor_generation: int


class DesiredState:
    """What is held of the desired state. `sections` maps a section's name to what brings it about."""

    def __init__(
        self,
        owner: SpecOwner,
        *,
        kept: bytes,
        write: Callable[[Write], Awaitable[None]],
        raise_floor: Callable[[int], Awaitable[object]],
        sections: Mapping[str, Section],
    ) -> None:
        self.states: list[messages.SectionState] = []
        """How each section of the held generation stands; empty until it was looked at."""
        self.refused: tuple[Verdict, int] | None = None
        """Why the newest generation was not taken, and which it was."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when a look found another state than the one before."""
        self.applied_generation = owner.floor_generation
        """The highest generation of which every section converged; it never falls, not even with the journal."""
        self._owner = owner
        self._write = write
        self._raise_floor = raise_floor
        self._sections = sections
        self._body = messages.DesiredStateBody.FromString(kept)
        self._due = asyncio.Event()
        names = {"node_id": self._body.node_id, "trust_domain": self._body.trust_domain}
        if of_another(owner.node_id, owner.trust_domain, **names) is not None:
            # Desired of the node that this machine was before it joined under another name.
            self._body = messages.DesiredStateBody()
        if 0 < self._body.generation < owner.floor_generation:
            # The journal is older than the identity: what it holds was replaced once, and is not brought back.
            self.refused = (Verdict.GENERATION_BEHIND, self._body.generation)
            self._body = messages.DesiredStateBody()
        if self._body.generation:
            self._due.set()

    @property
    def held(self) -> SpecHeld:
        """What Hello and heartbeats say of it."""
        return SpecHeld(
            observed_generation=self._body.generation,
            applied_generation=self.applied_generation,
            spec_sha256=self._body.spec_sha256,
        )

    def forget_refusal(self) -> None:
        """Say no more of what was refused: it was another gateway's, or something is offered anew."""
        self.refused = None

    async def take(
        self, desired: messages.DesiredState, *, roots: Sequence[CommandRoot] = (), now_ms: int = 0
    ) -> messages.SpecRequest | None:
        """Judge a desired state and keep it; `run` brings it about. Return what to ask the gateway for, if anything.

        With `roots` it must be signed under one of them, whose time is not over at `now_ms`.
        """
        try:
            body = messages.DesiredStateBody.FromString(desired.body)
        except DecodeError:
            self._refuse(Verdict.UNREADABLE, 0)
            return None
        try:
            check_desired_state(desired, body, roots=roots, now_ms=now_ms)
        except Refused as refusal:
            log.warning("a desired state is not what a worker signed", why=refusal.message)
            self._refuse(Verdict.BAD_SIGNATURE, body.generation)
            return None
        verdict = self._judged(body)
        if verdict is Verdict.TAKE and body.HasField("patch"):
            body, verdict = self._patched(body)
        if verdict is Verdict.TAKE:
            await self._write(PutDocument(DOCUMENT, body.SerializeToString()))
            self._body, self.refused = body, None
            self._due.set()
            log.info("desired state taken", generation=body.generation)
        elif verdict is Verdict.HELD:
            self._due.set()  # offered again: a parked generation is tried again
        else:
            self._refuse(verdict, body.generation)
        if verdict in ASK_FOR_FULL:
            return messages.SpecRequest(held_generation=self._body.generation, reason=verdict.value)
        return None

    async def run(self) -> None:
        """Bring about what is held whenever it changes, and look again once a minute, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await self._due.wait()
            self._due.clear()
            if await self.look():
                self.on_change()

    async def look(self) -> bool:
        """Bring every section about once; return whether anything stands otherwise than before."""
        body = self._body
        if not body.generation:
            return False
        states = await asyncio.to_thread(self._brought_about, body)
        if body is not self._body:
            return False  # a newer one came meanwhile, and is due
        changed = states != self.states
        self.states = states
        converged = all(state.convergence == messages.SECTION_CONVERGENCE_CONVERGED for state in states)
        if converged and body.generation > self.applied_generation:
            try:
                await self._raise_floor(body.generation)
            except (BetterComputeError, OSError) as error:
                # Not on the disk, so nobody is told; the next look tries again.
                log.warning("the applied generation cannot be kept", generation=body.generation, error=str(error))
                return changed
            self.applied_generation = body.generation
            log.info("desired state applied", generation=body.generation)
            return True
        if changed and not converged:
            stuck = {state.section or str(state.field_number): state.reason for state in states if state.reason}
            log.warning("desired state does not converge", generation=body.generation, sections=stuck)
        return changed

    def _judged(self, body: messages.DesiredStateBody) -> Verdict:
        return judge(
            HeldSpec(
                node_id=self._owner.node_id,
                trust_domain=self._owner.trust_domain,
                observed_generation=self._body.generation,
                applied_generation=self.applied_generation,
                floor_generation=self._owner.floor_generation,
                holds_spec=self._body.generation > 0,
            ),
            node_id=body.node_id,
            trust_domain=body.trust_domain,
            generation=body.generation,
            full=body.WhichOneof("content") == "full",
            patch_base_generation=body.patch.base_generation if body.HasField("patch") else None,
        )

    def _patched(self, body: messages.DesiredStateBody) -> tuple[messages.DesiredStateBody, Verdict]:
        """Return the whole that a patch leads to; another one than its sender has is not taken."""
        whole = messages.DesiredStateBody()
        whole.CopyFrom(body)
        whole.full.CopyFrom(merged(self._body.full, body.patch))
        if body.spec_sha256 and spec_sha256(whole.full) != body.spec_sha256:
            return body, Verdict.HASH_MISMATCH
        return whole, Verdict.TAKE

    def _refuse(self, verdict: Verdict, generation: int) -> None:
        self.refused = (verdict, generation)
        log.warning("a desired state was not taken", generation=generation, reason=verdict.value)

    def _brought_about(self, body: messages.DesiredStateBody) -> list[messages.SectionState]:
        spec = body.full
        states = []
        for name in SECTIONS:
            present = spec.HasField(name)  # type: ignore[arg-type]  # one of its own fields
            number = messages.NodeSpec.DESCRIPTOR.fields_by_name[name].number
            section = self._sections.get(name)
            if section is None:
                if present:
                    states.append(_unsupported(name, number))
                continue
            state = _state_after(section, spec, name=name, number=number)
            if present:
                states.append(state)
        states += [_unsupported("", number) for number in unknown_field_numbers(spec)]
        for state in states:
            state.generation = body.generation
        return states


def _state_after(section: Section, spec: messages.NodeSpec, *, name: str, number: int) -> messages.SectionState:
    state = messages.SectionState(section=name, field_number=number)
    try:
        state.message = section.converge(spec)[:MAX_SENTENCE_CHARS]
    except SectionFailed as failure:
        state.convergence = messages.SECTION_CONVERGENCE_FAILED
        state.reason, state.message = failure.reason, failure.message[:MAX_SENTENCE_CHARS]
    except Exception as error:
        # A section with a fault of its own is parked like any other; the rest of the node goes on.
        log.exception("a section failed", section=name)
        state.convergence = messages.SECTION_CONVERGENCE_FAILED
        state.reason, state.message = "section-fault", repr(error)[:MAX_SENTENCE_CHARS]
    else:
        state.convergence = messages.SECTION_CONVERGENCE_CONVERGED
    return state


def _unsupported(name: str, number: int) -> messages.SectionState:
    return messages.SectionState(
        section=name,
        field_number=number,
        convergence=messages.SECTION_CONVERGENCE_UNSUPPORTED,
        reason=str(number),
        message=f"this bcd does not converge section {name or number}: upgrade it",
    )
