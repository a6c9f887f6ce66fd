"""What a gateway asks of the services behind it.

The gateway relays joins and renewals that it can neither read nor forge, and never imports who answers them: in one
process it is JoinService itself, otherwise a client of it. See docs/protocol.md, "The service".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from bettercompute.protocol import messages


class GatewayServices(Protocol):
    """The services' half. Each method raises `Refused` or `Unavailable`, which the gateway passes on."""

    async def join(self, request: messages.JoinRequest, *, source: str) -> messages.JoinResponse:
        """Give a node its identity. `source` is the address that it called from."""
        ...

    async def renew(self, request: messages.RenewRequest, *, peer_chain: Sequence[bytes]) -> messages.RenewResponse:
        """Give a node its next certificate. `peer_chain` (DER, leaf first) is what TLS verified, or empty."""
        ...

    async def trust_bundle(self) -> tuple[int, bytes] | None:
        """Return version and serialized SignedTrustBundle of the bundle published last; None before the first."""
        ...
