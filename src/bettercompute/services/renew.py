"""Renew: a younger certificate for a node that proves that it is the one it says.

The node proves that it holds the key of its present certificate, within 60 s of server time and once. Renewal is
idempotent per certificate request. The old and the new serial are both good until the new one is first used; at most
two serials of a node wait unused, and of more the oldest is dropped, so that a node which lost its pending keys is not
locked out. Nor is one whose certificate a restore of the database has forgotten. See docs/security.md, "Renewing";
decisions 0046, 0111 and 0128.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bettercompute.pki import possession
from bettercompute.pki.possession import Shown
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import Purpose, renew_pop_input
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.services import presented
from bettercompute.services.issuing import IssuedIdentity, Issuer, Request, answered_before, check_still_good
from bettercompute.store import certificates as stored_certificates
from bettercompute.store.database import Transaction
from bettercompute.store.nodes import Node

UNUSED_SERIALS_MAX = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenRenewal:
    """A renewal whose proof of possession was checked, and not used yet."""

    shown: Shown
    request: Request
    proof_sha256: str


def check_renewal(
    renewal: messages.RenewRequest,
    request: Request,
    *,
    peer_chain: Sequence[bytes],
    issuer: Issuer,
    now_ms: int,
) -> ProvenRenewal:
    """Check chain, identity and proof; `peer_chain` is TLS's, or empty where the request brings its own."""
    chain_der = list(peer_chain) or list(renewal.certificate_chain)
    if not chain_der:
        raise refuse(Reason.NO_CERTIFICATE, "Renew needs the node's present certificate, by TLS or in the request")
    shown = possession.shown(
        chain_der,
        roots=[authority.certificate for authority in issuer.keys.node_cas],
        trust_domain=issuer.installation.trust_domain,
        now_ms=now_ms,
    )
    possession.check_dated(renewal.client_time_ms, now_ms=now_ms)
    signed = renew_pop_input(csr=request.csr_der, node_id=shown.identity.node_id, client_time_ms=renewal.client_time_ms)
    return ProvenRenewal(shown=shown, request=request, proof_sha256=possession.prove(shown, signed, renewal.proof))


async def renew(transaction: Transaction, proven: ProvenRenewal, *, issuer: Issuer, now_ms: int) -> IssuedIdentity:
    """Issue the node's next certificate, under the lock that Hello, revoking and re-joining of the node take too."""
    found = await presented.look_up(transaction, proven.shown)
    node = found.node
    check_still_good(found.certificate, identity_generation=node.identity_generation, now_ms=now_ms)
    before = await answered_before(transaction, node_id=node.node_id, request=proven.request, now_ms=now_ms)
    if before is not None:
        return before
    await presented.use_proof(transaction, purpose=Purpose.RENEW_POP, proof_sha256=proven.proof_sha256, now_ms=now_ms)
    await _drop_unused(transaction, node=node, shown_serial=proven.shown.serial, now_ms=now_ms)
    return await issuer.issue(
        transaction,
        proven.shown.identity,
        proven.request,
        identity_generation=node.identity_generation,
        allowed_kinds=found.certificate.allowed_kinds,
        now_ms=now_ms,
    )


async def _drop_unused(transaction: Transaction, *, node: Node, shown_serial: str, now_ms: int) -> None:
    """Make room for one more unused serial; the one that is presented stays, used or not."""
    unused = [
        one
        for one in await stored_certificates.of_node(transaction, node_id=node.node_id)
        if one.identity_generation == node.identity_generation
        and one.first_used_at_ms is None
        and one.superseded_at_ms is None
        and one.revoked_at_ms is None
        and one.not_after_ms > now_ms
        and one.serial != shown_serial
    ]
    dropped = [one.serial for one in unused[UNUSED_SERIALS_MAX - 1 :]]
    await stored_certificates.supersede(transaction, node_id=node.node_id, serials=dropped)
