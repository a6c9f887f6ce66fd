"""The port that every attestor keeps: first the evidence is examined without any effect, then it is used up in a
transaction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bettercompute.protocol import messages
from bettercompute.services.issuing import Request
from bettercompute.store.database import Transaction


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What the evidence allows: who the node is, as what it joins, and who is answerable for it."""

    node_id: str
    site: str
    role: str
    tenant_controlled: bool
    allowed_kinds: tuple[str, ...] | None
    granted_by: str
    """For the audit log, for example `token/018f...`."""
    again: bool
    """The same request used the same evidence before: it gets the same answer, and nothing happens."""


class Claim(Protocol):
    """Evidence that was examined and found good, and not used yet."""

    async def redeem(self, transaction: Transaction, *, drawn_node_id: str, source: str) -> Grant:
        """Use the evidence up, or refuse and say why. `drawn_node_id` is the node's unless the evidence fixes one."""
        ...


class Attestor(Protocol):
    """One way to be believed."""

    def examine(self, request: messages.JoinRequest, csr: Request, *, role: str, now_ms: int) -> Claim:
        """Check the evidence as far as that needs no database; refuse and say what is wrong with it."""
        ...
