"""The desired state that this node holds: taken, kept, converged section by section.

Whether a generation is taken is judged by `delivery.desired_state`; here it is kept in the journal before anything
follows from it, so that the node goes on enforcing its last one offline and after a restart. A section that this daemon
does not know, or has nothing to converge with, is reported unsupported by its field number and the rest converges. See
docs/delivery.md, "Desired state"; decisions 0106.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import structlog
from google.protobuf.message import DecodeError

from bettercompute.daemon.journal_records import PutDocument, Write
from bettercompute.delivery.desired_state import HeldSpec, Verdict, judge
from bettercompute.protocol import messages
from bettercompute.protocol.frames import unknown_field_numbers
from bettercompute.session.inputs import SpecHeld

DOCUMENT = "desired-state"

log = structlog.get_logger("bcd.desired")

Converge = Callable[[messages.NodeSpec], None]
"""Brings one section about; raises `SectionFailed` when it cannot."""


class SectionFailed(Exception):
    """A section could not be brought about: a short stable reason and a sentence."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecOwner:
    """Whose spec it must be, and the highest generation that was ever applied here."""

    node_id: str
    trust_domain: str
    floor_generation: int


class DesiredState:
    """What is held of the desired state. `converge` maps a section's name to what brings it about."""

    def __init__(
        self,
        owner: SpecOwner,
        *,
        kept: bytes,
        write: Callable[[Write], Awaitable[None]],
        converge: Mapping[str, Converge],
    ) -> None:
        self.sections: list[messages.SectionState] = []
        self.refused: tuple[Verdict, int] | None = None
        """Why the newest generation was not taken, and which it was."""
        self.applied_generation = 0
        self._owner = owner
        self._write = write
        self._converge = converge
        self._body = messages.DesiredStateBody.FromString(kept)

    @property
    def held(self) -> SpecHeld:
        """What Hello and heartbeats say of it."""
        return SpecHeld(
            observed_generation=self._body.generation,
            applied_generation=self.applied_generation,
            spec_sha256=self._body.spec_sha256,
        )

    def enforce(self) -> None:
        """Bring every section about, as far as this daemon can."""
        if not self._body.generation:
            return
        spec = self._body.full
        states = [
            self._section(spec, name=field.name, number=field.number)
            for field in messages.NodeSpec.DESCRIPTOR.fields
            if spec.HasField(field.name)  # type: ignore[arg-type]  # one of its own fields
        ]
        states += [self._section(spec, name="", number=number) for number in unknown_field_numbers(spec)]
        self.sections = states
        if all(state.convergence == messages.SECTION_CONVERGENCE_CONVERGED for state in states):
            self.applied_generation = self._body.generation

    async def take(self, desired: messages.DesiredState) -> messages.SpecRequest | None:
        """Judge a desired state, keep and enforce it; return what to ask the gateway for when it cannot be used."""
        try:
            body = messages.DesiredStateBody.FromString(desired.body)
        except DecodeError:
            log.warning("the gateway sent a desired state that does not decode; it is ignored")
            return None
        verdict = judge(
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
        if verdict is Verdict.TAKE:
            self._body = _merged(self._body, body)
            await self._write(PutDocument(DOCUMENT, self._body.SerializeToString()))
            self.refused = None
            self.enforce()
            log.info("desired state taken", generation=body.generation, applied=self.applied_generation)
            return None
        if verdict is Verdict.HELD:
            return None
        self.refused = (verdict, body.generation)
        log.warning("a desired state was not taken", generation=body.generation, reason=verdict.value)
        if verdict is Verdict.BASE_MISMATCH:
            return messages.SpecRequest(held_generation=self._body.generation, reason=verdict.value)
        return None

    def _section(self, spec: messages.NodeSpec, *, name: str, number: int) -> messages.SectionState:
        state = messages.SectionState(section=name, field_number=number, generation=self._body.generation)
        converge = self._converge.get(name)
        if converge is None:
            state.convergence = messages.SECTION_CONVERGENCE_UNSUPPORTED
            state.reason = str(number)
            state.message = f"this bcd does not converge section {name or number}: upgrade it"
            return state
        try:
            converge(spec)
        except SectionFailed as failure:
            state.convergence = messages.SECTION_CONVERGENCE_FAILED
            state.reason, state.message = failure.reason, failure.message
        else:
            state.convergence = messages.SECTION_CONVERGENCE_CONVERGED
        return state


def _merged(held: messages.DesiredStateBody, body: messages.DesiredStateBody) -> messages.DesiredStateBody:
    """Return the whole spec after `body`: itself, or the held one with one section in its place."""
    if body.WhichOneof("content") == "full":
        return body
    merged = messages.DesiredStateBody()
    merged.CopyFrom(body)
    merged.full.CopyFrom(held.full)
    patch = body.patch
    if patch.section in messages.NodeSpec.DESCRIPTOR.fields_by_name:
        merged.full.ClearField(patch.section)  # type: ignore[arg-type]  # checked to be one of its fields
    merged.full.MergeFrom(patch.spec)
    return merged
