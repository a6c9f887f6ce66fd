import json

import asyncpg
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.protocol import limits, messages, validation
from bettercompute.protocol.frames import ProtocolCode, ProtocolError, encode_message
from bettercompute.protocol.statuses import Status
from bettercompute.protocol.validation import validate_for_store

EVENT_ID = "0190a000-0000-7000-8000-000000000000"
BIG = limits.MAX_BIGINT + 1


def event(**changes):
    fields = {"seq": 1, "event_id": EVENT_ID, "type": "daemon.started", "at_ms": 1, "payload_json": '{"a": [1, "b"]}'}
    return messages.Event(**{**fields, **changes})


def events(*batch, journal_id="j1"):
    return messages.AgentFrame(events=messages.EventBatch(journal_id=journal_id, events=batch))


def hello(**fields):
    return messages.AgentFrame(hello=messages.Hello(**fields))


def update(**fields):
    return messages.AgentFrame(update=messages.CommandUpdate(**fields))


def status(**fields):
    return messages.AgentFrame(status=messages.StatusReport(**fields))


GOOD = {
    "hello": hello(
        node_id="n1",
        boot_id="b",
        journal_id="j",
        last_epoch=limits.MAX_BIGINT,
        inventory_hashes={"cpu": bytes(32)},
        hello_nonce=bytes(16),
        spec_sha256=bytes(32),
        capabilities=["good", "BAD\0", "x" * 1000],
        done_results=[
            messages.CommandUpdate(
                command_id="c", state=messages.COMMAND_STATE_SUCCEEDED, result=b"\0", message="two\nlines"
            )
        ],
    ),
    "heartbeat": messages.AgentFrame(
        heartbeat=messages.Heartbeat(
            lanes=[messages.LaneState(lane=messages.LANE_CONTROL, free=8)],
            load=messages.NodeLoad(load1=0.5, pending_events=3),
        )
    ),
    "update of a later release": update(command_id="c", state=77, reject_reason=99),
    "updates": messages.AgentFrame(
        updates=messages.CommandUpdateBatch(updates=[messages.CommandUpdate(command_id="c")])
    ),
    "events": events(event(), event(seq=2, payload_json="")),
    "status": status(
        observed_generation=3,
        conditions=[messages.Condition(type="DiskFull", message="the journal's disk is full: 0 bytes free")],
        pressure=messages.HostPressure(cpu_some_avg10=0.0),
        approver_set_sha256=bytes(32),
    ),
    "inventory": messages.AgentFrame(inventory=messages.InventorySection(name="cpu", body=b"\0", sha256=bytes(32))),
    "spec_request": messages.AgentFrame(spec_request=messages.SpecRequest(reason="base-mismatch")),
    "secret_request": messages.AgentFrame(
        secret_request=messages.SecretRequest(ref="vault://" + "p" * 5_000, epk=bytes(65), request_id="r")
    ),
    "workload_token_request": messages.AgentFrame(
        workload_token_request=messages.WorkloadTokenRequest(instance_id="i", epk=bytes(65))
    ),
    "nothing": messages.AgentFrame(),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_frames_pass(name):
    validate_for_store(GOOD[name])


BAD = {
    "NUL in an id": (hello(boot_id="a\0b"), r"Hello\.boot_id holds a NUL character"),
    "NUL deep inside": (
        hello(done_results=[messages.CommandUpdate(), messages.CommandUpdate(message="\0")]),
        r"Hello\.done_results\[1\]\.message holds a NUL",
    ),
    "NUL in a list": (hello(running_command_ids=["a", "\0"]), r"Hello\.running_command_ids\[1\] holds a NUL"),
    "NUL in a key": (hello(inventory_hashes={"c\0": b""}), r"Hello\.inventory_hashes \(a key\) holds a NUL"),
    "long id": (hello(journal_id="j" * 257), r"Hello\.journal_id has 257 characters: at most 256"),
    "long sentence": (update(message="m" * 4097), r"CommandUpdate\.message has 4097 characters: at most 4096"),
    "attempt past integer": (
        messages.AgentFrame(update=messages.CommandUpdate(command_id="c1", attempt=limits.MAX_INTEGER + 1)),
        rf"CommandUpdate\.attempt is {limits.MAX_INTEGER + 1}: at most {limits.MAX_INTEGER}",
    ),
    "epoch past bigint": (hello(last_epoch=BIG), rf"Hello\.last_epoch is {BIG}: at most {limits.MAX_BIGINT}"),
    "generation past bigint": (
        messages.AgentFrame(heartbeat=messages.Heartbeat(applied_generation=BIG)),
        r"Heartbeat\.applied_generation is",
    ),
    "short hash": (hello(spec_sha256=b"x"), r"Hello\.spec_sha256 has 1 bytes: it must have 32, or none"),
    "short hash in a map": (hello(inventory_hashes={"cpu": b"x"}), r"Hello\.inventory_hashes\['cpu'\] has 1 bytes"),
    "short nonce": (hello(hello_nonce=bytes(15)), r"Hello\.hello_nonce has 15 bytes: it must have 16, or none"),
    "short key": (
        messages.AgentFrame(secret_request=messages.SecretRequest(epk=bytes(64))),
        r"SecretRequest\.epk has 64 bytes: it must have 65",
    ),
    "time before 1970": (update(at_ms=-1), r"CommandUpdate\.at_ms is -1: Unix milliseconds from 0"),
    "time past 9999": (status(at_ms=limits.MAX_TIME_MS + 1), r"StatusReport\.at_ms is 253402300800000"),
    "no number": (
        messages.AgentFrame(heartbeat=messages.Heartbeat(load=messages.NodeLoad(load1=float("nan")))),
        r"Heartbeat\.load\.load1 is nan: it must be a finite number",
    ),
    "infinite": (
        status(pressure=messages.HostPressure(cpu_steal=float("inf"))),
        r"StatusReport\.pressure\.cpu_steal is inf",
    ),
    "many conditions": (
        status(conditions=[messages.Condition()] * 65),
        r"StatusReport\.conditions has 65 entries: at most 64",
    ),
    "many sections": (
        hello(inventory_hashes={str(number): b"" for number in range(33)}),
        r"Hello\.inventory_hashes has 33 entries: at most 32",
    ),
    "large output": (
        update(output=messages.CommandOutput(data=bytes(limits.MAX_OUTPUT_BYTES + 1))),
        r"CommandUpdate\.output\.data has 65537 bytes: at most 65536",
    ),
    "no journal's name": (events(event(), journal_id="\0"), r"EventBatch\.journal_id holds a NUL"),
    "many events": (events(*[event()] * 501), "EventBatch.events has 501 entries: at most 500"),
    "seq 0": (events(event(), event(seq=0)), r"EventBatch\.events\[1\]\.seq is 0: 1 to"),
    "an end of output past bigint": (
        update(output=messages.CommandOutput(offset=limits.MAX_BIGINT - limits.MAX_OUTPUT_BYTES + 1)),
        r"CommandUpdate\.output\.offset is",
    ),
    "seq past bigint": (events(event(seq=BIG)), r"EventBatch\.events\[0\]\.seq is"),
    "no UUID": (events(event(event_id="1")), r"EventBatch\.events\[0\]\.event_id is '1': it must be a UUID"),
    "UUID in capitals": (events(event(event_id=EVENT_ID.replace("a", "A"))), "must be a UUID"),
    "no type": (events(event(type="")), r"EventBatch\.events\[0\]\.type is ''"),
    "type with a newline": (events(event(type="a\n")), r"EventBatch\.events\[0\]\.type is"),
    "event past 9999": (events(event(at_ms=2**62)), r"EventBatch\.events\[0\]\.at_ms is"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_frame_is_refused_with_the_field_and_the_bound(name):
    frame, why = BAD[name]
    with pytest.raises(ProtocolError, match=why) as caught:
        validate_for_store(frame)
    assert caught.value.status == Status.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "frame",
    [
        hello(node_id="n", done_results=[messages.CommandUpdate(result=bytes(limits.MAX_HELLO_BYTES))]),
        update(result=bytes(limits.MAX_COMMAND_BODY_BYTES + 1)),
        messages.AgentFrame(inventory=messages.InventorySection(body=bytes(limits.MAX_INVENTORY_SECTION_BYTES + 1))),
        events(*[event(payload_json=json.dumps({"a": "x" * 16_000}))] * 40),
    ],
    ids=["hello", "result", "section", "batch"],
)
def test_a_frame_that_is_too_large_for_its_kind_says_so(frame):
    encode_message(frame)
    with pytest.raises(ProtocolError, match=r"over its bound|at most") as caught:
        validate_for_store(frame)
    assert caught.value.code is ProtocolCode.FRAME_TOO_LARGE


GOOD_PAYLOADS = [
    "{}",
    '{"a": 1.5e300, "b": -0.0, "c": null, "d": [true, {}]}',
    '{"a": 1e-400, "b": ' + "1" * 250 + ".5}",
    '{"a": "a backslash and words: \\\\u0000"}',
    '{"a": "\\ud83d\\ude00 \\n"}',
    '{"ä": "ö"}',
    '{"a": 1, "a": 2}',
    '{"a": ' + "9" * 4_000 + "}",
    '{"a": ' + "[" * 499 + "]" * 499 + "}",
]


@pytest.mark.parametrize("payload", GOOD_PAYLOADS, ids=[payload[:24] for payload in GOOD_PAYLOADS])
def test_payloads_that_a_jsonb_column_takes_pass(payload):
    validate_for_store(events(event(payload_json=payload)))


BAD_PAYLOADS = [
    ("{", "is no JSON that can be stored"),
    ("[1]", "is a JSON list: it must be an object"),
    ("1", "is a JSON int"),
    ("null", "is a JSON NoneType"),
    ('{"a": NaN}', "NaN is no JSON"),
    ('{"a": -Infinity}', "-Infinity is no JSON"),
    ('{"a": 1e401}', "has too many digits"),
    ('{"a": 1e309}', "is out of range"),
    ('{"a": 0e-99999}', "has too many digits"),
    ('{"a": 0.' + "1" * 300 + "}", "has too many digits"),
    ('{"a": ' + "9" * 5_000 + "}", "is no JSON that can be stored"),
    ('{"a": "\\u0000"}', "holds a NUL character"),
    ('{"\\u0000": 1}', "holds a NUL character"),
    ('{"a": "\\\\\\u0000"}', "holds a NUL character"),
    ('{"a": "\\ud83d"}', "is no JSON that can be stored"),
    ('{"a": "\\ude00\\ud83d"}', "is no JSON that can be stored"),
    ('{"a": "\0"}', "is no JSON that can be stored"),
    ('{"a": ' + "[" * 500 + "]" * 500 + "}", "has 501 objects and arrays: at most 500"),
    ('{"a": "' + "x" * limits.MAX_EVENT_PAYLOAD_BYTES + '"}', "bytes: at most 16384"),
    ('{"a": "' + "ä" * 9_000 + '"}', "has 18009 bytes: at most 16384"),
]


@pytest.mark.parametrize(("payload", "why"), BAD_PAYLOADS, ids=[payload[:24] for payload, _ in BAD_PAYLOADS])
def test_payloads_that_it_does_not_take_are_refused(payload, why):
    with pytest.raises(ProtocolError, match=why):
        validate_for_store(events(event(payload_json=payload)))


async def test_postgresql_agrees(empty_dsn):
    """It takes what passes, so that no batch fails by it; and there is a reason for what does not pass."""
    connection = await asyncpg.connect(empty_dsn)
    try:
        for payload in GOOD_PAYLOADS:
            await connection.fetchval("SELECT $1::text::jsonb", payload)
        for payload in ('{"a": "\\u0000"}', '{"a": "\\ud83d"}', '{"a": 0e-99999}', '{"a": NaN}'):
            with pytest.raises(asyncpg.PostgresError):
                await connection.fetchval("SELECT $1::text::jsonb", payload)
    finally:
        await connection.close()


json_texts = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=["Cs"])),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=8,
).map(json.dumps)


@given(json_texts | st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_payload_passes_or_is_a_protocol_error(payload):
    try:
        validate_for_store(events(event(payload_json=payload)))
    except ProtocolError:
        return
    text = payload or "{}"
    assert isinstance(json.loads(text), dict)
    assert "\0" not in json.dumps(json.loads(text), ensure_ascii=False)


@given(st.binary(max_size=300))
def test_any_frame_passes_or_is_a_protocol_error(data):
    for case in ("hello", "heartbeat", "update", "updates", "events", "status", "inventory", "secret_request"):
        frame = messages.AgentFrame()
        field = getattr(frame, case)
        try:
            field.MergeFromString(data)
        except Exception:  # noqa: BLE001 - protobuf's refusal, tested elsewhere
            continue
        field.SetInParent()
        try:
            validate_for_store(frame)
        except ProtocolError:
            continue


def reachable(descriptor, seen):
    if descriptor.full_name not in seen:
        seen[descriptor.full_name] = descriptor
        for field in descriptor.fields:
            if field.message_type is not None:
                reachable(field.message_type, seen)
    return seen


def test_every_list_and_byte_string_of_a_daemons_frame_has_a_bound():
    """Builds the checks of every message reachable from AgentFrame: one without a bound is a KeyError here."""
    found = reachable(messages.AgentFrame.DESCRIPTOR, {})
    rows = set()
    for descriptor in found.values():
        if descriptor.GetOptions().map_entry or descriptor.name == "AgentFrame":
            continue
        validation._checks_of(descriptor)
        rows |= {f"{descriptor.name}.{field.name}" for field in descriptor.fields}
    unused = (set(validation.COUNTS) | set(validation.EXACT_BYTES) | set(validation.MOST_BYTES)) - rows
    assert unused <= {"AttestedReportBody.inventory"}
