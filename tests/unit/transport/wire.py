"""A foreign HTTP/2 client without I/O, for what a decent one would never send."""

from __future__ import annotations

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, Event
from hyperframe.frame import Frame

from bettercompute.transport.h2_connection import HoldAllowance
from bettercompute.transport.h2_events import Event as OurEvent
from bettercompute.transport.h2_server import H2Server
from bettercompute.transport.limits import DEFAULT_LIMITS, Limits

GRPC_HEADERS = [
    (":method", "POST"),
    (":scheme", "https"),
    (":path", "/service/Method"),
    (":authority", "gateway.test"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]


class Wire:
    """An `H2Server` and a raw client, joined by hand; `now_ms` is the server's clock."""

    def __init__(self, *, limits: Limits = DEFAULT_LIMITS, allowance: HoldAllowance | None = None) -> None:
        self.now_ms = 1_000
        self.server = H2Server(limits=limits, now_ms=self.now_ms, allowance=allowance)
        self.client = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.client.initiate_connection()
        self.events: list[OurEvent] = []
        self.answers: list[Event] = []
        self.exchange()

    def exchange(self) -> list[OurEvent]:
        """Carry bytes both ways until neither has any, and return the server's events."""
        events: list[OurEvent] = []
        while True:
            up = self.client.data_to_send()
            if up:
                events += self.server.receive(up, now_ms=self.now_ms)
            down = self.server.output(1 << 16)
            events += self.server.take_events()
            if down:
                self.answers += self.client.receive_data(down)
            if not up and not down:
                self.events += events
                return events

    def send_frames(self, *frames: Frame) -> list[OurEvent]:
        """Send frames past the client's own sense of propriety."""
        events = self.server.receive(b"".join(frame.serialize() for frame in frames), now_ms=self.now_ms)
        self.events += events
        return events

    def open_call(self, *, path: str = "/service/Method", end_stream: bool = False) -> int:
        stream_id = self.client.get_next_available_stream_id()
        headers = [(name, path if name == ":path" else value) for name, value in GRPC_HEADERS]
        self.client.send_headers(stream_id, headers, end_stream=end_stream)
        return stream_id

    def goaway(self) -> ConnectionTerminated | None:
        """Return the GOAWAY that the client has got."""
        self.exchange()
        return next((event for event in self.answers if isinstance(event, ConnectionTerminated)), None)

    def calmed(self) -> bool:
        """Whether the server has had enough."""
        goaway = self.goaway()
        return goaway is not None and goaway.error_code == ErrorCodes.ENHANCE_YOUR_CALM
