"""Who nodes of a simulation are: the keys of its control plane, and first identities, as Join would have made them.

Renewing and joining anew go through the production JoinService behind the gateways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import Certificate

from bettercompute.pki import certificates, join_token, trust
from bettercompute.pki.identity import DEFAULT_TRUST_DOMAIN, NodeIdentity
from bettercompute.pki.join_token import JoinToken
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.pki.trust import Trust
from bettercompute.server.keys import worker_signing
from bettercompute.services import pki_setup
from bettercompute.services.installation import Installation, publish_trust
from bettercompute.services.join import JoinService
from bettercompute.services.keys import load_service_keys
from bettercompute.store import tokens
from bettercompute.store.database import Database, Queries
from bettercompute.store.signing import Signing
from bettercompute.store.tokens import NewToken
from bettercompute.testing.sim.postgres import SimulatedServer
from bettercompute.world import World

DAYS_365_MS = 365 * 86_400_000
SITE = "default"


@dataclass(frozen=True, slots=True)
class Joined:
    """A node with its identity."""

    node_id: str
    serial: str
    chain: tuple[bytes, ...]
    """DER, leaf first."""


class Registrar:
    """Holds the keys of the control plane, and issues first identities.

    One key serves every node that has no disk: making thousands would take longer than their herd.
    """

    def __init__(
        self,
        server: SimulatedServer,
        *,
        world: World,
        folder: Path,
        gateways: Sequence[str] = (),
        certificate_life_ms: int = certificates.NODE_LIFETIME_MS,
        signing: bool = False,
    ) -> None:
        self.certificate_life_ms = certificate_life_ms
        self.away = False
        """Whether the services are away: nobody joins or renews."""
        self._server = server
        self._world = world
        self._token_ids: dict[str, str] = {}
        """Of the last token that was made for each node."""
        self._key_folder = KeyFolder(folder / "control-plane")
        pki_setup.initialise(self._key_folder, world=world)
        self._keys = load_service_keys(self._key_folder)
        self._shared_key = certificates.generate_key()
        self._installation = Installation(
            trust_domain=DEFAULT_TRUST_DOMAIN,
            gateway_urls=tuple(f"https://{name}:443" for name in gateways),
            command_signing=signing,
            node_lifetime_ms=certificate_life_ms,
        )

    def now_ms(self) -> int:
        """Return the control plane's time."""
        return self._server.now_ms()

    def signing(self, world: World) -> Signing | None:
        """Return what signs intent in a process; None where nobody does."""
        return worker_signing(self._key_folder, world=world) if self._installation.command_signing else None

    # The services behind gateways

    def services(self, database: Database, *, world: World) -> JoinService:
        """Return the production JoinService of a control plane's process."""
        return JoinService(database, keys=self._keys, installation=self._installation, world=world)

    async def publish(self, database: Database) -> None:
        """Publish the trust bundle, as the first process of an installation does."""
        await publish_trust(database, keys=self._keys, installation=self._installation, world=self._world)

    async def new_token(self, queries: Queries, node_id: str, *, lifetime_ms: int = 86_400_000) -> str:
        """Let an operator make a token for a node that is to join anew; return the printed string."""
        secret = self._world.ids.random_bytes(join_token.SECRET_BYTES)
        token = NewToken(
            token_id=self._world.ids.uuid7(),
            secret_sha256=bytes.fromhex(join_token.secret_sha256(secret)),
            site=SITE,
            role="node",
            created_by="operator",
            lifetime_ms=lifetime_ms,
            node_id=node_id,
        )
        await tokens.create(queries, token)
        self._token_ids[node_id] = token.token_id
        printed = JoinToken(
            secret=secret,
            gateway_urls=self._installation.gateway_urls,
            serving_ca_pins=(self._keys.serving_ca_pin,),
            join_signing_key=self._keys.join_signing.public_key(),
            join_encryption_key=self._keys.join_encryption.public_key(),
        )
        return join_token.format_token(printed)

    def knows_token(self, node_id: str) -> bool:
        """Return whether the last token for a node is on record: it is not, once the database is an earlier one."""
        token_id = self._token_ids.get(node_id)
        return bool(self._server.query("SELECT FROM join_tokens WHERE token_id = $1", token_id))

    def trust(self) -> Trust:
        """Return the trust bundle that is published."""
        [row] = self._server.query("SELECT signed_bundle FROM trust_bundles ORDER BY version DESC LIMIT 1")
        return trust.read_own(row["signed_bundle"])

    # First identities

    def join(
        self,
        node_id: str,
        *,
        generation: int = 1,
        public_key: EllipticCurvePublicKey | None = None,
        life_ms: int = DAYS_365_MS,
    ) -> Joined:
        """Issue an identity and record it; a later generation takes the place of the one before."""
        joined = self._issue(node_id, public_key=public_key, life_ms=life_ms)
        self._record(joined, generation=generation, life_ms=life_ms)
        return joined

    def generation(self, node_id: str) -> int:
        """Return the identity generation on record; 0: there is no such node."""
        rows = self._server.query("SELECT identity_generation FROM nodes WHERE node_id = $1", node_id)
        return int(rows[0]["identity_generation"]) if rows else 0

    def join_many(self, node_ids: Sequence[str]) -> list[Joined]:
        """Issue the first identity of many nodes and record all of them at once."""
        joined = [self._issue(node_id, public_key=None, life_ms=DAYS_365_MS) for node_id in node_ids]
        columns = ([one.node_id for one in joined], [one.serial for one in joined])
        query = self._server.write
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

    def _issue(self, node_id: str, *, public_key: EllipticCurvePublicKey | None, life_ms: int) -> Joined:
        authority = self._keys.node_ca
        leaf = certificates.make_node_leaf(
            authority,
            public_key=public_key or self._shared_key.public_key(),
            identity=NodeIdentity(trust_domain=DEFAULT_TRUST_DOMAIN, site=SITE, node_id=node_id, role="node"),
            serial=self._world.ids.random_bytes(certificates.SERIAL_BYTES),
            now_ms=self.now_ms(),
            lifetime_ms=life_ms,
        )
        chain = (self._der(leaf), self._der(authority.certificate))
        return Joined(node_id, certificates.serial_text(leaf), chain)

    @staticmethod
    def _der(certificate: Certificate) -> bytes:
        return certificate.public_bytes(Encoding.DER)

    def _record(self, joined: Joined, *, generation: int, life_ms: int) -> None:
        query = self._server.write
        if generation == 1:
            query(
                "INSERT INTO nodes (node_id, site, role, attestor) VALUES ($1, 'default', 'node', 'join-token')",
                joined.node_id,
            )
            query("INSERT INTO node_sessions (node_id) VALUES ($1)", joined.node_id)
        else:
            query(
                "UPDATE nodes SET identity_generation = $2, revoked_at = NULL, revoked_by = NULL,"
                " revoked_reason = NULL, standing_changed_at = compute_now() WHERE node_id = $1",
                joined.node_id,
                generation,
            )
        query(
            "INSERT INTO node_certs (serial, node_id, identity_generation, csr_sha256, chain, not_before, not_after)"
            " VALUES ($1, $2, $3, sha256($1::text::bytea), '', compute_now() - interval '1 hour',"
            " compute_now() + $4 * interval '1 millisecond')",
            joined.serial,
            joined.node_id,
            generation,
            life_ms,
        )
