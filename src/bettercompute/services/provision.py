"""`nodes provision`: a joined identity by an administrator's word, for images and tests.

See docs/security.md, "Joining"; decisions 0111.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bettercompute.pki import certificates, identity_file
from bettercompute.pki.identity import check_node_id, check_role, check_site
from bettercompute.pki.identity_file import IdentityRecord
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.services.installation import Installation, required_trust
from bettercompute.services.issuing import IssuedIdentity, Issuer, answered_before, check_request
from bettercompute.services.keys import KeySource
from bettercompute.store import audit
from bettercompute.store.audit import NewEntry
from bettercompute.store.database import Database, Transaction
from bettercompute.store.nodes import JoinedNode
from bettercompute.store.sessions import server_time_ms
from bettercompute.world import World

ATTESTOR = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvisionedNode:
    """A joined identity without its key, which stays with whoever asked."""

    node_id: str
    chain_pem: bytes
    serving_ca_pem: bytes
    signed_trust_bundle: bytes
    identity: Mapping[str, Any]
    """The content of identity.json."""


class ProvisionService:
    """Joins nodes that an administrator names."""

    def __init__(self, database: Database, *, keys: KeySource, installation: Installation, world: World) -> None:
        self._database = database
        self._world = world
        self._keys = keys
        self._issuer = Issuer(keys, installation, world)

    async def provision(
        self, *, node_id: str, site: str, role: str, csr_der: bytes, asked_by: str, replace: bool = False
    ) -> ProvisionedNode:
        """Return the identity for a certificate request; the same request may ask again and gets the same one.

        A node of this id that has joined before is refused CONFLICT; with `replace` it joins anew, and its
        certificates so far are revoked, which ends the session of whoever holds them.
        """
        node = JoinedNode(
            node_id=check_node_id(node_id),
            site=check_site(site),
            role=check_role(role),
            tenant_controlled=False,
            attestor=ATTESTOR,
        )
        csr = check_request(csr_der)

        async def work(transaction: Transaction) -> ProvisionedNode:
            await self._keys.refresh(transaction)
            now_ms = await server_time_ms(transaction)
            trust = await required_trust(transaction)
            issued = await answered_before(transaction, node_id=node_id, request=csr, now_ms=now_ms)
            if issued is None:
                issued = await self._issuer.admit(transaction, node, csr, now_ms=now_ms, source=asked_by)
                if issued.identity_generation > 1 and not replace:
                    # Found by the lock that joining takes, so also where two ask at once; all of it is rolled back.
                    raise refuse(
                        Reason.CONFLICT,
                        f"there is a node {node_id}: choose another id, or ask to replace it, which revokes its "
                        "certificates and ends its session",
                    )
                await self._record(transaction, issued, asked_by=asked_by)
            return self._provisioned(issued, signed_trust=trust.signed_bundle, now_ms=now_ms)

        return await self._database.retrying(work)

    def _provisioned(self, issued: IssuedIdentity, *, signed_trust: bytes, now_ms: int) -> ProvisionedNode:
        node = issued.node
        assert node.role is not None, "every certificate of ours states a role"
        record = IdentityRecord(
            certificate_serial=issued.serial,
            node_id=node.node_id,
            site=node.site,
            trust_domain=node.trust_domain,
            role=node.role,
            identity_generation=issued.identity_generation,
            gateway_urls=self._issuer.installation.gateway_urls,
            server_time_mark_ms=now_ms,
        )
        return ProvisionedNode(
            node_id=node.node_id,
            chain_pem=certificates.chain_to_pem(issued.chain_der),
            serving_ca_pem=self._issuer.keys.serving_ca_pem,
            signed_trust_bundle=signed_trust,
            identity=json.loads(identity_file.encode(record)),
        )

    async def _record(self, transaction: Transaction, issued: IssuedIdentity, *, asked_by: str) -> None:
        details = {"serial": issued.serial, "identityGeneration": issued.identity_generation, "role": issued.node.role}
        entry = NewEntry(
            id=self._world.ids.uuid7(),
            actor=asked_by,
            action="node.provision",
            target=f"node/{issued.node.node_id}",
            outcome="done",
            details=details,
        )
        await audit.record(transaction, entry)
