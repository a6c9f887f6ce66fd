"""JoinService: which machine becomes which node, decided in one transaction.

It stands behind the gateway, which relays without being able to read the token or to alter the answer. The evidence is
examined first; then one transaction uses it up by one atomic statement and records the node, its session row with epoch
0, its certificate, the published event and the audit entry. Whatever refuses on the way undoes all of it. See
docs/security.md, "Joining"; decisions 0111.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

from bettercompute.errors import Unavailable
from bettercompute.pki.identity import check_node_id, role_of
from bettercompute.protocol import messages
from bettercompute.protocol.limits import MAX_NAME_CHARS
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.services import renew
from bettercompute.services.attestors.join_token import JoinTokenAttestor
from bettercompute.services.attestors.port import Attestor, Claim, Grant
from bettercompute.services.installation import Installation, required_trust
from bettercompute.services.issuing import IssuedIdentity, Issuer, Request, answered_before, check_request
from bettercompute.services.keys import ServiceKeys
from bettercompute.store import audit
from bettercompute.store import trust as stored_trust
from bettercompute.store.audit import NewEntry
from bettercompute.store.database import Database, Transaction
from bettercompute.store.nodes import JoinedNode
from bettercompute.store.sessions import server_time_ms
from bettercompute.world import World

JOIN_TOKEN = "join-token"  # noqa: S105 - an attestor's name
# Named by the protocol; each gets a file beside join_token.py when it is built.
LATER_ATTESTORS = frozenset({"x509pop", "provisioned", "discovery", "cloud-iid", "tpm"})
MAC_ADDRESSES_MAX = 256  # a host with a hundred functions on its network cards stays far below
DRAWN_ID_BYTES = 10  # 80 bits: among a million nodes no two meet


class JoinService:
    """Joins and renews nodes. Satisfies the gateway's port `GatewayServices`."""

    def __init__(self, database: Database, *, keys: ServiceKeys, installation: Installation, world: World) -> None:
        self._database = database
        self._world = world
        self._issuer = Issuer(keys, installation, world)
        self._attestors: Mapping[str, Attestor] = {JOIN_TOKEN: JoinTokenAttestor(keys.join_encryption)}

    async def join(self, request: messages.JoinRequest, *, source: str) -> messages.JoinResponse:
        """Give a node its identity, or refuse and say why. `source` is from where it called."""
        attestor = self._attestor(request.attestor)
        role = role_of(request.role)
        if role is None:
            raise refuse(Reason.BAD_REQUEST, f"role {request.role} is not known here: ask for node, site or ramdisk")
        if request.node_id:
            check_node_id(request.node_id)
        hardware = _hardware(request)
        csr = check_request(request.csr)
        claim = attestor.examine(request, csr, role=role, now_ms=self._world.clock.now_ms())

        async def work(transaction: Transaction) -> bytes:
            now_ms = await server_time_ms(transaction)
            trust = await required_trust(transaction)
            issued = await self._admit(
                transaction, claim, csr, attestor=request.attestor, hardware=hardware, source=source, now_ms=now_ms
            )
            return self._issuer.response_body(issued, csr, signed_trust=trust.signed_bundle, now_ms=now_ms)

        body = await self._database.retrying(work)
        return messages.JoinResponse(body=body, signature=self._issuer.sign(body))

    async def renew(self, request: messages.RenewRequest, *, peer_chain: Sequence[bytes]) -> messages.RenewResponse:
        """Give a node its next certificate, or refuse and say why. `peer_chain` is what TLS verified, or empty."""
        csr = check_request(request.csr)

        async def work(transaction: Transaction) -> bytes:
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

    def _attestor(self, name: str) -> Attestor:
        attestor = self._attestors.get(name)
        if attestor is not None:
            return attestor
        known = ", ".join(sorted(self._attestors))
        if name in LATER_ATTESTORS:
            raise refuse(Reason.ATTESTOR_UNKNOWN, f"attestor {name} is not supported by this version: join by {known}")
        raise refuse(Reason.ATTESTOR_UNKNOWN, f"attestor {name[:MAX_NAME_CHARS]!a} is not known here: join by {known}")

    async def _admit(
        self,
        transaction: Transaction,
        claim: Claim,
        csr: Request,
        *,
        attestor: str,
        hardware: Mapping[str, object],
        source: str,
        now_ms: int,
    ) -> IssuedIdentity:
        drawn_node_id = self._draw_node_id()
        grant = await claim.redeem(transaction, drawn_node_id=drawn_node_id, source=source)
        if grant.again:
            issued = await answered_before(transaction, node_id=grant.node_id, request=csr, now_ms=now_ms)
            if issued is None:
                raise refuse(Reason.TOKEN_USED, f"node {grant.node_id}, which used this token, was forgotten")
            return issued
        node = JoinedNode(
            node_id=grant.node_id,
            site=grant.site,
            role=grant.role,
            tenant_controlled=grant.tenant_controlled,
            attestor=attestor,
            hardware_claims=hardware,
        )
        issued = await self._issuer.admit(
            transaction, node, csr, now_ms=now_ms, source=source, allowed_kinds=grant.allowed_kinds
        )
        if grant.node_id == drawn_node_id and issued.identity_generation > 1:
            raise Unavailable(f"the drawn node id {drawn_node_id} was taken just now: try again")
        await self._record(transaction, grant, issued, attestor=attestor, source=source)
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


def _hardware(request: messages.JoinRequest) -> dict[str, object]:
    """Return the claims that were made, as they are stored; refuse INVALID_ARGUMENT what no column should take."""
    claims: dict[str, object] = {"daemon_version": _bounded("daemon_version", request.daemon_version)}
    for field in request.hardware.DESCRIPTOR.fields:
        if field.name != "mac_addresses":
            claims[field.name] = _bounded(field.name, getattr(request.hardware, field.name))
    if len(request.hardware.mac_addresses) > MAC_ADDRESSES_MAX:
        raise refuse(
            Reason.BAD_REQUEST,
            f"the request names {len(request.hardware.mac_addresses)} hardware addresses, "
            f"the limit is {MAC_ADDRESSES_MAX}",
        )
    claims["mac_addresses"] = [_bounded("mac_addresses", address) for address in request.hardware.mac_addresses]
    return {name: value for name, value in claims.items() if value}


def _bounded(name: str, text: str) -> str:
    if len(text) > MAX_NAME_CHARS or "\0" in text:
        raise refuse(
            Reason.BAD_REQUEST,
            f"{name} of the request has {len(text)} characters or a NUL in it, the limit is {MAX_NAME_CHARS}",
        )
    return text
