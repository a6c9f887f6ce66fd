"""Certificates and rows of the nodes of a simulation, as Join would have made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import Certificate

from bettercompute.pki import certificates, trust
from bettercompute.pki.identity import DEFAULT_TRUST_DOMAIN, NodeIdentity
from bettercompute.pki.trust import Trust, TrustContent
from bettercompute.testing.sim.postgres import SimulatedServer
from bettercompute.world import World

DAYS_365_MS = 365 * 86_400_000


@dataclass(frozen=True, slots=True)
class Joined:
    """A node with its identity."""

    node_id: str
    serial: str
    chain: tuple[bytes, ...]
    """DER, leaf first."""


class Registrar:
    """Issues identities. One key serves every node: making thousands would take longer than their herd."""

    def __init__(self, server: SimulatedServer, *, world: World) -> None:
        self._server = server
        self._world = world
        now_ms = world.clock.now_ms()
        self.key: EllipticCurvePrivateKey = certificates.generate_key()
        self.authority = certificates.make_node_ca(serial=world.ids.random_bytes(16), now_ms=now_ms)

    def now_ms(self) -> int:
        """Return the control plane's time."""
        return self._server.now_ms()

    def trust(self) -> Trust:
        """Return the trust bundle that a join gives."""
        public = self.key.public_key()
        content = TrustContent(
            trust_domain=DEFAULT_TRUST_DOMAIN,
            command_roots=(),
            join_signing_keys=(public,),
            join_encryption_keys=(public,),
            serving_ca_pins=("ab" * 32,),
        )
        return trust.sign(content, version=1, key=self.key, now_ms=self.now_ms())

    def join(self, node_id: str, *, generation: int = 1, public_key: EllipticCurvePublicKey | None = None) -> Joined:
        """Issue an identity and record it; a later generation takes the place of the one before."""
        joined = self._issue(node_id, public_key=public_key)
        self._record(joined, generation=generation)
        return joined

    def join_many(self, node_ids: Sequence[str]) -> list[Joined]:
        """Issue the first identity of many nodes and record all of them at once."""
        joined = [self._issue(node_id, public_key=None) for node_id in node_ids]
        columns = ([one.node_id for one in joined], [one.serial for one in joined])
        query = self._server.query
        query(
            "INSERT INTO nodes (node_id, site, role, attestor)"
            " SELECT id, 'default', 'node', 'join-token' FROM unnest($1::text[]) AS id",
            columns[0],
        )
        query("INSERT INTO node_sessions (node_id) SELECT unnest($1::text[])", columns[0])
        query(
            "INSERT INTO node_certs (serial, node_id, identity_generation, csr_sha256, chain, not_before, not_after)"
            " SELECT serial, id, 1, sha256(serial::bytea), '', compute_now() - interval '1 hour',"
            " compute_now() + $3 * interval '1 millisecond' FROM unnest($1::text[], $2::text[]) AS u (id, serial)",
            *columns,
            DAYS_365_MS,
        )
        self._server.script("ANALYZE nodes, node_sessions, node_certs")
        return joined

    def _issue(self, node_id: str, *, public_key: EllipticCurvePublicKey | None) -> Joined:
        serial = self._world.ids.random_bytes(16)
        leaf = certificates.make_node_leaf(
            self.authority,
            public_key=public_key or self.key.public_key(),
            identity=NodeIdentity(trust_domain=DEFAULT_TRUST_DOMAIN, site="default", node_id=node_id, role="node"),
            serial=serial,
            now_ms=self.now_ms(),
        )
        chain = (self._der(leaf), self._der(self.authority.certificate))
        return Joined(node_id, certificates.serial_text(leaf), chain)

    @staticmethod
    def _der(certificate: Certificate) -> bytes:
        return certificate.public_bytes(Encoding.DER)

    def _record(self, joined: Joined, *, generation: int) -> None:
        query = self._server.query
        if generation == 1:
            query(
                "INSERT INTO nodes (node_id, site, role, attestor) VALUES ($1, 'default', 'node', 'join-token')",
                joined.node_id,
            )
            query("INSERT INTO node_sessions (node_id) VALUES ($1)", joined.node_id)
        else:
            query("UPDATE nodes SET identity_generation = $2 WHERE node_id = $1", joined.node_id, generation)
        query(
            "INSERT INTO node_certs (serial, node_id, identity_generation, csr_sha256, chain, not_before, not_after)"
            " VALUES ($1, $2, $3, sha256($1::text::bytea), '', compute_now() - interval '1 hour',"
            " compute_now() + $4 * interval '1 millisecond')",
            joined.serial,
            joined.node_id,
            generation,
            DAYS_365_MS,
        )
