"""`/v1/doctor`: the checks of the installation, with a cure for each that is not green."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, Field

from bettercompute.api.auth import Principal, Role, require
from bettercompute.api.context import Context
from bettercompute.api.examining import Checked
from bettercompute.api.shapes import rfc3339
from bettercompute.api.storable import Text
from bettercompute.protocol.statuses import Reason, refuse

LEVELS = ("ok", "warning", "failed")
# What `better-compute doctor` ends with when this is the worst: as `cli.doctor` says.
EXIT_CODES = (0, 4, 1)
NAMES_MAX = 100

router = APIRouter(prefix="/v1/doctor", tags=["doctor"])


class ConcernedShape(BaseModel):
    """A node that a check found something about."""

    node_id: str
    about: str


class CheckShape(BaseModel):
    """A check: how it went, what to do, and which nodes are concerned (the first hundred)."""

    name: str
    level: str
    exit_code: int
    sentence: str
    cure: str
    nodes: list[ConcernedShape]
    took_ms: int


class Examination(BaseModel):
    """All checks that were made, and the worst of their levels."""

    at: str | None
    level: str
    exit_code: int
    checks: list[CheckShape]


@router.get("")
async def examine(
    context: Context,
    _: Annotated[Principal, Depends(require(Role.VIEWER))],
    check: Annotated[list[Text] | None, Field(max_length=NAMES_MAX), Query()] = None,
) -> Examination:
    """Examine the installation, or only the checks that are named. One caller at a time."""
    if context.doctor is None:
        raise refuse(Reason.UNAVAILABLE, "this process has no doctor: ask one that runs the api role")
    checks = [_shape(one) for one in await context.doctor.examine(check or ())]
    worst = max((LEVELS.index(one.level) for one in checks), default=0)
    return Examination(
        at=rfc3339(context.world.clock.now_ms()), level=LEVELS[worst], exit_code=EXIT_CODES[worst], checks=checks
    )


def _shape(one: Checked) -> CheckShape:
    finding = one.finding
    return CheckShape(
        name=one.name,
        level=LEVELS[finding.level],
        exit_code=EXIT_CODES[finding.level],
        sentence=finding.sentence,
        cure=finding.cure,
        nodes=[ConcernedShape(node_id=node.node_id, about=node.about) for node in finding.nodes],
        took_ms=one.took_ms,
    )
