"""One gRPC call without I/O: messages out of a byte stream, status and metadata as headers, and the call's lifecycle.

docs/protocol.md, "Transport". The lifecycle is one table for both ends; the tests
try every (state, input) pair.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum

from bettercompute.protocol.statuses import Reason, Status, decode_grpc_message, encode_grpc_message, refuse

PREFIX_BYTES = 5
_METADATA_NAME = re.compile("[0-9a-z_.-]+")
_METADATA_VALUE = re.compile("[ -~]*")
CONTENT_TYPE = "application/grpc"
CONTENT_TYPES = (CONTENT_TYPE, "application/grpc+proto")
GRPC_STATUS = "grpc-status"
GRPC_MESSAGE = "grpc-message"

# What is answered to a request that is not gRPC, in words for whoever typed it.
HTTP_REFUSALS: Mapping[int, str] = {
    405: "This is a gateway of better-compute: it speaks gRPC, whose every request is a POST.\n",
    415: "This is a gateway of better-compute: it speaks gRPC, and takes content-type application/grpc or "
    "application/grpc+proto.\n",
}

# What a plain HTTP status means where a proxy answered in the server's place (gRPC's own mapping).
HTTP_STATUS_MEANING: Mapping[int, Status] = {
    400: Status.INTERNAL,
    401: Status.UNAUTHENTICATED,
    403: Status.PERMISSION_DENIED,
    404: Status.UNIMPLEMENTED,
    429: Status.UNAVAILABLE,
    502: Status.UNAVAILABLE,
    503: Status.UNAVAILABLE,
    504: Status.UNAVAILABLE,
}


class MessageReader:
    """Whole messages out of DATA in any pieces.

    A message over the limit or with the compressed flag is refused on its prefix.
    """

    __slots__ = ("_buffer", "_limit", "_needed")

    def __init__(self, *, limit: int) -> None:
        self._buffer = bytearray()
        self._limit = limit
        self._needed = PREFIX_BYTES

    @property
    def pending_bytes(self) -> int:
        """Return the bytes held of a message that is not whole yet, its prefix included."""
        return len(self._buffer)

    @property
    def needed_bytes(self) -> int:
        """Return the size of the message in progress, its prefix included.

        That of a prefix when even that is not known.
        """
        return self._needed

    def feed(self, data: bytes) -> list[bytes]:
        """Take received bytes and return the messages that they complete, in order. Raises `Refused`."""
        buffer = self._buffer
        if (
            not buffer
            and len(data) >= PREFIX_BYTES
            and not data[0]
            and PREFIX_BYTES + int.from_bytes(data[1:5], "big") == len(data)
        ):
            # Nearly always: one DATA frame is one message.
            self._judge_prefix(data, 0)
            return [data[PREFIX_BYTES:]]
        buffer += data
        messages: list[bytes] = []
        offset = 0
        available = len(buffer)
        while available - offset >= self._needed:
            if self._needed == PREFIX_BYTES:
                size = self._judge_prefix(buffer, offset)
                self._needed = PREFIX_BYTES + size
                if size:
                    continue
            messages.append(bytes(memoryview(buffer)[offset + PREFIX_BYTES : offset + self._needed]))
            offset += self._needed
            self._needed = PREFIX_BYTES
        if offset:
            del buffer[:offset]
        return messages

    def _judge_prefix(self, buffer: bytes | bytearray, offset: int) -> int:
        flag = buffer[offset]
        if flag:
            raise refuse(
                Reason.COMPRESSED,
                f"a message with compressed flag {flag}: compression is not supported; send with identity",
            )
        size = int.from_bytes(memoryview(buffer)[offset + 1 : offset + PREFIX_BYTES], "big")
        if size > self._limit:
            raise refuse(
                Reason.FRAME_TOO_LARGE,
                f"a message of {size} bytes; the limit is {self._limit}: send less in one message",
            )
        return size

    def finish(self) -> None:
        """Judge the end of the stream: raises `Refused` INVALID_ARGUMENT when it came inside a message."""
        if self._buffer:
            raise refuse(
                Reason.INVALID_FRAME,
                f"the stream ended inside a message: {len(self._buffer)} of {self._needed} bytes came; send it whole",
            )


def prefix(message: bytes) -> bytes:
    """Return the 5 bytes that go before an uncompressed message."""
    return b"\x00" + len(message).to_bytes(4, "big")


Headers = list[tuple[str, str]]


def request_headers(*, path: str, authority: str, metadata: Mapping[str, str]) -> Headers:
    """Return the headers that open a call."""
    return [
        (":method", "POST"),
        (":scheme", "https"),
        (":path", path),
        (":authority", authority),
        ("content-type", CONTENT_TYPE),
        ("te", "trailers"),
        ("grpc-accept-encoding", "identity"),
        ("user-agent", "better-compute"),
        *_checked(metadata),
    ]


def response_headers() -> Headers:
    """Return the headers before the first message of an answer."""
    return [(":status", "200"), ("content-type", CONTENT_TYPE), ("grpc-accept-encoding", "identity")]


def trailers(*, status: int, message: str, extra: Mapping[str, str]) -> Headers:
    """Return the trailing headers of a call."""
    fields: Headers = [(GRPC_STATUS, str(int(status)))]
    if message:
        fields.append((GRPC_MESSAGE, encode_grpc_message(message)))
    return [*fields, *_checked(extra)]


def _checked(metadata: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    for name, value in metadata.items():
        assert _METADATA_NAME.fullmatch(name), f"metadata name {name!r} is not one"
        assert name not in (GRPC_STATUS, GRPC_MESSAGE), f"{name} is said by status and message"
        assert _METADATA_VALUE.fullmatch(value), f"metadata {name} must be printable ASCII"
        yield name, value


def text_of(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return received headers as text; HTTP/2 fields are octets, so none is refused for what it holds."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def metadata_of(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the fields that are not HTTP's own pseudo-headers; those that came twice are joined with a comma."""
    fields: dict[str, str] = {}
    for name, value in headers:
        if name.startswith(":"):
            continue
        fields[name] = f"{fields[name]},{value}" if name in fields else value
    return fields


def http_refusal(headers: Mapping[str, str]) -> int | None:
    """Return the HTTP status that refuses a request (405, 415), or None for one that is gRPC.

    `grpc-timeout` is ignored.
    """
    if headers.get(":method") != "POST":
        return 405
    content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    return None if content_type in CONTENT_TYPES else 415


def response_status(*, http_status: str, fields: Mapping[str, str]) -> tuple[int, str]:
    """Return status and message of an answer that has ended, whatever answered it."""
    if (text := fields.get(GRPC_STATUS)) is not None:
        if text.isascii() and text.isdigit() and len(text) <= 3:
            return int(text), decode_grpc_message(fields.get(GRPC_MESSAGE, ""))
        return Status.UNKNOWN, f"the answer's grpc-status is {text[:20]!r}, not a number"
    if http_status != "200":
        code = int(http_status) if http_status.isascii() and http_status.isdigit() else 0
        return HTTP_STATUS_MEANING.get(
            code, Status.UNKNOWN
        ), f"the peer answered with HTTP status {http_status}, not with gRPC"
    if not is_grpc(http_status=http_status, fields=fields):
        content_type = fields.get("content-type", "")[:100]
        return Status.UNKNOWN, f"the peer answered with content-type {content_type!r}, not with gRPC"
    return Status.UNKNOWN, "the answer ended without a grpc-status"


def is_grpc(*, http_status: str, fields: Mapping[str, str]) -> bool:
    """Return whether an answer's body is messages, by its first headers; a proxy's page is not."""
    return http_status == "200" and fields.get("content-type", "").lower().startswith(CONTENT_TYPE)


class CallState(Enum):
    """Which halves of a call are open."""

    OPEN = "open"
    PEER_DONE = "peer-done"
    WE_DONE = "we-done"
    CLOSED = "closed"


class CallInput(Enum):
    """What happens to a call, on either end."""

    PEER_ENDS = "peer-ends"
    WE_END = "we-end"
    RESET = "reset"


# A server that ends a call ends it whole (gRPC has no status before the trailers), hence reset follows we-end there; a
# client that ends its half waits for the answer. An input that a state cannot take leaves it as it is: late frames are
# nobody's fault.
LIFECYCLE: Mapping[tuple[CallState, CallInput], CallState] = {
    (CallState.OPEN, CallInput.PEER_ENDS): CallState.PEER_DONE,
    (CallState.OPEN, CallInput.WE_END): CallState.WE_DONE,
    (CallState.OPEN, CallInput.RESET): CallState.CLOSED,
    (CallState.PEER_DONE, CallInput.PEER_ENDS): CallState.PEER_DONE,
    (CallState.PEER_DONE, CallInput.WE_END): CallState.CLOSED,
    (CallState.PEER_DONE, CallInput.RESET): CallState.CLOSED,
    (CallState.WE_DONE, CallInput.PEER_ENDS): CallState.CLOSED,
    (CallState.WE_DONE, CallInput.WE_END): CallState.WE_DONE,
    (CallState.WE_DONE, CallInput.RESET): CallState.CLOSED,
    (CallState.CLOSED, CallInput.PEER_ENDS): CallState.CLOSED,
    (CallState.CLOSED, CallInput.WE_END): CallState.CLOSED,
    (CallState.CLOSED, CallInput.RESET): CallState.CLOSED,
}
