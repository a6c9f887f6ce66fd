"""What every node that joins is told of this installation, and the trust bundle that says it to those that joined
before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_der_public_key

from bettercompute.errors import Refused, Unavailable
from bettercompute.pki import certificates, rotation, trust
from bettercompute.pki.quorum import NO_APPROVERS
from bettercompute.pki.rotation import Purpose, TrustedKey
from bettercompute.pki.trust import CommandRoot, TrustContent
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.services.keys import ServiceKeys
from bettercompute.store import approvers as stored_approvers
from bettercompute.store import trust as stored_trust
from bettercompute.store.approvers import StoredSet
from bettercompute.store.database import Database, Queries, Transaction
from bettercompute.store.trust import StoredBundle
from bettercompute.world import World

STARTED_BY = "start"
IN_EVERY_BUNDLE = (Purpose.JOIN_SIGNING, Purpose.SERVING_CA)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """The names and addresses that go into certificates and answers."""

    trust_domain: str
    gateway_urls: tuple[str, ...]
    command_signing: bool = False
    """Nodes are told the command-signing root, and then take only signed intent."""
    node_lifetime_ms: int = certificates.NODE_LIFETIME_MS


async def publish_trust(
    database: Database, *, keys: ServiceKeys, installation: Installation, world: World
) -> StoredBundle:
    """Found the installation with these keys, or take it up, and publish what is to be trusted.

    A start only ever adds: what nodes trust is taken from them by an operator's step alone (`pki.rotation`).
    """

    async def work(transaction: Transaction) -> StoredBundle:
        await stored_trust.lock(transaction)
        before = await stored_trust.keys(transaction)
        after = before
        for held in keys.by_purpose():
            after = rotation.adopt(after, held)
        await stored_trust.store_keys(transaction, before=before, after=after, changed_by=STARTED_BY)
        return await publish(transaction, keys=keys, installation=installation, now_ms=world.clock.now_ms())

    return await database.retrying(work)


async def publish(
    transaction: Transaction, *, keys: ServiceKeys, installation: Installation, now_ms: int
) -> StoredBundle:
    """Publish what the database says is to be trusted, under `store.trust.lock`; the same content is no new version.

    Refuses CONFLICT what daemons would not take, a bundle over its size among it: nothing of it is stored then.
    """
    trusted = await stored_trust.keys(transaction)
    approvers = await stored_approvers.current(transaction)
    content = bundle_content(trusted, approvers, installation=installation)
    key = keys.bundle_key(trusted)

    def sign(version: int) -> bytes:
        try:
            return trust.sign(content, version=version, key=key, now_ms=now_ms).signed
        except Refused as refused:
            raise refuse(Reason.CONFLICT, f"this cannot be published: {refused.message}") from refused

    purposes = (*IN_EVERY_BUNDLE, *((Purpose.COMMAND_ROOT,) if installation.command_signing else ()))
    return await stored_trust.publish(
        transaction, content_sha256=trust.content_sha256(content), sign=sign, purposes=purposes
    )


def bundle_content(
    keys: Sequence[TrustedKey], approvers: StoredSet | None, *, installation: Installation
) -> TrustContent:
    """Return what a bundle of these keys and this approver set says.

    Of roots and pins none comes before another, so a switch between them is no change, and asks nobody to reconnect.
    """
    roots = _by_key(rotation.trusted(keys, Purpose.COMMAND_ROOT)) if installation.command_signing else ()
    join_keys = rotation.trusted(keys, Purpose.JOIN_SIGNING)
    return TrustContent(
        trust_domain=installation.trust_domain,
        command_roots=tuple(CommandRoot(certificate=x509.load_der_x509_certificate(root.public_der)) for root in roots),
        join_signing_keys=tuple(_public_key(key.public_der) for key in join_keys),
        join_encryption_keys=tuple(_public_key(key.companion_der) for key in join_keys),
        serving_ca_pins=tuple(key.key_sha256 for key in _by_key(rotation.trusted(keys, Purpose.SERVING_CA))),
        approvers=NO_APPROVERS if approvers is None else approvers.approvers,
        approver_signatures=() if approvers is None else approvers.signatures,
    )


def _by_key(keys: Sequence[TrustedKey]) -> list[TrustedKey]:
    return sorted(keys, key=lambda key: key.key_sha256)


def _public_key(spki_der: bytes) -> ec.EllipticCurvePublicKey:
    key = load_der_public_key(spki_der)
    assert isinstance(key, ec.EllipticCurvePublicKey), "it was checked before it was stored"
    return key


async def required_trust(queries: Queries) -> StoredBundle:
    """Return the bundle published last; Unavailable while there is none."""
    bundle = await stored_trust.current(queries)
    if bundle is None:
        raise Unavailable("no trust bundle is published yet: the control plane is starting", reason=Reason.STARTING)
    return bundle
