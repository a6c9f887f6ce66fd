"""The identity of a running node: read at each dial, renewed, come back by after expiry, replaced by an operator.

Whatever replaced it, what follows is the same: the session is dialed anew under it, and what runs goes on. See
docs/security.md, "Renewing", "Coming back after expiry"; decisions 0085 and 0146.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

from bettercompute.daemon import machine
from bettercompute.daemon.dial import Dial, DialSettings, GatewayLink
from bettercompute.daemon.driver import Driver
from bettercompute.daemon.identity import Identity, IdentityStore
from bettercompute.daemon.inventory.host import HostRoot
from bettercompute.daemon.rejoin import RejoinParts, rejoin
from bettercompute.daemon.renewal import Renewal, RenewalParts
from bettercompute.daemon.shell import NodeShell
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.session import clock as session_clock
from bettercompute.session.inputs import RelayRefused
from bettercompute.session.refusals import Relayed
from bettercompute.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityParts:
    """What the identity of a running node is kept with."""

    world: World
    identities: IdentityStore
    root: Callable[[], HostRoot]
    boot_id: str
    settings: Callable[[], DialSettings]
    dial: Dial | None


class IdentityLife:
    """One node's identity, from the opening of a round to its end."""

    def __init__(self, identity: Identity, parts: IdentityParts) -> None:
        self.present = identity
        self._parts = parts
        self._rejoined_serial = ""
        """The certificate that a join brought, not a renewal."""
        self._driver: Driver
        self._shell: NodeShell
        self._link: GatewayLink
        self._renewal: Renewal

    async def load(self) -> Identity:
        """Return the identity as it is on disk now; a renewal may have replaced it."""
        identity = await asyncio.to_thread(self._parts.identities.load)
        if identity is None:
            raise refuse(Reason.NOT_JOINED, "the identity is gone from the state folder: join this node anew")
        self.present = identity
        return identity

    async def keep(self, *, driver: Driver, shell: NodeShell, link: GatewayLink) -> None:
        """Keep it good, for ever."""
        self._driver, self._shell, self._link = driver, shell, link
        parts = self._parts
        here = machine.read_machine(parts.root())
        rejoining = RejoinParts(
            world=parts.world,
            identities=parts.identities,
            machine=here,
            hardware=lambda: machine.hardware_claims(parts.root(), boot_id=parts.boot_id),
            settings=parts.settings,
            server_time_ms=self._rejoin_time_ms,
            dial=parts.dial,
        )
        self._renewal = Renewal(
            RenewalParts(
                world=parts.world,
                link=link,
                identities=parts.identities,
                machine=here,
                load_identity=self.load,
                server_time_ms=self._proof_time_ms,
                renewed=self._renewed,
                rejoin=lambda identity: self._rejoin(identity, rejoining),
                needs_rejoin=shell.needs_rejoin,
                refused=lambda reason: driver.give(RelayRefused(Relayed.IDENTITY, reason)),
            )
        )
        shell.on_expired = lambda: self._renewal.expired(link.serial)
        await self._renewal.run()

    def replaced(self, identity: Identity) -> None:
        """Go on under another identity of the same node, which an operator's token brought."""
        self._rejoined_serial = identity.record.certificate_serial
        self._renewal.replaced()
        self._renewed(identity)

    async def _rejoin(self, identity: Identity, parts: RejoinParts) -> Identity:
        rejoined = await rejoin(identity, parts)
        self._rejoined_serial = rejoined.record.certificate_serial
        return rejoined

    def _renewed(self, identity: Identity) -> None:
        self.present, record = identity, identity.record
        rejoined = record.certificate_serial == self._rejoined_serial
        if rejoined:
            # JoinService's time, signed for this very request: it confirms the clock as a first join does.
            self._driver.confirm_time(record.server_time_mark_ms)
        self._driver.record_event(
            "identity.rejoined" if rejoined else "certificate.renewed",
            json.dumps({"serial": record.certificate_serial}),
        )
        self._link.close()
        if rejoined:
            self._shell.redial("rejoined", "this node has joined again: dialing under its new identity")
        else:
            self._shell.redial("renewed", "the certificate was renewed: dialing under the new one")
        self._shell.dial_now()

    def _proof_time_ms(self, refusal_server_time_ms: int | None) -> int:
        return session_clock.proof_time(
            self._driver.state.clock,
            refusal_server_time_ms=refusal_server_time_ms,
            now_ms=self._parts.world.clock.monotonic_ms(),
        )

    def _rejoin_time_ms(self, refusal_server_time_ms: int | None) -> int:
        """Date a proof also before the first session: by the host's clock, where that is ahead of a mark of any age."""
        known_ms = self._proof_time_ms(refusal_server_time_ms)
        if refusal_server_time_ms is not None or self._driver.state.clock.session_ms is not None:
            return known_ms
        return max(known_ms, self._parts.world.clock.now_ms())
