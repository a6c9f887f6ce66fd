"""Status codes, reason codes and what rides in trailers (docs/protocol.md, "Errors outside frames").

A refusal says three things: a gRPC status that any client understands, a short stable reason (`x-bc-reason`) that says
which rule it was, and for some when to come back (`grpc-retry-pushback-ms`). Which status belongs to which reason is
decided here and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import IntEnum, StrEnum
from types import MappingProxyType

from bettercompute.errors import Refused
from bettercompute.protocol.limits import MAX_BIGINT, MAX_GRPC_MESSAGE_BYTES, MAX_PUSHBACK_MS

# Names of trailers and request metadata.
PUSHBACK_TRAILER = "grpc-retry-pushback-ms"
REASON_TRAILER = "x-bc-reason"
SERVER_TIME_TRAILER = "x-bc-server-time"
ATTEMPT_METADATA = "x-bc-attempt"


class Status(IntEnum):
    """The gRPC status codes."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Reason(StrEnum):
    """Why a call was refused or a stream ended."""

    # The gateway cannot serve now.
    STARTING = "starting"
    NO_LEASE = "no-lease"
    DRAINING = "draining"
    STOPPING = "stopping"
    FENCED = "fenced"
    OVERLOADED = "overloaded"
    DATABASE = "database"
    UNAVAILABLE = "unavailable"
    HEARTBEAT_TIMEOUT = "heartbeat-timeout"
    # The gateway is full.
    STREAMS = "streams"
    HANDSHAKES = "handshakes"
    HELLOS = "hellos"
    RATE_LIMITED = "rate-limited"
    SLOW_CONSUMER = "slow-consumer"
    # Who the caller is.
    NO_CERTIFICATE = "no-certificate"
    BAD_CERTIFICATE = "bad-certificate"
    CERTIFICATE_EXPIRED = "certificate-expired"
    REVOKED = "revoked"
    QUARANTINED = "quarantined"
    SUPERSEDED_CERTIFICATE = "superseded-certificate"
    OLD_GENERATION = "old-generation"
    BAD_PROOF = "bad-proof"
    UNAUTHENTICATED = "unauthenticated"
    # What the caller may do.
    NODE_MISMATCH = "node-mismatch"
    ROLE_MISMATCH = "role-mismatch"
    NOT_JOINED = "not-joined"
    LOCKED = "locked"
    TOKEN_UNKNOWN = "token-unknown"  # noqa: S105 - a reason code, no secret
    TOKEN_USED = "token-used"  # noqa: S105 - as above
    TOKEN_EXPIRED = "token-expired"  # noqa: S105 - as above
    TOKEN_REVOKED = "token-revoked"  # noqa: S105 - as above
    TOKEN_ROLE = "token-role"  # noqa: S105 - as above
    TOKEN_NODE = "token-node"  # noqa: S105 - as above
    ATTESTATION = "attestation"
    ACCESS_DENIED = "access-denied"
    # What the caller sent.
    NOT_HELLO = "not-hello"
    BAD_HELLO = "bad-hello"
    SECOND_HELLO = "second-hello"
    INVALID_FRAME = "invalid-frame"
    FRAME_TOO_LARGE = "frame-too-large"
    EVENT_GAP = "event-gap"
    TOKEN_MALFORMED = "token-malformed"  # noqa: S105 - as above
    BAD_REQUEST = "bad-request"
    BAD_CSR = "bad-csr"
    INVALID_NAME = "invalid-name"
    INVALID_CONFIG = "INVALID_CONFIG"
    ATTESTOR_UNKNOWN = "attestor-unknown"
    COMPRESSED = "compressed"
    UNKNOWN_METHOD = "unknown-method"
    # What it asked for is not there, or not in the state that this needs.
    NOT_FOUND = "not-found"
    CONFLICT = "conflict"
    # The node has a newer session.
    SUPERSEDED = "superseded"
    # Ours.
    BUG = "bug"


_REASONS_BY_STATUS: Mapping[Status, tuple[Reason, ...]] = {
    Status.UNAVAILABLE: (
        Reason.STARTING,
        Reason.NO_LEASE,
        Reason.DRAINING,
        Reason.STOPPING,
        Reason.FENCED,
        Reason.OVERLOADED,
        Reason.DATABASE,
        Reason.UNAVAILABLE,
        Reason.HEARTBEAT_TIMEOUT,
    ),
    Status.RESOURCE_EXHAUSTED: (
        Reason.STREAMS,
        Reason.HANDSHAKES,
        Reason.HELLOS,
        Reason.RATE_LIMITED,
        Reason.SLOW_CONSUMER,
    ),
    Status.UNAUTHENTICATED: (
        Reason.NO_CERTIFICATE,
        Reason.BAD_CERTIFICATE,
        Reason.CERTIFICATE_EXPIRED,
        Reason.REVOKED,
        Reason.QUARANTINED,
        Reason.SUPERSEDED_CERTIFICATE,
        Reason.OLD_GENERATION,
        Reason.BAD_PROOF,
        Reason.UNAUTHENTICATED,
    ),
    Status.PERMISSION_DENIED: (
        Reason.NODE_MISMATCH,
        Reason.ROLE_MISMATCH,
        Reason.NOT_JOINED,
        Reason.LOCKED,
        Reason.TOKEN_UNKNOWN,
        Reason.TOKEN_USED,
        Reason.TOKEN_EXPIRED,
        Reason.TOKEN_REVOKED,
        Reason.TOKEN_ROLE,
        Reason.TOKEN_NODE,
        Reason.ATTESTATION,
        Reason.ACCESS_DENIED,
    ),
    Status.INVALID_ARGUMENT: (
        Reason.NOT_HELLO,
        Reason.BAD_HELLO,
        Reason.SECOND_HELLO,
        Reason.INVALID_FRAME,
        Reason.FRAME_TOO_LARGE,
        Reason.EVENT_GAP,
        Reason.TOKEN_MALFORMED,
        Reason.BAD_REQUEST,
        Reason.BAD_CSR,
        Reason.INVALID_NAME,
        Reason.INVALID_CONFIG,
    ),
    Status.NOT_FOUND: (Reason.NOT_FOUND,),
    Status.FAILED_PRECONDITION: (Reason.CONFLICT,),
    Status.UNIMPLEMENTED: (Reason.ATTESTOR_UNKNOWN, Reason.COMPRESSED, Reason.UNKNOWN_METHOD),
    Status.ABORTED: (Reason.SUPERSEDED,),
    Status.INTERNAL: (Reason.BUG,),
}

STATUS_OF: Mapping[Reason, Status] = MappingProxyType(
    {reason: status for status, reasons in _REASONS_BY_STATUS.items() for reason in reasons}
)

assert set(STATUS_OF) == set(Reason), "every reason has its status"
assert sum(map(len, _REASONS_BY_STATUS.values())) == len(Reason), "and only one"


def refuse(reason: Reason, message: str, *, pushback_ms: int | None = None) -> Refused:
    """Return the refusal for this reason, with the status that belongs to it; the caller raises it."""
    return Refused(message, status=STATUS_OF[reason], reason=reason, pushback_ms=pushback_ms)


def format_pushback(pushback_ms: int) -> str:
    """Return the trailer's value; never more than a daemon would wait, never negative ("do not retry" in gRPC)."""
    return str(max(0, min(pushback_ms, MAX_PUSHBACK_MS)))


def parse_pushback(text: str | None) -> int | None:
    """Return how long to wait before the next dial, at most 15 minutes; None when missing, malformed or negative."""
    number = _parse_decimal(text)
    return None if number is None else min(number, MAX_PUSHBACK_MS)


def parse_attempt(text: str | None) -> int | None:
    """Return how often the handshake bucket has refused this daemon since its last Welcome; None: it does not say."""
    return _parse_decimal(text)


def parse_server_time(text: str | None) -> int | None:
    """Return the server's time in milliseconds that a refusal told; None when missing or malformed."""
    return _parse_decimal(text)


def _parse_decimal(text: str | None) -> int | None:
    """Return what a header's plain ASCII digits say, clipped to a bigint; None for anything else."""
    if text is None or not text.isascii() or not text.isdigit():
        return None
    significant = text.lstrip("0")
    return MAX_BIGINT if len(significant) > len(str(MAX_BIGINT)) else min(int(significant or "0"), MAX_BIGINT)


_PERCENT_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")
_NEEDS_NO_ESCAPE = re.compile(r"[ -$&-~]*")


def encode_grpc_message(message: str) -> str:
    """Return `grpc-message` for a sentence: UTF-8, everything but printable ASCII percent-encoded, cut to its bound.

    The cut falls between characters, so that what is left decodes.
    """
    if _NEEDS_NO_ESCAPE.fullmatch(message):
        return message[:MAX_GRPC_MESSAGE_BYTES]
    pieces: list[str] = []
    room = MAX_GRPC_MESSAGE_BYTES
    for character in message:
        if " " <= character <= "~" and character != "%":
            piece = character
        else:
            piece = "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "replace"))
        room -= len(piece)
        if room < 0:
            break
        pieces.append(piece)
    return "".join(pieces)


def decode_grpc_message(value: str) -> str:
    """Return the sentence in a `grpc-message`. Never fails: what is not well encoded is kept as it came."""
    raw = _PERCENT_ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), value.encode("utf-8", "replace"))
    return raw.decode("utf-8", "replace")
