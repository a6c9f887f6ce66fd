"""The steps of a rotation, each in one transaction with what it asks of the fleet, its audit entry and the new bundle.

What a step may do is decided by `pki.rotation`; here its facts are read and its outcome is stored. A step that is asked
again after a crash, or because its answer was lost, finds itself done and answers the same. See docs/rotation.md,
"The life of a key"; decisions 0130.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_der_public_key

from bettercompute.errors import Refused
from bettercompute.pki import certificates, rotation
from bettercompute.pki.identity import UNREADABLE
from bettercompute.pki.rotation import NOBODY, Behind, Dependents, KeyStage, Purpose, Step, TrustedKey, in_stage
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.services.installation import Installation, publish
from bettercompute.services.keys import ServiceKeys, of_certificate, of_pair
from bettercompute.store import audit
from bettercompute.store import trust as stored_trust
from bettercompute.store.audit import NewEntry
from bettercompute.store.database import Database, Transaction
from bettercompute.store.sessions import server_time_ms
from bettercompute.store.signing import Signing
from bettercompute.world import World

RETURN_GRACE_MS = 72 * 60 * 60 * 1000  # so long after its certificate's end a node may still come back by it


class _Excepted(TypedDict):
    excepted: Sequence[str]
    of_excepted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotated:
    """How the keys of a purpose stand after a step."""

    version: int
    """Of the trust bundle in force."""
    keys: tuple[TrustedKey, ...]
    left_behind: tuple[str, ...] = ()
    """Excepted nodes that the step would have waited for."""


class RotationService:
    """Prepares, switches and retires keys, and publishes what follows. Satisfies the api's port `TrustKeeper`."""

    def __init__(
        self,
        database: Database,
        *,
        keys: Callable[[], ServiceKeys],
        installation: Installation,
        signing: Signing | None,
        world: World,
    ) -> None:
        """`keys` reads the key folder anew: a rotation puts files there while the process runs."""
        self._database = database
        self._keys = keys
        self._installation = installation
        self._signing = signing
        self._world = world

    async def prepare(
        self, *, purpose: Purpose, public_der: bytes, companion_der: bytes = b"", asked_by: str
    ) -> Rotated:
        """Have a new key trusted beside the one in use."""
        new = _checked(purpose, public_der, companion_der, now_ms=self._world.clock.now_ms())

        async def after(_: Transaction, keys: Sequence[TrustedKey]) -> tuple[TrustedKey, ...]:
            return rotation.prepare(keys, new)

        return await self._step(Step.PREPARE, purpose, after, asked_by=asked_by)

    async def switch(
        self, *, purpose: Purpose, key_sha256: str, asked_by: str, excepted: Sequence[str] = ()
    ) -> Rotated:
        """Put the prepared key in use; refuse CONFLICT while nodes do not know it, and name them.

        For `excepted` nodes it does not wait; those that do not know the key are told and audited.
        """
        self._require_held(purpose, key_sha256)

        async def after(transaction: Transaction, keys: Sequence[TrustedKey]) -> tuple[TrustedKey, ...]:
            dependents = await _before_switch(transaction, keys, purpose, excepted)
            return rotation.switch(keys, purpose, key_sha256=key_sha256, dependents=dependents)

        return await self._step(Step.SWITCH, purpose, after, asked_by=asked_by, excepted=excepted)

    async def retire(self, *, purpose: Purpose, asked_by: str, excepted: Sequence[str] = ()) -> Rotated:
        """Have the replaced key trusted no more; refuse CONFLICT while something depends on it."""

        async def after(transaction: Transaction, keys: Sequence[TrustedKey]) -> tuple[TrustedKey, ...]:
            dependents = await _before_retiring(transaction, keys, purpose, excepted)
            return rotation.retire(keys, purpose, dependents=dependents)

        return await self._step(Step.RETIRE, purpose, after, asked_by=asked_by, excepted=excepted)

    async def publish(self, transaction: Transaction) -> int:
        """Publish what the database now says, in the transaction that changed it; return the version in force.

        The caller holds `store.trust.lock` since before it read what it changed.
        """
        bundle = await publish(
            transaction, keys=self._keys(), installation=self._installation, now_ms=self._world.clock.now_ms()
        )
        return bundle.version

    async def _step(
        self,
        step: Step,
        purpose: Purpose,
        after: Callable[[Transaction, Sequence[TrustedKey]], Awaitable[tuple[TrustedKey, ...]]],
        *,
        asked_by: str,
        excepted: Sequence[str] = (),
    ) -> Rotated:
        async def work(transaction: Transaction) -> Rotated:
            await stored_trust.lock(transaction)
            before = await stored_trust.keys(transaction)
            left = await _left_behind(transaction, before, step, purpose, excepted)
            moved = await after(transaction, before)
            changed = await stored_trust.store_keys(transaction, before=before, after=moved, changed_by=asked_by)
            version = await self.publish(transaction)
            if changed:
                await self._record(transaction, step, purpose, version=version, asked_by=asked_by, left_behind=left)
            return Rotated(
                version=version, keys=await stored_trust.keys(transaction), left_behind=left if changed else ()
            )

        return await self._database.retrying(work)

    async def _record(
        self,
        transaction: Transaction,
        step: Step,
        purpose: Purpose,
        *,
        version: int,
        asked_by: str,
        left_behind: Sequence[str],
    ) -> None:
        entry = NewEntry(
            id=self._world.ids.uuid7(),
            actor=asked_by,
            action=f"pki.{step}",
            target=f"pki/{purpose}",
            outcome="done",
            details={"trustVersion": version} | ({"leftBehind": list(left_behind)} if left_behind else {}),
        )
        await audit.record(transaction, entry)

    def _require_held(self, purpose: Purpose, key_sha256: str) -> None:
        """Refuse to depend on a key whose private half this process could not use."""
        if purpose is Purpose.COMMAND_ROOT:
            if self._signing is not None:
                self._signing.held(key_sha256)
            return
        held = self._keys()
        known = {
            Purpose.NODE_CA: [certificates.spki_sha256(ca.certificate) for ca in held.node_cas],
            Purpose.JOIN_SIGNING: [certificates.spki_sha256(key.public_key()) for key in held.join_signing_keys],
            Purpose.SERVING_CA: [certificates.spki_sha256(ca) for ca in held.serving_cas],
        }
        if key_sha256 not in known[purpose]:
            raise refuse(
                Reason.CONFLICT,
                f"the api's key folder does not hold the {purpose} {key_sha256[:16]}: copy the files {purpose}-next.* "
                "there first",
            )


async def _before_switch(
    transaction: Transaction, keys: Sequence[TrustedKey], purpose: Purpose, excepted: Sequence[str]
) -> Dependents:
    prepared = in_stage(keys, purpose, KeyStage.NEXT)
    if not prepared:
        return Dependents()
    gateways = NOBODY
    if purpose is Purpose.NODE_CA:
        gateways = await stored_trust.gateways_without_node_ca(transaction, key=prepared[0].key_sha256)
    return Dependents(behind=await _nodes(transaction, keys, Step.SWITCH, purpose, excepted), gateways=gateways)


async def _before_retiring(
    transaction: Transaction, keys: Sequence[TrustedKey], purpose: Purpose, excepted: Sequence[str]
) -> Dependents:
    now_ms = await server_time_ms(transaction)
    replaced = in_stage(keys, purpose, KeyStage.PREVIOUS)
    if not replaced:
        return Dependents(now_ms=now_ms)
    known = [key.key_sha256 for key in replaced]
    if purpose is Purpose.COMMAND_ROOT:
        open_commands, specs = await stored_trust.signed_under(transaction, keys=known)
        return Dependents(open_commands=open_commands, specs=specs, now_ms=now_ms)
    gateways = tokens = NOBODY
    if purpose is Purpose.SERVING_CA:
        gateways = await stored_trust.gateways_serving_under(transaction, keys=known)
    if purpose is not Purpose.NODE_CA:
        # A token pins every serving CA that is trusted when it is made, and of the join keys the one in use.
        version = _current_version(keys, purpose) if purpose is Purpose.SERVING_CA else 0
        tokens = await stored_trust.tokens_before(transaction, version=version, moment_ms=_switched_at_ms(replaced))
    behind = await _nodes(transaction, keys, Step.RETIRE, purpose, excepted)
    return Dependents(behind=behind, gateways=gateways, tokens=tokens, now_ms=now_ms)


async def _left_behind(
    transaction: Transaction, keys: Sequence[TrustedKey], step: Step, purpose: Purpose, excepted: Sequence[str]
) -> tuple[str, ...]:
    if not excepted:
        return ()
    return (await _nodes(transaction, keys, step, purpose, excepted, of_excepted=True)).names


async def _nodes(
    transaction: Transaction,
    keys: Sequence[TrustedKey],
    step: Step,
    purpose: Purpose,
    excepted: Sequence[str],
    *,
    of_excepted: bool = False,
) -> Behind:
    """Return the nodes that a step waits for, or which of the excepted ones it would have waited for."""
    asked: _Excepted = {"excepted": excepted, "of_excepted": of_excepted}
    if step is Step.SWITCH:
        prepared = in_stage(keys, purpose, KeyStage.NEXT)
        if not prepared:
            return NOBODY
        version = prepared[0].first_version
        if not rotation.waits_for_absent(purpose):
            return await stored_trust.connected_behind(transaction, version=version, **asked)
        return await stored_trust.returning_behind(transaction, version=version, grace_ms=RETURN_GRACE_MS, **asked)
    replaced = in_stage(keys, purpose, KeyStage.PREVIOUS)
    if not replaced or purpose is Purpose.COMMAND_ROOT:
        return NOBODY
    if purpose is Purpose.NODE_CA:
        return await stored_trust.issued_before(
            transaction, moment_ms=_switched_at_ms(replaced), grace_ms=RETURN_GRACE_MS, **asked
        )
    version = _current_version(keys, purpose)
    return await stored_trust.returning_behind(transaction, version=version, grace_ms=RETURN_GRACE_MS, **asked)


def _current_version(keys: Sequence[TrustedKey], purpose: Purpose) -> int:
    return max(key.first_version for key in in_stage(keys, purpose, KeyStage.CURRENT))


def _switched_at_ms(replaced: Sequence[TrustedKey]) -> int:
    return max(key.changed_at_ms for key in replaced)


def _checked(purpose: Purpose, public_der: bytes, companion_der: bytes, *, now_ms: int) -> TrustedKey:
    """Return a new key as it will be kept; refuse BAD_REQUEST what is none, or one of another kind."""
    if purpose is Purpose.JOIN_SIGNING:
        return of_pair(_join_key(public_der), _join_key(companion_der))
    try:
        certificate = certificates.load_certificate(public_der)
        constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    except (Refused, *UNREADABLE) as error:
        raise refuse(Reason.BAD_REQUEST, f"the new {purpose} is no CA certificate in DER") from error
    if not constraints.ca or not certificates.is_p256(certificate.public_key()):
        raise refuse(Reason.BAD_REQUEST, f"the new {purpose} is not a CA on P-256")
    if not certificates.not_before_ms(certificate) <= now_ms < certificates.not_after_ms(certificate):
        raise refuse(Reason.BAD_REQUEST, f"the new {purpose} is not valid now: make it anew")
    return of_certificate(purpose, certificate)


def _join_key(spki_der: bytes) -> ec.EllipticCurvePublicKey:
    try:
        key = load_der_public_key(spki_der)
    except UNREADABLE as error:
        raise refuse(Reason.BAD_REQUEST, "a new join key is no SubjectPublicKeyInfo in DER") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not certificates.is_p256(key):
        raise refuse(Reason.BAD_REQUEST, "a new join key is not on P-256")
    return key
