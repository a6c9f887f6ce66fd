"""Attestor `discovery`: an unknown machine that a site agent has seen boot, and given a secret by its boot script.

The site agent signs an assertion with its node key: the machine's hardware address, the digest of the secret, a few
minutes. It must be a site agent whose certificate is good now, and it speaks for its own site. The machine brings the
assertion, answers a challenge with the secret, and becomes a node of role ramdisk whose id follows from site and
address, so that it is the same node at each boot. An assertion lets one machine in once. See docs/security.md,
"Attestors"; decisions 0148 and 0149.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from bettercompute.pki import discovery
from bettercompute.pki.discovery import Discovered
from bettercompute.pki.identity import ROLE_RAMDISK
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import Purpose, part
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.services import presented
from bettercompute.services.attestors import machine
from bettercompute.services.attestors.challenges import Challenges, SealedSecret
from bettercompute.services.attestors.port import Deferral, Grant, Moment
from bettercompute.services.issuing import IssuedIdentity, Issuer, Request, answered_before, check_still_good
from bettercompute.store import certificates as stored_certificates
from bettercompute.store import nodes, replay
from bettercompute.store.database import Transaction

NAME = "discovery"
_ID_BYTES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryClaim:
    """A secret that came sealed, the assertion that is to vouch for it, and the machine that brings both."""

    sealed: SealedSecret = field(repr=False)
    evidence: bytes = field(repr=False)
    request: Request
    hardware: Mapping[str, Any]
    challenges: Challenges
    issuer: Issuer

    @property
    def sealed_to(self) -> ec.EllipticCurvePublicKey:
        """The join-encryption key that the boot script pins."""
        return self.sealed.sealed_to

    async def redeem(self, transaction: Transaction, moment: Moment) -> Grant | IssuedIdentity | Deferral:
        """Verify the assertion, challenge, and let the machine in once."""
        found = discovery.verify_assertion(
            self.evidence,
            roots=[authority.certificate for authority in self.issuer.keys.node_cas],
            trust_domain=self.issuer.installation.trust_domain,
            now_ms=moment.now_ms,
        )
        self._check_machine(found)
        await _check_agent(transaction, found, now_ms=moment.now_ms)
        if self.sealed.answered is None:
            return self.challenges.give(self.sealed, self.request, now_ms=moment.now_ms)
        await self.challenges.use(transaction, self.sealed.answered, moment)
        node_id = discovered_node_id(site=found.site_agent.site, mac_address=found.mac_address)
        used_first = await replay.consume(
            transaction,
            purpose=Purpose.DISCOVERY_ASSERTION,
            jti=hashlib.sha256(found.body).hexdigest(),
            expires_at_ms=found.not_after_ms,
        )
        if not used_first:
            issued = await answered_before(transaction, node_id=node_id, request=self.request, now_ms=moment.now_ms)
            if issued is None:
                raise refuse(Reason.ATTESTATION, "the discovery assertion was used before: boot the machine again")
            return issued
        held = await nodes.get(transaction, node_id=node_id)
        if held is not None and held.attestor != NAME:
            raise refuse(Reason.CONFLICT, f"node {node_id} has joined by {held.attestor}: forget it first")
        return Grant(
            node_id=node_id,
            site=found.site_agent.site,
            role=ROLE_RAMDISK,
            tenant_controlled=False,
            allowed_kinds=None,
            granted_by=f"node/{found.site_agent.node_id}",
        )

    def _check_machine(self, found: Discovered) -> None:
        if not hmac.compare_digest(hashlib.sha256(self.sealed.secret).digest(), found.nonce_sha256):
            raise refuse(Reason.BAD_PROOF, "the secret is not that of the script which the assertion is about")
        addresses = [str(address).lower() for address in self.hardware.get("mac_addresses", ())]
        if found.mac_address not in addresses:
            raise refuse(
                Reason.ATTESTATION, f"the assertion is about machine {found.mac_address}, which this one is not"
            )
        uuid = str(self.hardware.get("dmi_uuid", "")).lower()
        if found.uuid and uuid and found.uuid != uuid:
            raise refuse(
                Reason.ATTESTATION,
                f"the assertion is about the machine with UUID {found.uuid[:64]!a}, not {uuid[:64]!a}",
            )


@dataclass(frozen=True, slots=True)
class DiscoveryAttestor:
    """Opens sealed secrets and answers to challenges; assertions are verified by the database's time."""

    challenges: Challenges
    issuer: Issuer

    def examine(self, request: messages.JoinRequest, csr: Request, *, role: str) -> DiscoveryClaim:
        """Open what is sealed, and note which machine it claims to be."""
        if role != ROLE_RAMDISK:
            raise refuse(
                Reason.ROLE_MISMATCH, f"a machine that was discovered joins as {ROLE_RAMDISK}, and it asks for {role}"
            )
        if request.node_id:
            raise refuse(
                Reason.NODE_MISMATCH, f"a machine that was discovered is named by JoinService, not {request.node_id}"
            )
        return DiscoveryClaim(
            sealed=self.challenges.examine(request, csr, role=role),
            evidence=request.evidence,
            request=csr,
            hardware=machine.claims_of(request),
            challenges=self.challenges,
            issuer=self.issuer,
        )


async def _check_agent(transaction: Transaction, found: Discovered, *, now_ms: int) -> None:
    """Refuse a site agent that is not good now: quarantined, revoked, replaced, of an older identity."""
    agent_id = found.site_agent.node_id
    agent = await nodes.get(transaction, node_id=agent_id)
    certificate = await stored_certificates.find(transaction, serial=found.shown.serial)
    if agent is not None and certificate is None:
        # As after a restore. The assertion is minutes old, and proves that the agent has the key.
        certificate = (await presented.look_up(transaction, found.shown)).certificate
    if agent is None or certificate is None or certificate.node_id != agent_id:
        raise refuse(Reason.ATTESTATION, f"site agent {agent_id}, which signed the assertion, is not known here")
    if agent.quarantined_at_ms is not None:
        raise refuse(Reason.ATTESTATION, f"site agent {agent_id}, which signed the assertion, is quarantined")
    check_still_good(certificate, identity_generation=agent.identity_generation, now_ms=now_ms)


def discovered_node_id(*, site: str, mac_address: str) -> str:
    """Return the id of a discovered machine: the same at each boot, and of one site's agents no other's."""
    digest = hashlib.sha256(part(site.encode()) + part(mac_address.encode())).digest()
    return f"m-{base64.b32encode(digest[:_ID_BYTES]).decode().lower()}"
