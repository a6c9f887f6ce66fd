"""JoinService: which machine becomes which node, decided in one transaction.

It stands behind the gateway, which relays without being able to read the token or to alter the answer. The evidence is
examined first; then one transaction uses it up by one atomic statement and records the node, its session row with epoch
0, its certificate, the published event and the audit entry. Whatever refuses on the way undoes all of it. See
docs/security.md, "Joining"; decisions 0111.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

from cryptography.hazmat.primitives.asymmetric import ec

from bettercompute.errors import Unavailable
from bettercompute.pki import join_token
from bettercompute.pki.identity import check_node_id, role_of
from bettercompute.protocol import messages
from bettercompute.protocol.limits import MAX_NAME_CHARS
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.services import renew
from bettercompute.services.attestors import discovery, machine, provisioned, x509pop
from bettercompute.services.attestors.challenges import Challenges
from bettercompute.services.attestors.discovery import DiscoveryAttestor
from bettercompute.services.attestors.join_token import JoinTokenAttestor
from bettercompute.services.attestors.later import LATER, LaterAttestor
from bettercompute.services.attestors.port import Attestor, Deferral, Grant, Moment
from bettercompute.services.attestors.provisioned import ProvisionedAttestor
from bettercompute.services.attestors.x509pop import X509PopAttestor
from bettercompute.services.installation import Installation, required_trust
from bettercompute.services.issuing import IssuedIdentity, Issuer, Request, check_request
from bettercompute.services.keys import KeySource
from bettercompute.store import audit
from bettercompute.store import trust as stored_trust
from bettercompute.store.audit import NewEntry
from bettercompute.store.database import Database, Transaction
from bettercompute.store.nodes import JoinedNode
from bettercompute.store.sessions import server_time_ms
from bettercompute.world import World

DRAWN_ID_BYTES = 10  # 80 bits: among a million nodes no two meet


class JoinService:
    """Joins and renews nodes. Satisfies the gateway's port `GatewayServices`."""

    def __init__(self, database: Database, *, keys: KeySource, installation: Installation, world: World) -> None:
        self._database = database
        self._keys = keys
        self._world = world
        self._issuer = Issuer(keys, installation, world)
        built: dict[str, Attestor] = {
            join_token.JOIN_TOKEN: JoinTokenAttestor(keys, world.clock),
            x509pop.NAME: X509PopAttestor(self._issuer),
            provisioned.NAME: ProvisionedAttestor(Challenges(provisioned.NAME, keys, world)),
            discovery.NAME: DiscoveryAttestor(Challenges(discovery.NAME, keys, world), self._issuer),
        }
        self._known = ", ".join(built)
        self._attestors: Mapping[str, Attestor] = {
            **built,
            **{name: LaterAttestor(name, instead=self._known) for name in LATER},
        }

    async def join(self, request: messages.JoinRequest, *, source: str) -> messages.JoinResponse:
        """Give a node its identity, or refuse and say why. `source` is from where it called."""
        attestor = self._attestor(request.attestor)
        role = role_of(request.role)
        if role is None:
            raise refuse(Reason.BAD_REQUEST, f"role {request.role} is not known here: ask for node, site or ramdisk")
        if request.node_id:
            check_node_id(request.node_id)
        hardware = machine.claims_of(request)
        csr = check_request(request.csr)
        claim = attestor.examine(request, csr, role=role)
        sealed_to = claim.sealed_to

        async def work(transaction: Transaction) -> bytes:
            await self._keys.refresh(transaction)
            self._require_pinned(sealed_to)
            now_ms = await server_time_ms(transaction)
            trust = await required_trust(transaction)
            moment = Moment(now_ms=now_ms, drawn_node_id=self._draw_node_id(), source=source)
            decided = await claim.redeem(transaction, moment)
            if isinstance(decided, Deferral):
                return _deferral_body(decided, csr, now_ms=now_ms)
            if isinstance(decided, Grant):
                decided = await self._admit(
                    transaction, decided, csr, moment=moment, attestor=request.attestor, hardware=hardware
                )
            signed_trust = self._issuer.trust_for(trust.signed_bundle, sealed_to=sealed_to)
            return self._issuer.response_body(decided, csr, signed_trust=signed_trust, now_ms=now_ms)

        body = await self._database.retrying(work)
        return messages.JoinResponse(body=body, signature=self._issuer.sign(body, sealed_to=sealed_to))

    async def renew(self, request: messages.RenewRequest, *, peer_chain: Sequence[bytes]) -> messages.RenewResponse:
        """Give a node its next certificate, or refuse and say why. `peer_chain` is what TLS verified, or empty."""
        csr = check_request(request.csr)

        async def work(transaction: Transaction) -> bytes:
            await self._keys.refresh(transaction)
            now_ms = await server_time_ms(transaction)
            proven = renew.check_renewal(request, csr, peer_chain=peer_chain, issuer=self._issuer, now_ms=now_ms)
            issued = await renew.renew(transaction, proven, issuer=self._issuer, now_ms=now_ms)
            trust = await required_trust(transaction)
            return self._issuer.response_body(issued, csr, signed_trust=trust.signed_bundle, now_ms=now_ms)

        body = await self._database.retrying(work)
        return messages.RenewResponse(body=body, signature=self._issuer.sign(body))

    async def trust_bundle(self) -> tuple[int, bytes] | None:
        """Return version and bytes of the bundle published last."""
        bundle = await stored_trust.current(self._database)
        return None if bundle is None else (bundle.version, bundle.signed_bundle)

    def _require_pinned(self, sealed_to: ec.EllipticCurvePublicKey | None) -> None:
        """Refuse a token whose holder could not verify any answer of ours any more."""
        pinned = [key.public_key() for key in self._keys.held().join_encryption_keys]
        if sealed_to is not None and sealed_to not in pinned:
            raise refuse(Reason.TOKEN_REVOKED, "the join keys that this token pins were retired: make another token")

    def _attestor(self, name: str) -> Attestor:
        attestor = self._attestors.get(name)
        if attestor is not None:
            return attestor
        raise refuse(
            Reason.ATTESTOR_UNKNOWN, f"attestor {name[:MAX_NAME_CHARS]!a} is not known here: join by {self._known}"
        )

    async def _admit(
        self,
        transaction: Transaction,
        grant: Grant,
        csr: Request,
        *,
        moment: Moment,
        attestor: str,
        hardware: Mapping[str, object],
    ) -> IssuedIdentity:
        node = JoinedNode(
            node_id=grant.node_id,
            site=grant.site,
            role=grant.role,
            tenant_controlled=grant.tenant_controlled,
            attestor=attestor,
            hardware_claims=hardware,
        )
        issued = await self._issuer.admit(
            transaction, node, csr, now_ms=moment.now_ms, source=moment.source, allowed_kinds=grant.allowed_kinds
        )
        if grant.node_id == moment.drawn_node_id and issued.identity_generation > 1:
            raise Unavailable(f"the drawn node id {grant.node_id} was taken just now: try again")
        await self._record(transaction, grant, issued, attestor=attestor, source=moment.source)
        return issued

    async def _record(
        self, transaction: Transaction, grant: Grant, issued: IssuedIdentity, *, attestor: str, source: str
    ) -> None:
        details = {
            "attestor": attestor,
            "role": grant.role,
            "site": grant.site,
            "serial": issued.serial,
            "identityGeneration": issued.identity_generation,
            "source": source,
        }
        entry = NewEntry(
            id=self._world.ids.uuid7(),
            actor=grant.granted_by,
            action="node.join",
            target=f"node/{grant.node_id}",
            outcome="done",
            details=details,
        )
        await audit.record(transaction, entry)

    def _draw_node_id(self) -> str:
        drawn = base64.b32encode(self._world.ids.random_bytes(DRAWN_ID_BYTES)).decode().lower()
        return f"n-{drawn}"


def _deferral_body(deferral: Deferral, csr: Request, *, now_ms: int) -> bytes:
    """Return the serialized JoinResponseBody that says: not yet."""
    body = messages.JoinResponseBody(
        deferral=messages.JoinDeferral(
            retry_after_seconds=deferral.retry_after_s,
            challenge=deferral.challenge,
            reason=deferral.reason,
            message=deferral.message,
        ),
        server_time_ms=now_ms,
        csr_sha256=csr.sha256,
    )
    return body.SerializeToString(deterministic=True)
