"""The port that every attestor keeps: first the evidence is examined without any effect, then it is used up in a
transaction.

Using it up ends in a `Grant`, in a refusal, or in a `Deferral`: come again with the same certificate request, after a
while or with the answer to a challenge. A deferral has no effect, so that it costs a stranger's caller no row. See
docs/security.md, "Attestors"; decisions 0145.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric import ec

from bettercompute.protocol import messages
from bettercompute.services.issuing import IssuedIdentity, Request
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferral:
    """Not yet. Without a challenge the caller waits `retry_after_s`, with one it answers at once."""

    reason: str
    message: str
    retry_after_s: int = 0
    challenge: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What a transaction knows of a Join beside the evidence."""

    now_ms: int
    """The database's time."""
    drawn_node_id: str
    """The node's, unless the evidence fixes one."""
    source: str
    """From where it was called."""


class Claim(Protocol):
    """Evidence that was examined and found good, and not used yet."""

    @property
    def sealed_to(self) -> ec.EllipticCurvePublicKey | None:
        """The key to which a secret came sealed, which says by which key the answer is signed; None: nothing was."""
        ...

    async def redeem(self, transaction: Transaction, moment: Moment) -> Grant | IssuedIdentity | Deferral:
        """Use the evidence up, or refuse and say why.

        An `IssuedIdentity` is what the same request got before: it gets it again, and nothing happens.
        """
        ...


class Attestor(Protocol):
    """One way to be believed."""

    def examine(self, request: messages.JoinRequest, csr: Request, *, role: str) -> Claim:
        """Check the evidence as far as that needs no database; refuse and say what is wrong with it."""
        ...
