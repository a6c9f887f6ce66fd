"""`/v1/nodes/{node_id}/spec`: what is desired of a node, how far the node is, and the generations before.

PUT sets all of it, PATCH the named sections. Either may be asked twice: a spec that is there already is no new
generation. `expected_generation` keeps two people from undoing each other's work. See docs/desired-state.md,
"Setting one".
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, Field

from bettercompute.api import label_scopes
from bettercompute.api.auth import Principal, Role, require
from bettercompute.api.context import ApiContext, Context
from bettercompute.api.paging import PAGE_ROWS, Limit
from bettercompute.api.shapes import rfc3339
from bettercompute.api.spec_json import read_section, read_spec, require_known, spec_json
from bettercompute.api.storable import Body, Id, JsonObject, Text
from bettercompute.delivery.desired_state import GENERATION_MAX, next_generation, overtaken_by
from bettercompute.delivery.spec_generations import Circumstances, NewGeneration, changed_sections, compose
from bettercompute.errors import Refused
from bettercompute.pki.intent import IntentSigner
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import specs
from bettercompute.store.database import Transaction
from bettercompute.store.signing import signer_of
from bettercompute.store.specs import Generation, LockedSpec, NewestSpec

Number = Annotated[int, Field(ge=0, le=GENERATION_MAX)]
_CONVERGENCE: Final = "SECTION_CONVERGENCE_"

router = APIRouter(prefix="/v1/nodes/{node_id}/spec", tags=["spec"])


class SectionStateShape(BaseModel):
    """How one section stands at the node, of the generation that it names."""

    section: str
    field_number: int
    convergence: str
    reason: str
    message: str
    generation: int


class SpecShape(BaseModel):
    """A generation, and, where it is the newest, what the node says of it."""

    node_id: str
    generation: int
    """0: nothing was ever desired of this node."""
    spec: dict[str, Any]
    spec_sha256: str
    signed: bool
    issued_at: str | None
    issued_by: str
    why: str
    newest_generation: int
    observed_generation: int
    applied_generation: int
    state: str
    """`none`, `pending` (not read yet), `converging`, `parked` (it cannot be applied), `applied`, or `replaced`."""
    sections: list[SectionStateShape]
    reported_at: str | None


class GenerationShape(BaseModel):
    """A generation as history lists it."""

    generation: int
    changed: list[str]
    issued_at: str | None
    issued_by: str
    why: str
    spec_sha256: str
    signed: bool
    patch_base_generation: int | None
    body_bytes: int


class History(BaseModel):
    """Generations, newest first. `next` goes on with older ones; None: there are none that are kept."""

    items: list[GenerationShape]
    next: int | None


class SetRequest(Body):
    """All of a node's spec."""

    spec: JsonObject
    expected_generation: Number | None = None
    """Refuse where the node's generation is another one; 0: where it has any."""
    why: Text = ""
    dry_run: bool = False
    """Judge it and say what would change; publish nothing."""


class ChangeRequest(Body):
    """Some sections of a node's spec; null takes a section out, the others stay as they are."""

    sections: JsonObject
    expected_generation: Number | None = None
    why: Text = ""
    dry_run: bool = False


class SetAnswer(BaseModel):
    """What became of it. No changed sections: it was so already, and no generation was made."""

    node_id: str
    generation: int
    before_generation: int
    changed: list[str]
    dry_run: bool
    spec: dict[str, Any]


@router.get("")
async def get_spec(
    node_id: Id,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.VIEWER, scoped=True))],
    generation: Annotated[int | None, Query(ge=1, le=GENERATION_MAX)] = None,
) -> SpecShape:
    """Return what is desired of a node, or an older generation that is still kept."""
    newest = await _newest(context, node_id, caller)
    if generation is None or generation == newest.generations.generation:
        return _shape(newest)
    found = await specs.generation(context.database, node_id=node_id, number=generation)
    if found is None:
        raise refuse(
            Reason.NOT_FOUND,
            f"generation {generation} of node {node_id} is not kept, its newest is {newest.generations.generation}: "
            f"`spec history {node_id}` shows the ones there are",
        )
    return _older(newest, *found)


@router.get("/history")
async def history(
    node_id: Id,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.VIEWER, scoped=True))],
    before: Annotated[int, Query(ge=1, le=GENERATION_MAX)] = GENERATION_MAX,
    limit: Limit = PAGE_ROWS,
) -> History:
    """List the generations that are kept, newest first."""
    await _newest(context, node_id, caller)
    page = await specs.history(context.database, node_id=node_id, before=before, page_size=limit)
    return History(
        items=[
            GenerationShape(
                generation=item.generation,
                changed=list(item.changed),
                issued_at=rfc3339(item.issued_at_ms),
                issued_by=item.issued_by,
                why=item.why,
                spec_sha256=item.spec_sha256.hex(),
                signed=item.signed,
                patch_base_generation=item.patch_base_generation,
                body_bytes=item.body_bytes,
            )
            for item in page
        ],
        next=page[-1].generation if len(page) == limit else None,
    )


@router.put("")
async def set_spec(
    node_id: Id,
    request: SetRequest,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.OPERATOR, scoped=True))],
) -> SetAnswer:
    """Desire all of this of a node."""
    spec = read_spec(request.spec)
    async with context.database.transaction() as transaction:
        locked = await _locked(transaction, node_id, caller)
        return await _set(context, transaction, locked, spec, node_id=node_id, request=request, caller=caller)


@router.patch("")
async def change_spec(
    node_id: Id,
    request: ChangeRequest,
    context: Context,
    caller: Annotated[Principal, Depends(require(Role.OPERATOR, scoped=True))],
) -> SetAnswer:
    """Desire these sections of a node, and the others as before."""
    for name in request.sections:
        require_known(name)
    read = {name: None if value is None else read_section(name, value) for name, value in request.sections.items()}
    async with context.database.transaction() as transaction:
        locked = await _locked(transaction, node_id, caller)
        spec = messages.NodeSpec()
        if locked.body is not None:
            spec.CopyFrom(locked.body.full)
        for name, section in read.items():
            spec.ClearField(name)  # type: ignore[arg-type]  # checked to be one of its fields
            if section is not None:
                spec.MergeFrom(section)
        return await _set(context, transaction, locked, spec, node_id=node_id, request=request, caller=caller)


async def _set(
    context: ApiContext,
    transaction: Transaction,
    locked: LockedSpec,
    spec: messages.NodeSpec,
    *,
    node_id: str,
    request: SetRequest | ChangeRequest,
    caller: Principal,
) -> SetAnswer:
    before = locked.generations.generation
    changed = changed_sections(messages.NodeSpec() if locked.body is None else locked.body.full, spec)
    unchanged = locked.body is not None and not changed
    if not unchanged and request.expected_generation not in {None, before}:
        raise _stale(node_id, expected=request.expected_generation, found=before)
    generation = before
    if not unchanged and not request.dry_run:
        signer = await signer_of(context.signing, transaction)
        new = _composed(context, locked, spec, node_id=node_id, signer=signer)
        generation = new.generation
        await specs.publish(
            transaction, new, node_id=node_id, issued_at_ms=locked.now_ms, issued_by=caller.name, why=request.why
        )
        await context.record(
            transaction,
            actor=caller.name,
            action="spec.set",
            target=f"node/{node_id}",
            why=request.why,
            details={"generation": generation, "before": before, "changed": list(changed)},
        )
    return SetAnswer(
        node_id=node_id,
        generation=generation,
        before_generation=before,
        changed=list(changed),
        dry_run=request.dry_run,
        spec=spec_json(spec),
    )


def _composed(
    context: ApiContext, locked: LockedSpec, spec: messages.NodeSpec, *, node_id: str, signer: IntentSigner | None
) -> NewGeneration:
    of = Circumstances(
        node_id=node_id,
        trust_domain=context.trust_domain,
        generation=next_generation(locked.generations),
        issued_at_ms=locked.now_ms,
    )
    return compose(spec, before=locked.body, of=of, signer=signer)


def _stale(node_id: str, *, expected: int | None, found: int) -> Refused:
    return refuse(
        Reason.CONFLICT,
        f"the spec of node {node_id} is at generation {found}, not {expected}: somebody else has set it meanwhile; "
        f"`spec diff {node_id}` shows what, then set yours again over generation {found}",
    )


async def _locked(transaction: Transaction, node_id: str, caller: Principal) -> LockedSpec:
    await label_scopes.check_nodes(transaction, caller, [node_id])
    locked = await specs.lock(transaction, node_id=node_id)
    if locked is None:
        raise _no_node(node_id)
    return locked


async def _newest(context: ApiContext, node_id: str, caller: Principal) -> NewestSpec:
    await label_scopes.check_nodes(context.database, caller, [node_id])
    found = await specs.newest(context.database, node_id=node_id)
    if found is None:
        raise _no_node(node_id)
    return found


def _no_node(node_id: str) -> Refused:
    return refuse(Reason.NOT_FOUND, f"no node {node_id}: `nodes list` shows the ones there are")


def _shape(newest: NewestSpec) -> SpecShape:
    held = newest.generations
    report = messages.StatusReport.FromString(newest.report)
    return SpecShape(
        node_id=newest.node_id,
        generation=held.generation,
        spec=spec_json(messages.DesiredStateBody.FromString(newest.body).full),
        spec_sha256=newest.spec_sha256.hex(),
        signed=newest.signed,
        issued_at=rfc3339(newest.issued_at_ms),
        issued_by=newest.issued_by,
        why=newest.why,
        newest_generation=held.generation,
        observed_generation=held.observed_generation,
        applied_generation=held.applied_generation,
        state=_state(newest, report),
        sections=[_section(state) for state in report.sections],
        reported_at=rfc3339(newest.reported_at_ms),
    )


def _state(newest: NewestSpec, report: messages.StatusReport) -> str:
    held = newest.generations
    if held.generation == 0:
        return "none"
    if held.observed_generation < held.generation or overtaken_by(held) is not None:
        return "pending"  # where the daemon is ahead, the spec is about to be published above what it holds
    if held.applied_generation >= held.generation:
        return "applied"
    told = [state for state in report.sections if state.generation == held.generation]
    stuck = {messages.SECTION_CONVERGENCE_FAILED, messages.SECTION_CONVERGENCE_UNSUPPORTED}
    return "parked" if any(state.convergence in stuck for state in told) else "converging"


def _section(state: messages.SectionState) -> SectionStateShape:
    try:
        convergence = messages.SectionConvergence.Name(state.convergence).removeprefix(_CONVERGENCE).lower()
    except ValueError:
        convergence = str(int(state.convergence))
    return SectionStateShape(
        section=state.section,
        field_number=state.field_number,
        convergence=convergence,
        reason=state.reason,
        message=state.message,
        generation=state.generation,
    )


def _older(newest: NewestSpec, item: Generation, body: bytes) -> SpecShape:
    return SpecShape(
        node_id=newest.node_id,
        generation=item.generation,
        spec=spec_json(messages.DesiredStateBody.FromString(body).full),
        spec_sha256=item.spec_sha256.hex(),
        signed=item.signed,
        issued_at=rfc3339(item.issued_at_ms),
        issued_by=item.issued_by,
        why=item.why,
        newest_generation=newest.generations.generation,
        observed_generation=newest.generations.observed_generation,
        applied_generation=newest.generations.applied_generation,
        state="replaced",
        sections=[],
        reported_at=None,
    )
