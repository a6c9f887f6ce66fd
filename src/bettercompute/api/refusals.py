"""The JSON of what a node refused of what gateways relayed, as its last status report tells it."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from pydantic import BaseModel

from bettercompute.protocol import messages


class RefusalShape(BaseModel):
    """How often a process of the daemon refused something that gateways relayed."""

    what: str
    reason: str
    count: int


def refusals_of(report: bytes) -> list[RefusalShape]:
    """Return the counts of a serialized StatusReport; none of one that does not decode."""
    try:
        told = messages.StatusReport.FromString(report).refusals
    except DecodeError:
        return []
    return [RefusalShape(what=item.what, reason=item.reason, count=item.count) for item in told]
