"""What every node that joins is told of this installation, and the trust bundle that says it to those that joined
before.
"""

from __future__ import annotations

from dataclasses import dataclass

from bettercompute.errors import Unavailable
from bettercompute.pki import certificates, trust
from bettercompute.pki.trust import CommandRoot, TrustContent
from bettercompute.protocol.statuses import Reason
from bettercompute.services.keys import ServiceKeys
from bettercompute.store import trust as stored_trust
from bettercompute.store.database import Database, Queries
from bettercompute.store.trust import StoredBundle
from bettercompute.world import World


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
    """Publish what the keys say; the version rises only when that differs from the bundle published last."""
    content = TrustContent(
        trust_domain=installation.trust_domain,
        command_roots=(CommandRoot(certificate=keys.command_root),) if installation.command_signing else (),
        join_signing_keys=(keys.join_signing.public_key(),),
        join_encryption_keys=(keys.join_encryption.public_key(),),
        serving_ca_pins=(keys.serving_ca_pin,),
    )
    now_ms = world.clock.now_ms()

    def sign(version: int) -> bytes:
        return trust.sign(content, version=version, key=keys.join_signing, now_ms=now_ms).signed

    return await stored_trust.publish(database, content_sha256=trust.content_sha256(content), sign=sign)


async def required_trust(queries: Queries) -> StoredBundle:
    """Return the bundle published last; Unavailable while there is none."""
    bundle = await stored_trust.current(queries)
    if bundle is None:
        raise Unavailable("no trust bundle is published yet: the control plane is starting", reason=Reason.STARTING)
    return bundle
