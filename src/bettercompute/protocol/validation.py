"""What a daemon's frame must be before it may enter a batch for the store (docs/protocol.md, "Frames and the store").

Facts of many sessions are written by one statement, so one value that PostgreSQL refuses (a NUL in a text, a number
past its column, a time past year 9999, a payload that is no JSON) would cost every other node its batch. Such a frame
ends its own session instead, with a sentence that names the field, the value and the bound. Rules go by a field's type
and name, and each list and byte string has its bound here: a test walks all messages of AgentFrame and fails without
one.

What a frame *means* (gaps, state moves, roles, signatures) is not judged here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from json.scanner import make_scanner
from math import isfinite
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from bettercompute.protocol import limits, messages
from bettercompute.protocol.frames import ProtocolCode, ProtocolError, refuse_oversize

# Checks one value; is given the field's path for the error's text, or None when nobody will read it.
Path = str | None
Check = Callable[[Path, Any], None]

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_EVENT_TYPE = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
# An escaped NUL: the backslash before it is not itself escaped.
_JSON_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
# Beyond that of any finite binary floating point number.
_EXPONENT_MAX = 400
# A payload of so many characters has neither too many bytes nor too many objects and arrays, whatever they are.
_PLAIN_CHARS = min(limits.MAX_EVENT_CONTAINERS, limits.MAX_EVENT_PAYLOAD_BYTES // 4)

# How many entries each list and map may have.
COUNTS: Mapping[str, int] = {
    "AttestedReportBody.inventory": limits.MAX_INVENTORY_SECTIONS,
    "CommandUpdateBatch.updates": limits.MAX_UPDATES_PER_BATCH,
    "DriverManifest.capabilities": limits.MAX_CAPABILITIES,
    "DriverManifest.command_kinds": limits.MAX_CAPABILITIES,
    "EventBatch.events": limits.MAX_EVENTS_PER_BATCH,
    "Heartbeat.inventory_hashes": limits.MAX_INVENTORY_SECTIONS,
    "Heartbeat.lanes": limits.MAX_LANES,
    "Hello.capabilities": limits.MAX_CLAIMED_CAPABILITIES,
    "Hello.done_ids": limits.MAX_DONE_RESULTS,
    "Hello.done_results": limits.MAX_DONE_RESULTS,
    "Hello.drivers": limits.MAX_DRIVERS,
    "Hello.inventory_hashes": limits.MAX_INVENTORY_SECTIONS,
    "Hello.running_command_ids": limits.MAX_RUNNING_COMMANDS,
    "InstanceStatus.addresses": limits.MAX_ADDRESSES,
    "Signature.certificate_chain": limits.MAX_CHAIN_CERTIFICATES,
    "StatusReport.conditions": limits.MAX_CONDITIONS,
    "StatusReport.discovered": limits.MAX_DISCOVERED,
    "StatusReport.instances": limits.MAX_INSTANCES,
    "StatusReport.refusals": limits.MAX_RELAY_REFUSALS,
    "StatusReport.sections": limits.MAX_SPEC_SECTIONS,
}

# The exact size of each byte string that has one, beside the empty one; `..._sha256` and `sha256` need no row.
EXACT_BYTES: Mapping[str, int] = {
    "Hello.hello_nonce": limits.HELLO_NONCE_BYTES,
    "Hello.previous_hello_nonce": limits.HELLO_NONCE_BYTES,
    "SecretRequest.epk": limits.EPK_BYTES,
    "WorkloadTokenRequest.epk": limits.EPK_BYTES,
}

# The largest size of every other byte string.
MOST_BYTES: Mapping[str, int] = {
    "AttestedReport.body": limits.MAX_COMMAND_BODY_BYTES,
    "CommandOutput.data": limits.MAX_OUTPUT_BYTES,
    "CommandUpdate.result": limits.MAX_COMMAND_BODY_BYTES,
    "InventorySection.body": limits.MAX_INVENTORY_SECTION_BYTES,
    "Signature.certificate_chain": limits.MAX_CERTIFICATE_BYTES,
    # One that is not 64 bytes does not verify; that is said where it is verified.
    "Signature.value": limits.MAX_NAME_CHARS,
}

# Numbers of 64 bits that the store adds to.
MOST_NUMBERS: Mapping[str, int] = {"CommandOutput.offset": limits.MAX_BIGINT - limits.MAX_OUTPUT_BYTES}

# Texts that may be longer than a name, by field name.
_LONG_TEXTS: Mapping[str, int] = {
    "message": limits.MAX_SENTENCE_CHARS,
    "ref": limits.MAX_REFERENCE_CHARS,
    "audience": limits.MAX_REFERENCE_CHARS,
}

# Judged by rules of their own, and never a reason to refuse the Hello here: capabilities are kept or dropped one by one
# (protocol.capabilities), and what a version is too high for is the negotiation's (protocol.versions).
_UNCHECKED = frozenset({"Hello.capabilities", "Hello.proto_min", "Hello.proto_max"})


def validate_for_store(frame: messages.AgentFrame) -> None:
    """Refuse a frame that the store could not take.

    Raises:
        ProtocolError: with a sentence that names the field, the value and the bound.
    """
    case = frame.WhichOneof("frame")
    if case == "events":
        _check_event_batch(frame.events)
    elif case == "hello":
        refuse_oversize("Hello", size_bytes=frame.hello.ByteSize(), limit=limits.MAX_HELLO_BYTES)
        _check(frame.hello)
    elif case is not None:
        _check(getattr(frame, case))


def _check(message: messages.ProtoMessage) -> None:
    """Check a message; where something is wrong once more, for the words: writing paths was a fifth of a check."""
    try:
        _check_message(None, message)
    except ProtocolError:
        _check_message(message.DESCRIPTOR.name, message)
        raise


def _check_message(path: Path, message: messages.ProtoMessage) -> None:
    checks = _checks_of(message.DESCRIPTOR)
    for field, value in message.ListFields():
        check = checks.get(field.number)
        if check is not None:
            check(path and f"{path}.{field.name}", value)


@cache
def _checks_of(descriptor: Descriptor) -> Mapping[int, Check]:
    """Return a check for each field of a message type that needs one, by the field's number."""
    checks = {field.number: _check_of(descriptor.name, field) for field in descriptor.fields}
    return {number: check for number, check in checks.items() if check is not None}


def _check_of(message_name: str, field: FieldDescriptor) -> Check | None:
    name = f"{message_name}.{field.name}"
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return _map_check(name, field)
    one = None if name in _UNCHECKED else _single_check(name, field)
    return _list_check(name, one) if field.is_repeated else one


def _single_check(name: str, field: FieldDescriptor) -> Check | None:
    """Return the check of one value of the field; None when any value of its type can be stored."""
    if field.type == FieldDescriptor.TYPE_STRING:
        return _text_check(_LONG_TEXTS.get(field.name, limits.MAX_NAME_CHARS))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _bytes_check(name, field)
    if field.type == FieldDescriptor.TYPE_INT64 and field.name.endswith("_ms"):
        return _check_time
    if field.type == FieldDescriptor.TYPE_UINT64:
        return _number_check(MOST_NUMBERS.get(name, limits.MAX_BIGINT))
    if field.type == FieldDescriptor.TYPE_UINT32:
        return _number_check(limits.MAX_INTEGER)
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return _check_finite
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return _check_message
    return None


def _text_check(chars_max: int) -> Check:
    def check(path: Path, text: str) -> None:
        if len(text) > chars_max:
            raise ProtocolError(f"{path} has {len(text)} characters: at most {chars_max} are allowed")
        if "\0" in text:
            raise ProtocolError(f"{path} holds a NUL character, which no text of the store can hold: leave it out")

    return check


def _bytes_check(name: str, field: FieldDescriptor) -> Check:
    exact = limits.SHA256_BYTES if field.name.endswith("sha256") else EXACT_BYTES.get(name)
    if exact is not None:
        return _exact_bytes_check(exact)
    most = MOST_BYTES[name]

    def check(path: Path, content: bytes) -> None:
        if len(content) > most:
            raise ProtocolError(
                f"{path} has {len(content)} bytes: at most {most} are allowed", code=ProtocolCode.FRAME_TOO_LARGE
            )

    return check


def _exact_bytes_check(size_bytes: int) -> Check:
    def check(path: Path, content: bytes) -> None:
        if content and len(content) != size_bytes:
            raise ProtocolError(f"{path} has {len(content)} bytes: it must have {size_bytes}, or none")

    return check


def _list_check(name: str, one: Check | None) -> Check:
    count_max = COUNTS[name]

    def check(path: Path, values: Any) -> None:
        if len(values) > count_max:
            raise ProtocolError(f"{path} has {len(values)} entries: at most {count_max} are allowed")
        if one is not None:
            for index, value in enumerate(values):
                one(path and f"{path}[{index}]", value)

    return check


def _map_check(name: str, field: FieldDescriptor) -> Check:
    count_max = COUNTS[name]
    key_check = _text_check(limits.MAX_NAME_CHARS)
    assert field.name == "inventory_hashes", f"{name}: a map of another kind needs a rule here"
    value_check = _exact_bytes_check(limits.SHA256_BYTES)

    def check(path: Path, entries: Any) -> None:
        if len(entries) > count_max:
            raise ProtocolError(f"{path} has {len(entries)} entries: at most {count_max} are allowed")
        for key, value in entries.items():
            key_check(path and f"{path} (a key)", key)
            value_check(path and f"{path}[{key!r}]", value)

    return check


def _check_time(path: Path, time_ms: int) -> None:
    if not 0 <= time_ms <= limits.MAX_TIME_MS:
        raise ProtocolError(f"{path} is {time_ms}: Unix milliseconds from 0 to {limits.MAX_TIME_MS} are allowed")


def _number_check(most: int) -> Check:
    def check(path: Path, number: int) -> None:
        if number > most:
            raise ProtocolError(f"{path} is {number}: at most {most} is allowed")

    return check


def _check_finite(path: Path, number: float) -> None:
    if not isfinite(number):
        raise ProtocolError(f"{path} is {number}: it must be a finite number, or absent")


def _check_event_batch(batch: messages.EventBatch) -> None:
    """Check a batch by hand rather than by descriptor, and by columns: events are the most frequent rows of all."""
    refuse_oversize("EventBatch", size_bytes=batch.ByteSize(), limit=limits.MAX_EVENT_BATCH_BYTES)
    _text_check(limits.MAX_NAME_CHARS)("EventBatch.journal_id", batch.journal_id)
    count_max = COUNTS["EventBatch.events"]
    if len(batch.events) > count_max:
        raise ProtocolError(f"EventBatch.events has {len(batch.events)} entries: at most {count_max} are allowed")
    events = list(batch.events)
    if not _columns_fit(events):
        for index, event in enumerate(events):
            _check_event(f"EventBatch.events[{index}]", event)
    for index, text in enumerate([event.payload_json for event in events]):
        if text and not _plain_object(text):
            _check_payload(f"EventBatch.events[{index}].payload_json", text)


def _columns_fit(events: Sequence[messages.Event]) -> bool:
    """Say whether `_check_event` would pass every one of the events: a few calls for all of them."""
    seqs, times = [event.seq for event in events], [event.at_ms for event in events]
    return not events or (
        min(seqs) >= 1
        and max(seqs) <= limits.MAX_BIGINT
        and min(times) >= 0
        and max(times) <= limits.MAX_TIME_MS
        and all(map(_UUID.fullmatch, [event.event_id for event in events]))
        and all(map(_EVENT_TYPE.fullmatch, {event.type for event in events}))
    )


def _check_event(path: str, event: messages.Event) -> None:
    if not 1 <= event.seq <= limits.MAX_BIGINT:
        raise ProtocolError(f"{path}.seq is {event.seq}: 1 to {limits.MAX_BIGINT} are allowed")
    if not _UUID.fullmatch(event.event_id):
        raise ProtocolError(f"{path}.event_id is {event.event_id[:64]!r}: it must be a UUID")
    if not _EVENT_TYPE.fullmatch(event.type):
        raise ProtocolError(f"{path}.type is {event.type[:64]!r}: it must match {_EVENT_TYPE.pattern}")
    _check_time(f"{path}.at_ms", event.at_ms)


def _plain_object(text: str) -> bool:
    """Say whether a payload is a JSON object beyond doubt: short, without an escape, nothing before or behind it.

    Most are. `_check_payload` judges the others, and finds the words.
    """
    if len(text) > _PLAIN_CHARS or text[0] != "{" or "\\" in text:
        return False
    try:
        return bool(_SCAN_JSON(text, 0)[1] == len(text))
    except (ValueError, RecursionError, StopIteration):
        return False


def _check_payload(path: str, text: str) -> None:
    """Refuse what is no JSON object, or one that a jsonb column does not take."""
    size_bytes = len(text) if text.isascii() else len(text.encode())
    if size_bytes > limits.MAX_EVENT_PAYLOAD_BYTES:
        raise ProtocolError(f"{path} has {size_bytes} bytes: at most {limits.MAX_EVENT_PAYLOAD_BYTES} are allowed")
    containers = text.count("{") + text.count("[")
    if containers > limits.MAX_EVENT_CONTAINERS:
        raise ProtocolError(
            f"{path} has {containers} objects and arrays: at most {limits.MAX_EVENT_CONTAINERS} are allowed"
        )
    try:
        value = _JSON.decode(text)
        if "\\u" in text:
            _refuse_escapes(text, value)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{path} is no JSON that can be stored: {error}") from error
    if not isinstance(value, dict):
        raise ProtocolError(f"{path} is a JSON {type(value).__name__}: it must be an object")


def _refuse_escapes(text: str, value: object) -> None:
    """Refuse what JSON can escape and the store cannot hold: a NUL, and half of a surrogate pair."""
    if _JSON_NUL.search(text):
        raise ValueError("it holds a NUL character")
    # Python reads a lone surrogate, and UTF-8 has no bytes for it.
    json.dumps(value, ensure_ascii=False).encode()


def _parse_float(text: str) -> float:
    # A jsonb column keeps decimal digits, and has a bound on them that is not the bound of binary floating point.
    exponent = text.lower().partition("e")[2]
    if len(text) > limits.MAX_NAME_CHARS or abs(int(exponent or "0")) > _EXPONENT_MAX:
        raise ValueError(f"{text[:32]} has too many digits")
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"{text} is out of range")
    return number


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


_JSON = json.JSONDecoder(parse_float=_parse_float, parse_constant=_refuse_constant)
_SCAN_JSON = make_scanner(_JSON)  # type: ignore[arg-type] # the stubs want a scanner; it reads a decoder's settings
