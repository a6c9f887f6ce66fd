"""Attestor `provisioned`: a machine that was prepared for one node, by a credential that was put on its disk.

The credential is a token that fixes the node and says of which machine it may be used: of the one that an operator
named, else of the one that the node has joined on before. A challenge is answered first. While the node still has a
live session, of the system that installed this one, or of a machine that this one must not replace, the join is
deferred. See docs/security.md, "Attestors"; decisions 0148 and 0149.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from bettercompute.pki import join_token
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.services.attestors import machine
from bettercompute.services.attestors.challenges import Challenges, SealedSecret
from bettercompute.services.attestors.join_token import answer_again, granted
from bettercompute.services.attestors.port import Deferral, Grant, Moment
from bettercompute.services.issuing import IssuedIdentity, Request
from bettercompute.store import nodes, tokens
from bettercompute.store.database import Transaction
from bettercompute.store.nodes import Node

NAME = "provisioned"
REASON_CONNECTED = "node-connected"
RETRY_AFTER_S = 15
# As a Hello judges it: three intervals of the session and a flush.
_LIVE_INTERVALS = 3
_LIVE_SLACK_MS = 15_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionedClaim:
    """A credential that came sealed, and the machine that brings it."""

    sealed: SealedSecret = field(repr=False)
    request: Request
    role: str
    asked_node_id: str | None
    hardware: Mapping[str, Any]
    challenges: Challenges

    @property
    def sealed_to(self) -> ec.EllipticCurvePublicKey:
        """The join-encryption key that the credential pins."""
        return self.sealed.sealed_to

    async def redeem(self, transaction: Transaction, moment: Moment) -> Grant | IssuedIdentity | Deferral:
        """Challenge, judge the machine, wait for the node to be gone; then use the credential."""
        secret_sha256 = bytes.fromhex(join_token.secret_sha256(self.sealed.secret))
        expected = await tokens.expected(transaction, secret_sha256=secret_sha256, attestor=NAME)
        if self.sealed.answered is None:
            return self.challenges.give(self.sealed, self.request, now_ms=moment.now_ms)
        if not expected.used:
            node = await nodes.get(transaction, node_id=expected.node_id)
            self._check_machine(expected.node_id, expected.machine, node)
            if node is not None and _is_live(node, now_ms=moment.now_ms):
                return Deferral(
                    reason=REASON_CONNECTED,
                    message=f"node {node.node_id} has a live session: its credential is used when that has ended",
                    retry_after_s=RETRY_AFTER_S,
                )
        await self.challenges.use(transaction, self.sealed.answered, moment)
        redeemed = await tokens.redeem(
            transaction,
            secret_sha256=secret_sha256,
            csr_sha256=self.request.sha256,
            role=self.role,
            drawn_node_id=moment.drawn_node_id,
            asked_node_id=self.asked_node_id,
            source=moment.source,
            attestor=NAME,
        )
        if redeemed.again:
            return await answer_again(transaction, redeemed.node_id, self.request, now_ms=moment.now_ms)
        return granted(redeemed)

    def _check_machine(self, node_id: str, named: Mapping[str, Any], node: Node | None) -> None:
        expected = machine.expected_of(named) or machine.expected_of({} if node is None else node.hardware_claims)
        if not expected:
            raise refuse(
                Reason.ATTESTATION,
                f"nothing is known of the machine of node {node_id}: make its credential with --machine-uuid, "
                "--machine-serial or --machine-mac",
            )
        difference = machine.difference(expected, self.hardware)
        if difference:
            raise refuse(
                Reason.ATTESTATION,
                f"this is not the machine that the credential of node {node_id} is for: {difference}; make one for it",
            )


@dataclass(frozen=True, slots=True)
class ProvisionedAttestor:
    """Opens sealed credentials and answers to challenges."""

    challenges: Challenges

    def examine(self, request: messages.JoinRequest, csr: Request, *, role: str) -> ProvisionedClaim:
        """Open what is sealed, and note which machine it claims to be."""
        return ProvisionedClaim(
            sealed=self.challenges.examine(request, csr, role=role),
            request=csr,
            role=role,
            asked_node_id=request.node_id or None,
            hardware=machine.claims_of(request),
            challenges=self.challenges,
        )


def _is_live(node: Node, *, now_ms: int) -> bool:
    session = node.session
    if session.gateway_id is None or session.last_seen_ms is None:
        return False
    return now_ms - session.last_seen_ms <= _LIVE_INTERVALS * session.heartbeat_interval_ms + _LIVE_SLACK_MS
