"""What a gateway is told at its start. Bounds are the rules' own unless a test or an operator narrows them."""

from __future__ import annotations

from dataclasses import dataclass

from bettercompute.pki.identity import DEFAULT_TRUST_DOMAIN
from bettercompute.protocol.capabilities import GATEWAY_CAPABILITIES
from bettercompute.protocol.versions import PROTOCOL_VERSION, ProtocolRange
from bettercompute.session.handover import LOOK_EVERY_MS
from bettercompute.session.opening import PENDING_HELLOS_MAX, RATE_PER_S, STREAMS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """One gateway."""

    name: str = "gateway"
    """The first part of the gateway id; the rest is drawn at each start."""
    host: str = "127.0.0.1"
    port: int = 0
    """0: any free one, told by `Gateway.port`."""
    advertise_url: str = ""
    """Where daemons reach this gateway; empty: `https://<host>:<port>`."""
    internal_url: str = ""
    """Where other gateways reach it."""
    version: str = "0"
    trust_domain: str = DEFAULT_TRUST_DOMAIN
    streams_max: int = STREAMS_MAX
    handshakes_per_s: float = RATE_PER_S
    pending_hellos_max: int = PENDING_HELLOS_MAX
    protocol: ProtocolRange = PROTOCOL_VERSION
    capabilities: tuple[str, ...] = GATEWAY_CAPABILITIES
    """Told in Welcome."""
    duplicate_hellos_max: int = 3
    duplicate_window_ms: int = 600_000
    rebalance_every_ms: int = LOOK_EVERY_MS
    """How often it looks whether it holds more than its share."""
    lease_in_thread: bool = True
    """False only where there are no threads: on virtual time."""
