"""What the API's routes are given: the database, the world, and how a node joins this installation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from cryptography.hazmat.primitives.asymmetric import ec
from fastapi import Depends, Request
from prometheus_client import CollectorRegistry

from bettercompute.api.examining import Doctor
from bettercompute.api.finished import FinishedFeed
from bettercompute.pki.rotation import Purpose, TrustedKey
from bettercompute.store import audit
from bettercompute.store.database import Database, Queries, Transaction
from bettercompute.store.signing import Signing
from bettercompute.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinEndpoint:
    """What a join token tells a node besides its secret."""

    gateway_urls: tuple[str, ...]
    serving_ca_pins: tuple[str, ...]
    join_signing_key: ec.EllipticCurvePublicKey
    join_encryption_key: ec.EllipticCurvePublicKey


class Provisioned(Protocol):
    """A joined identity without its key, which stays with whoever asked."""

    @property
    def node_id(self) -> str:
        """Return the node's id."""
        ...

    @property
    def chain_pem(self) -> bytes:
        """Return the certificate and those above it, leaf first."""
        ...

    @property
    def serving_ca_pem(self) -> bytes:
        """Return the CA of the gateways' certificates."""
        ...

    @property
    def signed_trust_bundle(self) -> bytes:
        """Return a serialized SignedTrustBundle."""
        ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """Return the content of identity.json."""
        ...


class Provisioner(Protocol):
    """Joins a node without a token: `services.provision` behind a port, because the API calls no service."""

    async def provision(
        self, *, node_id: str, site: str, role: str, csr_der: bytes, asked_by: str, replace: bool = False
    ) -> Provisioned:
        """Return the identity for a certificate request.

        Raises `Refused` for a bad name, role or request, and for a node that there is unless `replace` is set.
        """
        ...


class Rotated(Protocol):
    """How the keys of a purpose stand after a step."""

    @property
    def version(self) -> int:
        """Return the version of the trust bundle in force."""
        ...

    @property
    def keys(self) -> tuple[TrustedKey, ...]:
        """Return every key that is or was trusted."""
        ...

    @property
    def left_behind(self) -> tuple[str, ...]:
        """Return the excepted nodes that the step would have waited for."""
        ...


class TrustKeeper(Protocol):
    """Rotates keys and publishes trust bundles: `services.rotating` behind a port, for it holds the keys that sign."""

    async def prepare(
        self, *, purpose: Purpose, public_der: bytes, companion_der: bytes = b"", asked_by: str
    ) -> Rotated:
        """Have a new key trusted beside the one in use."""
        ...

    async def switch(
        self, *, purpose: Purpose, key_sha256: str, asked_by: str, excepted: Sequence[str] = ()
    ) -> Rotated:
        """Put the prepared key in use; refuses CONFLICT while nodes, but for the excepted ones, do not know it."""
        ...

    async def retire(self, *, purpose: Purpose, asked_by: str, excepted: Sequence[str] = ()) -> Rotated:
        """Have the replaced key trusted no more; refuses CONFLICT while something depends on it."""
        ...

    async def publish(self, transaction: Transaction) -> int:
        """Publish what the database now says, under `store.trust.lock`; return the version in force."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiContext:
    """One per process."""

    database: Database
    world: World
    finished: FinishedFeed
    registry: CollectorRegistry
    """The metrics of this process."""
    join_endpoint: JoinEndpoint
    provisioner: Provisioner
    trust_domain: str
    site: str
    trust: TrustKeeper
    signing: Signing | None = None
    """Signs what is made here; None: the installation signs nothing."""
    doctor: Doctor | None = None
    """None: nothing can be examined here."""

    async def record(
        self,
        queries: Queries,
        *,
        actor: str,
        action: str,
        target: str,
        why: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> None:
        """Write an act into the audit log, in the act's own transaction."""
        entry = audit.NewEntry(
            id=self.world.ids.uuid7(),
            actor=actor,
            action=action,
            target=target,
            why=why,
            outcome="done",
            details=details or {},
        )
        await audit.record(queries, entry)


def _context(request: Request) -> ApiContext:
    found = request.app.state.context
    assert isinstance(found, ApiContext)
    return found


Context = Annotated[ApiContext, Depends(_context)]
