"""An installation with keys and a published trust bundle, and nodes that ask to join it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from bettercompute.pki import certificates, identity, join_token, signatures, trust
from bettercompute.pki.identity import agent_role
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import join_response_input, renew_pop_input, x509pop_input
from bettercompute.services.installation import Installation, publish_trust
from bettercompute.services.join import JoinService
from bettercompute.services.keys import ServiceKeys, load_service_keys
from bettercompute.services.pki_setup import initialise
from bettercompute.services.provision import ProvisionService
from bettercompute.store import tokens
from bettercompute.store.database import Database
from bettercompute.store.tokens import NewToken
from bettercompute.system import system_world
from bettercompute.world import World

INSTALLATION = Installation(trust_domain="bc.local", gateway_urls=("https://gw:443",))


@dataclass
class Node:
    """A machine: its key, and what it asks."""

    key: ec.EllipticCurvePrivateKey = field(default_factory=certificates.generate_key)
    csr: bytes = b""

    def __post_init__(self) -> None:
        self.csr = self.csr or certificates.make_csr(self.key)

    def join_request(
        self, secret: bytes, keys: ServiceKeys, *, role: str = "node", node_id: str = "", attestor: str = "join-token"
    ) -> messages.JoinRequest:
        sealed = join_token.seal_proof(
            secret, join_encryption_key=keys.join_encryption.public_key(), csr_der=self.csr, role=role, now_ms=0
        )
        hardware = messages.HardwareClaims(machine_id="m1", hostname="host", mac_addresses=["00:00:5e:00:53:01"])
        return messages.JoinRequest(
            sealed_token=sealed,
            csr=self.csr,
            hardware=hardware,
            attestor=attestor,
            daemon_version="0.1.0",
            role=agent_role(role),
            node_id=node_id,
        )

    def renew_request(
        self, answer: messages.JoinResponseBody, *, next_node: Node, client_time_ms: int
    ) -> messages.RenewRequest:
        """Ask for a certificate for `next_node`'s key, proven by this key."""
        signed = renew_pop_input(csr=next_node.csr, node_id=answer.node_id, client_time_ms=client_time_ms)
        return messages.RenewRequest(
            csr=next_node.csr, client_time_ms=client_time_ms, proof=signatures.sign(self.key, signed)
        )

    def rejoin_request(
        self, answer: messages.JoinResponseBody, *, next_node: Node, client_time_ms: int
    ) -> messages.JoinRequest:
        """Ask to join again with `next_node`'s key, by this key's certificate, which may have expired."""
        signed = x509pop_input(csr=next_node.csr, node_id=answer.node_id, client_time_ms=client_time_ms)
        evidence = messages.X509PopEvidence(
            certificate_chain=answer.certificate_chain,
            client_time_ms=client_time_ms,
            proof=signatures.sign(self.key, signed),
        )
        return messages.JoinRequest(
            csr=next_node.csr,
            hardware=messages.HardwareClaims(machine_id="m1"),
            attestor="x509pop",
            evidence=evidence.SerializeToString(),
            daemon_version="0.1.0",
            role=answer.role,
            node_id=answer.node_id,
        )

    def answered(
        self, request: messages.JoinRequest, response: messages.JoinResponse, secret: bytes, keys: ServiceKeys
    ) -> messages.JoinRequest:
        """Return the request with the answer to the challenge of a response."""
        challenge = messages.JoinResponseBody.FromString(response.body).deferral.challenge
        assert challenge
        role = identity.role_of(request.role)
        assert role is not None
        sealed = join_token.seal_proof(
            secret,
            join_encryption_key=keys.join_encryption.public_key(),
            csr_der=request.csr,
            role=role,
            now_ms=0,
            challenge=challenge,
        )
        answering = messages.JoinRequest()
        answering.CopyFrom(request)
        answer = messages.SealedChallengeAnswer(challenge=challenge, sealed_secret=sealed)
        answering.challenge_answer = answer.SerializeToString()
        return answering


@dataclass
class Plane:
    """The services under test."""

    database: Database
    world: World
    keys: ServiceKeys
    folder: KeyFolder
    join: JoinService
    provision: ProvisionService

    async def token(
        self,
        *,
        role: str = "node",
        node_id: str | None = None,
        lifetime_ms: int = 3_600_000,
        site: str = "default",
        attestor: str = "join-token",
        machine: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Record a token and return its secret."""
        secret = self.world.ids.random_bytes(32)
        token = NewToken(
            token_id=self.world.ids.uuid7(),
            secret_sha256=hashlib.sha256(secret).digest(),
            site=site,
            role=role,
            created_by="tests",
            lifetime_ms=lifetime_ms,
            node_id=node_id,
            attestor=attestor,
            machine=machine or {},
        )
        await tokens.create(self.database, token)
        return secret

    def verified(
        self, response: messages.JoinResponse | messages.RenewResponse, node: Node
    ) -> messages.JoinResponseBody:
        """Check an answer as a node does."""
        signing = self.keys.join_signing.public_key()
        signatures.verify(response.signature, signing, join_response_input(response.body))
        body = messages.JoinResponseBody.FromString(response.body)
        assert body.csr_sha256 == hashlib.sha256(node.csr).digest()
        leaf = certificates.load_certificate(body.certificate_chain[0])
        assert leaf.public_key() == node.key.public_key()
        named = identity.identity_of(leaf)
        assert (named.node_id, named.site, named.trust_domain) == (body.node_id, body.site, body.trust_domain)
        held = trust.accept(
            body.trust.SerializeToString(), held=None, trust_domain=body.trust_domain, pinned_keys=[signing]
        )
        assert held is not None
        return body

    async def joined(self, node: Node, *, node_id: str | None = None) -> messages.JoinResponseBody:
        """Join a node by a new token."""
        secret = await self.token(node_id=node_id)
        return self.verified(await self.join.join(node.join_request(secret, self.keys), source="192.0.2.1"), node)


async def make_plane(database: Database, folder: Path) -> Plane:
    world = system_world()
    key_folder = KeyFolder(folder / "pki")
    initialise(key_folder, world=world)
    keys = load_service_keys(key_folder)
    await publish_trust(database, keys=keys, installation=INSTALLATION, world=world)
    return Plane(
        database=database,
        world=world,
        keys=keys,
        folder=key_folder,
        join=JoinService(database, keys=keys, installation=INSTALLATION, world=world),
        provision=ProvisionService(database, keys=keys, installation=INSTALLATION, world=world),
    )
