"""Every bound of the transport in one place, each with its reason (decisions 0115).

Sizes are bytes, times milliseconds. `Limits` holds what an operator or a test may narrow; the constants are part of
how the wire works and are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bettercompute.protocol.limits import KIB, MAX_FRAME_BYTES, MAX_QUEUED_BYTES, MAX_QUEUED_FRAMES, MIB

# HTTP/2 DATA frame: the protocol's own default. Larger ones only delay the small messages of the other streams.
FRAME_BYTES_MAX = 16 * KIB

# A header block as HPACK sends it, over all CONTINUATION frames. Its decoded form is bounded to
# `header_list_bytes_max`, and no honest encoder makes a block longer than the list.
HEADER_BLOCK_BYTES_MAX = 32 * KIB

# What a GOAWAY says in words: a sentence.
GOAWAY_TEXT_BYTES_MAX = 256

# What one stream may send ahead of the application: enough to keep a tunnel at 2.6 MB/s over 50 ms.
STREAM_WINDOW_BYTES = 128 * KIB

# Closed streams that a connection remembers, so that late frames for them are told from nonsense. h2 would keep 65,536
# (6 MB).
CLOSED_STREAMS_REMEMBERED_MAX = 1024

# One read from TLS, shared by all connections of a loop; also what stdlib asyncio may hold per connection (it takes 256
# KiB).
READ_BUFFER_BYTES = 64 * KIB
STDLIB_TLS_BUFFER_BYTES = 16 * KIB

# One write to TLS: a single huge one reports an empty buffer while it is still being encrypted, and defeats
# back-pressure.
WRITE_BYTES_MAX = 64 * KIB

# What the kernel may buffer each way for one accepted connection (Linux doubles it). Left to itself it grows to 4 MiB,
# which 5,000 clients that never read would turn into 20 GiB; this much still carries 5 MB/s over 50 ms.
SOCKET_BUFFER_BYTES = 128 * KIB

# The answer of a proxy to CONNECT, headers and all.
PROXY_REPLY_BYTES_MAX = 8 * KIB

# A ClientHello comes in one TLS record, whose size this is at most, header and all.
TLS_RECORD_HEADER_BYTES = 5
TLS_RECORD_BYTES_MAX = 16 * KIB + 256


@dataclass(frozen=True, slots=True)
class Limits:
    """What one end of the transport allows; the defaults are what a gateway runs with."""

    # One call each for Session and Join, the rest for tunnels (16 at once), and room for slow
    # endings.
    streams_max: int = 32
    # Names and values are short here; certificates travel in TLS.
    header_list_bytes_max: int = 16 * KIB
    # One gRPC message, read or sent; refused on its 5-byte prefix, before any of it is held. Paths may have a lower
    # one.
    message_bytes_max: int = MAX_FRAME_BYTES
    message_bytes_max_by_path: Mapping[str, int] = field(default_factory=dict)
    # What waits for a slow reader on one call; above either the call ends RESOURCE_EXHAUSTED `slow-consumer`.
    outbound_bytes_max: int = MAX_QUEUED_BYTES
    outbound_messages_max: int = MAX_QUEUED_FRAMES
    # What one connection may make us hold: messages unread or incomplete, over all its streams. Three full frames.
    held_bytes_max: int = 16 * MIB
    # The same over all connections that showed no certificate: a stranger must not fill the memory.
    anonymous_held_bytes_max: int = 64 * MIB
    # The abuse bucket of a connection: a burst, then a steady rate, then GOAWAY ENHANCE_YOUR_CALM.
    abuse_burst: int = 200
    abuse_per_s: int = 20
    # The burst of a connection without a certificate, which has one Join to make and nothing to reset: strangers that
    # dial again and again to spend it cost a quarter, and a handshake.
    anonymous_abuse_burst: int = 50
    # A reset this soon after opening, before any response, is billed.
    early_reset_ms: int = 1_000

    # PING from both sides, drawn evenly from interval x (1 +- jitter), so that 5,000 timers do not fire together.
    ping_interval_ms: int = 20_000
    ping_jitter: float = 0.2
    # PINGs in a row without an answer before the connection is given up: a minute, as three missed heartbeats are for a
    # session.
    pings_unanswered_max: int = 3
    # A connection without any call: longer than the 30 s that a daemon keeps one after a refusal with a pushback.
    idle_ms: int = 60_000
    # From TCP to the ClientHello, and from there to the end of the handshake.
    handshake_ms: int = 10_000
    # From TLS to the first request.
    first_call_ms: int = 10_000
    # A closed connection's last bytes; then it is cut.
    close_ms: int = 1_000
    # How long a refused handshake's alert may take to reach a peer that is still sending.
    alert_linger_ms: int = 1_000
    # The same for the GOAWAY of a connection that is cut for abuse, from which nothing is read any more.
    abuse_linger_ms: int = 100

    # Handshakes whose ClientHello has arrived. More only share the same core, and all finish later.
    handshakes_max: int = 64
    # Connections that have said nothing yet, or wait for one of the above; the oldest silent one is dropped first.
    waiting_max: int = 4_096
    # Above max_streams (7,500 at most), with room for joins and for connections that are ending.
    connections_max: int = 12_000
    # Connections without a client certificate: joins are paced at 200/s and last well under 10 s.
    anonymous_connections_max: int = 2_048
    # How long calls may go on after the server was told to close.
    drain_ms: int = 10_000

    def __post_init__(self) -> None:
        """Check what the parts rely on."""
        assert self.streams_max * STREAM_WINDOW_BYTES <= self.held_bytes_max, (
            "small messages alone must never be refused"
        )
        assert self.message_bytes_max + 5 <= self.held_bytes_max, "one whole message must fit"

    @property
    def connection_window_bytes(self) -> int:
        """Return the window of a connection: twice its streams' sum, so that slow streams never block the others."""
        return 2 * self.streams_max * STREAM_WINDOW_BYTES


DEFAULT_LIMITS = Limits()
