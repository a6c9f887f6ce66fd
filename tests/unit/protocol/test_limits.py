from bettercompute.protocol import limits
from bettercompute.protocol.frames import decode_message, encode_message
from bettercompute.protocol.messages import AgentFrame, DesiredState, Event, EventBatch, ServerFrame, Signature


def test_the_published_bounds():
    mib = 1024 * 1024
    assert mib == limits.MAX_COMMAND_BODY_BYTES
    assert 4 * mib == limits.MAX_SPEC_BODY_BYTES
    assert 5 * mib == limits.MAX_FRAME_BYTES


def test_the_largest_spec_fits_a_frame_with_its_signature():
    chain = [bytes(limits.MAX_CERTIFICATE_BYTES)] * limits.MAX_CHAIN_CERTIFICATES
    signature = Signature(value=bytes(64), kid="k" * 64, certificate_chain=chain)
    frame = ServerFrame(desired=DesiredState(body=bytes(limits.MAX_SPEC_BODY_BYTES), signature=signature))
    assert decode_message(ServerFrame, encode_message(frame)) == frame


def test_one_event_of_the_largest_size_fits_a_batch():
    event = Event(
        seq=limits.MAX_BIGINT,
        event_id="0190a000-0000-7000-8000-000000000000",
        type="t" * limits.MAX_NAME_CHARS,
        at_ms=limits.MAX_TIME_MS,
        payload_json="x" * limits.MAX_EVENT_PAYLOAD_BYTES,
    )
    batch = EventBatch(journal_id="j" * limits.MAX_NAME_CHARS, events=[event])
    assert batch.ByteSize() < limits.MAX_EVENT_BATCH_BYTES
    assert AgentFrame(events=batch).ByteSize() < limits.MAX_FRAME_BYTES


def test_the_last_time_is_the_end_of_the_year_9999():
    assert limits.MAX_TIME_MS // 1000 == 253_402_300_799
