"""What happens on an HTTP/2 connection, as the core tells the shell: frozen values, in the order they happened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bettercompute.transport.calls import EndKind


@dataclass(frozen=True, slots=True)
class CallOpened:
    """A request has come; server only."""

    stream_id: int
    path: str
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """A whole message; the peer gets its room back by `consumed`."""

    stream_id: int
    message: bytes


@dataclass(frozen=True, slots=True)
class PeerEnded:
    """The peer has ended its half: the request at the server (no status), the whole call at the client."""

    stream_id: int
    status: int | None = None
    message: str = ""
    trailers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallLost:
    """The call was cut, by either side."""

    stream_id: int
    kind: EndKind
    text: str


@dataclass(frozen=True, slots=True)
class CallDone:
    """The call has ended as it should: the last of it is on its way; server only."""

    stream_id: int


@dataclass(frozen=True, slots=True)
class SettingsReceived:
    """The peer's SETTINGS: the proof for a client that the server took its certificate."""


@dataclass(frozen=True, slots=True)
class PingAnswered:
    """A PING of ours came back."""


@dataclass(frozen=True, slots=True)
class GoingAway:
    """The peer takes no new calls; those open go on."""

    text: str


@dataclass(frozen=True, slots=True)
class ConnectionEnded:
    """Nothing more may be read; what is still to be sent is the GOAWAY, if any.

    Told once, after a `CallLost` for each call.
    """

    kind: EndKind
    text: str


Event = (
    CallOpened
    | MessageReceived
    | PeerEnded
    | CallLost
    | CallDone
    | SettingsReceived
    | PingAnswered
    | GoingAway
    | ConnectionEnded
)
