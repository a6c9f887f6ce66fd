"""How a certificate comes to be. One transaction holds the row of the node, of its certificate and of what is told.

The same certificate request of the same node gets the same certificate, byte by byte, so that a lost answer can be
asked for again. See docs/security.md, "Joining", "Renewing"; decisions 0111.
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from bettercompute import telemetry
from bettercompute.pki import certificates, signatures
from bettercompute.pki.identity import NodeIdentity, agent_role, identity_of
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import join_response_input, sha256, trust_bundle_input
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.services.installation import Installation
from bettercompute.services.keys import KeySource, ServiceKeys
from bettercompute.store import certificates as stored_certificates
from bettercompute.store import nodes, outbox
from bettercompute.store.certificates import NewCertificate, StoredCertificate
from bettercompute.store.database import Transaction
from bettercompute.store.nodes import JoinedNode
from bettercompute.store.outbox import NewEvent
from bettercompute.world import World

REASON_REJOINED = "rejoined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A certificate request that was checked: its bytes and the key in it."""

    csr_der: bytes
    public_key: ec.EllipticCurvePublicKey

    @property
    def sha256(self) -> bytes:
        """What the request is known by."""
        return sha256(self.csr_der)


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedIdentity:
    """A certificate that is recorded, and of which identity of its node it is."""

    node: NodeIdentity
    serial: str
    chain_der: tuple[bytes, ...]
    identity_generation: int

    @classmethod
    def of(cls, stored: StoredCertificate) -> IssuedIdentity:
        """Return what was issued, byte by byte."""
        chain_der = certificates.chain_from_pem(stored.chain)
        return cls(
            node=identity_of(certificates.load_certificate(chain_der[0])),
            serial=stored.serial,
            chain_der=chain_der,
            identity_generation=stored.identity_generation,
        )


def check_request(csr_der: bytes) -> Request:
    """Check a certificate request; refuse INVALID_ARGUMENT a bad one."""
    return Request(csr_der=csr_der, public_key=certificates.check_csr(csr_der))


@dataclass(frozen=True, slots=True)
class Issuer:
    """Issues node certificates inside transactions of its callers."""

    source: KeySource
    installation: Installation
    world: World

    @property
    def keys(self) -> ServiceKeys:
        """The keys in use, as of the last refresh of their source: each transaction begins with one."""
        return self.source.held()

    async def admit(
        self,
        transaction: Transaction,
        node: JoinedNode,
        request: Request,
        *,
        now_ms: int,
        source: str,
        allowed_kinds: tuple[str, ...] | None = None,
    ) -> IssuedIdentity:
        """Record that a node joins, for the first time or anew, and issue its certificate.

        A node that joins anew gets the next identity generation; every certificate of the one before is revoked.
        """
        generation = await nodes.insert_joined(transaction, node)
        if generation > 1:
            await stored_certificates.revoke_generation(
                transaction, node_id=node.node_id, identity_generation=generation - 1, reason=REASON_REJOINED
            )
        identity = NodeIdentity(
            trust_domain=self.installation.trust_domain,
            site=node.site,
            node_id=node.node_id,
            role=node.role,
            tenant_controlled=node.tenant_controlled,
        )
        issued = await self.issue(
            transaction,
            identity,
            request,
            identity_generation=generation,
            allowed_kinds=allowed_kinds,
            now_ms=now_ms,
        )
        payload = {
            "nodeId": node.node_id,
            "site": node.site,
            "role": node.role,
            "attestor": node.attestor,
            "identityGeneration": generation,
            "rejoined": generation > 1,
            "source": source,
        }
        event = NewEvent(
            id=self.world.ids.uuid7(), type=telemetry.EVENT_NODE_JOINED, node_id=node.node_id, payload=payload
        )
        await outbox.publish(transaction, [event])
        return issued

    async def issue(
        self,
        transaction: Transaction,
        identity: NodeIdentity,
        request: Request,
        *,
        identity_generation: int,
        allowed_kinds: tuple[str, ...] | None,
        now_ms: int,
    ) -> IssuedIdentity:
        """Make a certificate and record it before it is given out."""
        leaf = certificates.make_node_leaf(
            self.keys.node_ca,
            public_key=request.public_key,
            identity=identity,
            serial=self.world.ids.random_bytes(certificates.SERIAL_BYTES),
            now_ms=now_ms,
            lifetime_ms=self.installation.node_lifetime_ms,
        )
        chain_der = (leaf.public_bytes(Encoding.DER), self.keys.node_ca.certificate.public_bytes(Encoding.DER))
        await stored_certificates.insert(
            transaction,
            NewCertificate(
                serial=certificates.serial_text(leaf),
                node_id=identity.node_id,
                identity_generation=identity_generation,
                csr_sha256=request.sha256,
                chain=certificates.chain_to_pem(chain_der),
                not_before_ms=certificates.not_before_ms(leaf),
                not_after_ms=certificates.not_after_ms(leaf),
                allowed_kinds=allowed_kinds,
            ),
        )
        return IssuedIdentity(
            node=identity,
            serial=certificates.serial_text(leaf),
            chain_der=chain_der,
            identity_generation=identity_generation,
        )

    def trust_for(self, signed_trust: bytes, *, sealed_to: ec.EllipticCurvePublicKey | None) -> bytes:
        """Return the published bundle as a caller can verify it: its bytes, signed by the key that the caller pins.

        While the join keys are being rotated bundles are signed by the older key, which a new token does not name.
        """
        published = messages.SignedTrustBundle.FromString(signed_trust)
        key = self.keys.answering(sealed_to)
        if published.signature.kid == certificates.spki_sha256(key.public_key()):
            return signed_trust
        signature = signatures.sign(key, trust_bundle_input(published.body))
        return messages.SignedTrustBundle(body=published.body, signature=signature).SerializeToString(
            deterministic=True
        )

    def response_body(self, issued: IssuedIdentity, request: Request, *, signed_trust: bytes, now_ms: int) -> bytes:
        """Return the serialized JoinResponseBody that Join and Renew answer."""
        assert issued.node.role is not None, "every certificate of ours states a role"
        body = messages.JoinResponseBody(
            node_id=issued.node.node_id,
            site=issued.node.site,
            trust_domain=issued.node.trust_domain,
            certificate_chain=list(issued.chain_der),
            trust=messages.SignedTrustBundle.FromString(signed_trust),
            gateway_urls=self.installation.gateway_urls,
            server_time_ms=now_ms,
            csr_sha256=request.sha256,
            identity_generation=issued.identity_generation,
            role=agent_role(issued.node.role),
        )
        return body.SerializeToString(deterministic=True)

    def sign(self, body: bytes, *, sealed_to: ec.EllipticCurvePublicKey | None = None) -> messages.Signature:
        """Sign a response body, so that the gateway which relays it cannot alter it, by the key that the caller knows.

        `sealed_to` is the key to which its join token was sealed; without one the caller holds a trust bundle.
        """
        return signatures.sign(self.keys.answering(sealed_to), join_response_input(body))


async def answered_before(
    transaction: Transaction, *, node_id: str, request: Request, now_ms: int
) -> IssuedIdentity | None:
    """Return what this node got for this very request, if it asked before; refuse when that is not good any more."""
    stored = await issued_before(transaction, node_id=node_id, request=request)
    node = await nodes.get(transaction, node_id=node_id)
    if stored is None or node is None:  # a certificate's row outlives a node that is forgotten
        return None
    check_still_good(stored, identity_generation=node.identity_generation, now_ms=now_ms)
    return IssuedIdentity.of(stored)


async def issued_before(transaction: Transaction, *, node_id: str, request: Request) -> StoredCertificate | None:
    """Return what this node got for this very request, whatever has become of it."""
    return await stored_certificates.find_by_request(transaction, node_id=node_id, csr_sha256=request.sha256)


def check_still_good(stored: StoredCertificate, *, identity_generation: int, now_ms: int) -> None:
    """Refuse UNAUTHENTICATED a certificate that was revoked, replaced or outlived, and say which."""
    what = f"certificate {stored.serial} of node {stored.node_id}"
    if stored.revoked_at_ms is not None:
        raise refuse(Reason.REVOKED, f"{what} was revoked ({stored.revocation_reason}): join anew with a new token")
    if stored.identity_generation != identity_generation:
        raise refuse(Reason.OLD_GENERATION, f"{what} is of an older identity of the node: join anew with a new token")
    if stored.superseded_at_ms is not None:
        raise refuse(Reason.SUPERSEDED_CERTIFICATE, f"{what} was replaced by a newer one that is in use")
    if stored.not_after_ms <= now_ms:
        raise refuse(Reason.CERTIFICATE_EXPIRED, f"{what} has expired: join anew with a new token")
