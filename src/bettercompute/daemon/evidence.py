"""What a machine shows to be believed: one class for each attestor that `bcd` can join by.

Each fills its part of a request, and answers a challenge if its attestor gives any. Nothing secret is shown but sealed
to JoinService, for this one certificate request. See docs/security.md, "Attestors"; decisions 0145.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from bettercompute.errors import BetterComputeError, Refused
from bettercompute.pki import join_token
from bettercompute.pki.identity import role_of
from bettercompute.pki.join_token import JOIN_TOKEN, JoinToken
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.world import Clock

PROVISIONED = "provisioned"
DISCOVERY = "discovery"


class Evidence(Protocol):
    """One way to be believed."""

    @property
    def attestor(self) -> str:
        """The attestor that this is for."""
        ...

    def show(self, request: messages.JoinRequest) -> None:
        """Fill in the attestor and what it verifies; the request has its CSR and its role already."""
        ...

    def answer(self, challenge: bytes, request: messages.JoinRequest) -> bytes:
        """Return the answer to a challenge, for the request that was shown."""
        ...

    def cures(self, error: BetterComputeError) -> bool:
        """Say whether asking again at once may help, because the refusal told what was lacking."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvidence:
    """The secret of a join token, sealed."""

    token: JoinToken = field(repr=False)
    clock: Clock
    attestor: str = JOIN_TOKEN

    def show(self, request: messages.JoinRequest) -> None:
        """Seal the secret for this request."""
        request.attestor = self.attestor
        request.sealed_token = join_token.seal_proof(
            self.token.secret,
            join_encryption_key=self.token.join_encryption_key,
            csr_der=request.csr,
            role=required_role(request.role),
            now_ms=self.clock.now_ms(),
        )

    def answer(self, challenge: bytes, request: messages.JoinRequest) -> bytes:  # noqa: ARG002 - the port's
        """Refuse: a token is believed without."""
        raise unanswerable(self.attestor)

    def cures(self, error: BetterComputeError) -> bool:  # noqa: ARG002 - the port's
        """No."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedEvidence:
    """A secret that is proven once more for a challenge: a provisioned credential, or what a boot script gave."""

    token: JoinToken = field(repr=False)
    clock: Clock
    attestor: str
    assertion: bytes = field(default=b"", repr=False)
    """Of `discovery`: what the site agent signed."""

    def show(self, request: messages.JoinRequest) -> None:
        """Seal the secret for this request, beside the assertion."""
        request.attestor, request.evidence = self.attestor, self.assertion
        request.sealed_token = self._sealed(request)

    def answer(self, challenge: bytes, request: messages.JoinRequest) -> bytes:
        """Seal the secret for this challenge."""
        sealed = self._sealed(request, challenge=challenge)
        return messages.SealedChallengeAnswer(challenge=challenge, sealed_secret=sealed).SerializeToString()

    def cures(self, error: BetterComputeError) -> bool:  # noqa: ARG002 - the port's
        """No."""
        return False

    def _sealed(self, request: messages.JoinRequest, *, challenge: bytes = b"") -> str:
        return join_token.seal_proof(
            self.token.secret,
            join_encryption_key=self.token.join_encryption_key,
            csr_der=request.csr,
            role=required_role(request.role),
            now_ms=self.clock.now_ms(),
            challenge=challenge,
        )


def required_role(agent_role: messages.AgentRole.ValueType) -> str:
    """Return the name of the role that a request of ours asks for."""
    role = role_of(agent_role)
    assert role is not None, "whoever made the request checked the role"
    return role


def unanswerable(attestor: str) -> Refused:
    """Return the refusal of a challenge that this attestor does not give in this version."""
    return refuse(
        Reason.ATTESTATION,
        f"the control plane challenges a join by {attestor}, which this bcd cannot answer: upgrade bcd",
    )
