"""Bounded encoding and decoding of every message (docs/protocol.md, "Message size bounds").

The size is refused before anything is parsed, and before anything is serialized. Decoding keeps fields, enum values and
oneof cases that it does not know, so a relay that re-encodes a newer peer's message loses nothing.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from google.protobuf.message import DecodeError, EncodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from bettercompute.errors import Refused
from bettercompute.protocol import messages
from bettercompute.protocol.limits import MAX_FRAME_BYTES
from bettercompute.protocol.statuses import STATUS_OF, Reason

M = TypeVar("M", bound=messages.ProtoMessage)


class ProtocolCode(StrEnum):
    """What is wrong with a message."""

    FRAME_TOO_LARGE = "FRAME_TOO_LARGE"
    INVALID_FRAME = "INVALID_FRAME"


_REASON_OF = {
    ProtocolCode.FRAME_TOO_LARGE: Reason.FRAME_TOO_LARGE,
    ProtocolCode.INVALID_FRAME: Reason.INVALID_FRAME,
}


class ProtocolError(Refused):
    """A message that breaks the protocol, whoever made it. Ends the stream INVALID_ARGUMENT."""

    def __init__(self, message: str, *, code: ProtocolCode = ProtocolCode.INVALID_FRAME) -> None:
        reason = _REASON_OF[code]
        super().__init__(message, status=STATUS_OF[reason], reason=reason)
        self.code = code


def encode_message(message: messages.ProtoMessage, *, limit: int = MAX_FRAME_BYTES) -> bytes:
    """Return the message's bytes.

    Raises:
        ProtocolError: FRAME_TOO_LARGE over `limit` bytes; INVALID_FRAME when protobuf cannot serialize it.
    """
    refuse_oversize(message.DESCRIPTOR.name, size_bytes=message.ByteSize(), limit=limit)
    try:
        return message.SerializeToString()
    except (EncodeError, ValueError) as error:
        raise ProtocolError(f"{message.DESCRIPTOR.name} cannot be serialized: {error}") from error


def decode_message(cls: type[M], data: bytes, *, limit: int = MAX_FRAME_BYTES) -> M:
    """Return the message in `data`, with whatever it does not know kept.

    Raises:
        ProtocolError: FRAME_TOO_LARGE over `limit` bytes, unparsed; INVALID_FRAME when the bytes are no such message.
    """
    refuse_oversize(cls.DESCRIPTOR.name, size_bytes=len(data), limit=limit)
    try:
        return cls.FromString(data)
    except (DecodeError, ValueError) as error:
        raise ProtocolError(f"{len(data)} bytes are no {cls.DESCRIPTOR.name}: {error}") from error


def refuse_oversize(name: str, *, size_bytes: int, limit: int) -> None:
    """Refuse a message by its size alone, for instance the one that a gRPC prefix announces.

    Raises:
        ProtocolError: FRAME_TOO_LARGE.
    """
    if size_bytes > limit:
        raise ProtocolError(
            f"{name} of {size_bytes} bytes is over its bound of {limit}: send less, or in pieces",
            code=ProtocolCode.FRAME_TOO_LARGE,
        )


def canonical_bytes(message: messages.ProtoMessage) -> bytes:
    """Return the deterministic serialization: the same facts give the same bytes, hence the same SHA-256."""
    return message.SerializeToString(deterministic=True)


def says_more(message: messages.ProtoMessage) -> bool:
    """Say whether this message, or one inside of it, has a field that this release does not know."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    return known.ByteSize() != message.ByteSize()


def unknown_field_numbers(message: messages.ProtoMessage) -> tuple[int, ...]:
    """Return the numbers of top-level fields that this release does not know, ascending, each once."""
    unknown = UnknownFieldSet(message)
    return tuple(sorted({unknown[index].field_number for index in range(len(unknown))}))
