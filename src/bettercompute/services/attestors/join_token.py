"""Attestor `join-token`: the node holds the secret of a token that an operator made. One UPDATE decides who uses it."""

from __future__ import annotations

from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric import ec

from bettercompute.errors import Refused
from bettercompute.pki import join_token
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.services.attestors.port import Grant, Moment
from bettercompute.services.issuing import IssuedIdentity, Request, answered_before
from bettercompute.services.keys import KeySource
from bettercompute.store import tokens
from bettercompute.store.database import Transaction
from bettercompute.store.tokens import Redeemed
from bettercompute.world import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinTokenClaim:
    """A secret that came sealed for this very request."""

    secret_sha256: bytes = field(repr=False)
    request: Request
    role: str
    asked_node_id: str | None
    sealed_to: ec.EllipticCurvePublicKey
    """The join-encryption key that the token pins, and so with it the key that has to sign the answer."""

    async def redeem(self, transaction: Transaction, moment: Moment) -> Grant | IssuedIdentity:
        """Use the token, or refuse: unknown, used, expired, revoked, for another role or another node."""
        redeemed = await tokens.redeem(
            transaction,
            secret_sha256=self.secret_sha256,
            csr_sha256=self.request.sha256,
            role=self.role,
            drawn_node_id=moment.drawn_node_id,
            asked_node_id=self.asked_node_id,
            source=moment.source,
        )
        if redeemed.role != self.role:
            raise refuse(
                Reason.TOKEN_ROLE,
                f"join token {redeemed.token_id} is for role {redeemed.role}, not {self.role}: make one for this role",
            )
        if self.asked_node_id is not None and redeemed.node_id != self.asked_node_id:
            # The exception undoes the use: a token that fixes no id must not let its holder take another node's place.
            raise refuse(
                Reason.TOKEN_NODE,
                f"join token {redeemed.token_id} does not name node {self.asked_node_id}: "
                f"make one with `token create --node-id {self.asked_node_id}`, or join without a node id",
            )
        if redeemed.again:
            return await answer_again(transaction, redeemed.node_id, self.request, now_ms=moment.now_ms)
        return granted(redeemed)


def granted(redeemed: Redeemed) -> Grant:
    """Return what a token grants that was redeemed just now."""
    return Grant(
        node_id=redeemed.node_id,
        site=redeemed.site,
        role=redeemed.role,
        tenant_controlled=redeemed.tenant_controlled,
        allowed_kinds=redeemed.allowed_kinds,
        granted_by=f"token/{redeemed.token_id}",
    )


async def answer_again(transaction: Transaction, node_id: str, request: Request, *, now_ms: int) -> IssuedIdentity:
    """Return what a token brought its request before."""
    issued = await answered_before(transaction, node_id=node_id, request=request, now_ms=now_ms)
    if issued is None:
        raise refuse(Reason.TOKEN_USED, f"node {node_id}, which used this token, was forgotten: make another token")
    return issued


@dataclass(frozen=True, slots=True)
class JoinTokenAttestor:
    """Opens sealed tokens."""

    keys: KeySource
    clock: Clock

    def examine(self, request: messages.JoinRequest, csr: Request, *, role: str) -> JoinTokenClaim:
        """Open the sealed token and check that it was sealed for this request and role.

        While the join keys are being rotated a token is sealed to either of two.
        """
        why: Refused | None = None
        for key in self.keys.read().join_encryption_keys:
            try:
                proof = join_token.open_proof(
                    key, request.sealed_token, csr_der=csr.csr_der, role=role, now_ms=self.clock.now_ms()
                )
            except Refused as refused:
                why = why or refused
                continue
            return JoinTokenClaim(
                secret_sha256=bytes.fromhex(join_token.secret_sha256(proof.secret)),
                request=csr,
                role=role,
                asked_node_id=request.node_id or None,
                sealed_to=key.public_key(),
            )
        assert why is not None, "there was a key to fail with"
        raise why
