import contextlib

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.protocol import messages
from bettercompute.protocol.frames import (
    ProtocolCode,
    ProtocolError,
    canonical_bytes,
    decode_message,
    encode_message,
    refuse_oversize,
    unknown_field_numbers,
)
from bettercompute.protocol.limits import MAX_FRAME_BYTES
from bettercompute.protocol.statuses import Reason, Status

FOREIGN_CLASSES = [
    messages.AgentFrame,
    messages.ServerFrame,
    messages.TunnelFrame,
    messages.JoinRequest,
    messages.JoinResponse,
    messages.JoinResponseBody,
    messages.RenewRequest,
    messages.CommandBody,
    messages.DesiredStateBody,
    messages.TrustBundle,
    messages.SignedTrustBundle,
    messages.NodeInventory,
    messages.site.SignedDiscoveryAssertion,
]


def test_round_trip():
    frame = messages.AgentFrame(hello=messages.Hello(node_id="n1", role=messages.AGENT_ROLE_NODE, last_epoch=2**64 - 1))
    assert decode_message(messages.AgentFrame, encode_message(frame)) == frame


texts = st.text(max_size=20)
hashes = st.binary(max_size=40)


@given(
    st.builds(
        messages.Hello,
        node_id=texts,
        boot_id=texts,
        last_epoch=st.integers(0, 2**64 - 1),
        proto_min=st.integers(0, 2**32 - 1),
        role=st.integers(-(2**31), 2**31 - 1),
        capabilities=st.lists(texts, max_size=5),
        inventory_hashes=st.dictionaries(texts, hashes, max_size=5),
        done_results=st.lists(
            st.builds(messages.CommandUpdate, command_id=texts, result=hashes, at_ms=st.integers(-(2**63), 2**63 - 1)),
            max_size=3,
        ),
    )
)
def test_any_hello_survives(hello):
    frame = messages.AgentFrame(hello=hello)
    assert decode_message(messages.AgentFrame, encode_message(frame)) == frame


def decode_or_refuse(cls, data):
    """The message, or None for a refusal; any other exception is a failure of the test."""
    with contextlib.suppress(ProtocolError):
        return decode_message(cls, data)
    return None


@pytest.mark.parametrize("cls", FOREIGN_CLASSES)
@given(data=st.binary(max_size=200))
def test_garbage_is_refused_or_is_a_message_that_survives(cls, data):
    message = decode_or_refuse(cls, data)
    if message is not None:
        # By bytes: a NaN does not equal itself.
        assert canonical_bytes(decode_message(cls, encode_message(message))) == canonical_bytes(message)


@given(data=st.data())
def test_damaged_frames_are_refused_or_are_messages(data):
    hello = messages.Hello(
        node_id="n1", drivers=[messages.DriverManifest(name="nvidia")], inventory_hashes={"cpu": b"x"}
    )
    whole = encode_message(messages.AgentFrame(hello=hello))
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    position = data.draw(st.integers(0, max(0, len(cut) - 1)))
    decode_or_refuse(messages.AgentFrame, cut[:position] + data.draw(st.binary(max_size=3)) + cut[position + 1 :])


@pytest.mark.parametrize("data", [b"\x0a\x05", b"\xff" * 20, b"\x0a\x04\x0a\x02\xff\xff", b"\x0a"])
def test_what_is_no_message_is_an_invalid_frame(data):
    with pytest.raises(ProtocolError, match=f"{len(data)} bytes are no AgentFrame") as caught:
        decode_message(messages.AgentFrame, data)
    assert caught.value.code is ProtocolCode.INVALID_FRAME
    assert (caught.value.status, caught.value.reason) == (Status.INVALID_ARGUMENT, Reason.INVALID_FRAME)


def test_deep_nesting_is_refused():
    # Group in group: protobuf's own recursion limit, as an error of ours.
    nested = b"\x0b" * 5_000
    with pytest.raises(ProtocolError, match="no AgentFrame"):
        decode_message(messages.AgentFrame, nested)


def test_invalid_utf8_is_refused():
    with pytest.raises(ProtocolError, match="no Hello"):
        decode_message(messages.Hello, b"\x0a\x02\xff\xfe")


def test_size_is_refused_before_parsing():
    garbage = b"\xff" * (MAX_FRAME_BYTES + 1)
    with pytest.raises(ProtocolError, match=rf"{len(garbage)} bytes is over its bound of {MAX_FRAME_BYTES}") as caught:
        decode_message(messages.AgentFrame, garbage)
    assert caught.value.code is ProtocolCode.FRAME_TOO_LARGE
    assert (caught.value.status, caught.value.reason) == (Status.INVALID_ARGUMENT, Reason.FRAME_TOO_LARGE)


def test_size_is_refused_before_serializing():
    frame = messages.AgentFrame(inventory=messages.InventorySection(body=bytes(MAX_FRAME_BYTES)))
    with pytest.raises(ProtocolError, match="over its bound") as caught:
        encode_message(frame)
    assert caught.value.code is ProtocolCode.FRAME_TOO_LARGE


def test_the_bound_itself_is_allowed():
    update = messages.CommandUpdate(result=b"x" * 100)
    size_bytes = update.ByteSize()
    assert decode_message(messages.CommandUpdate, encode_message(update, limit=size_bytes), limit=size_bytes) == update
    for limit in (size_bytes - 1, 0):
        with pytest.raises(ProtocolError):
            encode_message(update, limit=limit)
        with pytest.raises(ProtocolError):
            decode_message(messages.CommandUpdate, update.SerializeToString(), limit=limit)


def test_a_prefix_is_refused_by_its_number_alone():
    with pytest.raises(ProtocolError, match="a gRPC message of 6291456 bytes"):
        refuse_oversize("a gRPC message", size_bytes=6 * 1024 * 1024, limit=MAX_FRAME_BYTES)


def test_canonical_bytes_do_not_depend_on_the_order_of_insertion():
    one = messages.Heartbeat(inventory_hashes={"cpu": b"1", "disks": b"2", "system": b"3"})
    other = messages.Heartbeat()
    for name, value in (("system", b"3"), ("disks", b"2"), ("cpu", b"1")):
        other.inventory_hashes[name] = value
    assert canonical_bytes(one) == canonical_bytes(other)


@pytest.fixture(scope="module")
def newer():
    """Classes of a later release: one more field, case, enum value and section, in a pool of their own."""
    pool = descriptor_pool.DescriptorPool()
    files = [messages.PackedMessage.DESCRIPTOR.file, messages.Signature.DESCRIPTOR.file, messages.Hello.DESCRIPTOR.file]
    for file in files:
        proto = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(proto)
        by_name = {message.name: message for message in proto.message_type}
        field = descriptor_pb2.FieldDescriptorProto
        if "Hello" in by_name:
            proto.message_type.add(name="Poem").field.add(name="text", number=1, type=field.TYPE_STRING, label=1)
            by_name["Hello"].field.add(name="mood", number=99, type=field.TYPE_STRING, label=1)
            for owner, name, number, oneof in (("AgentFrame", "poem", 60, 0), ("NodeSpec", "poems", 61, None)):
                added = by_name[owner].field.add(
                    name=name, number=number, type=field.TYPE_MESSAGE, label=1, type_name=".bettercompute.agent.v1.Poem"
                )
                if oneof is not None:
                    added.oneof_index = oneof
        for enum in proto.enum_type:
            if enum.name == "AgentRole":
                enum.value.add(name="AGENT_ROLE_POET", number=7)
        pool.Add(proto)
    return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"bettercompute.agent.v1.{name}"))


def relay(cls, data):
    return encode_message(decode_message(cls, data))


def test_an_unknown_field_and_enum_value_survive_a_relay(newer):
    sent = newer("AgentFrame")(hello={"node_id": "n1", "mood": "fair", "role": 7})
    ours = decode_message(messages.AgentFrame, sent.SerializeToString())
    assert (ours.hello.node_id, ours.hello.role) == ("n1", 7)
    assert unknown_field_numbers(ours.hello) == (99,)
    assert newer("AgentFrame").FromString(relay(messages.AgentFrame, sent.SerializeToString())) == sent


def test_an_unknown_case_is_no_case_and_survives_a_relay(newer):
    sent = newer("AgentFrame")(poem={"text": "tides"})
    ours = decode_message(messages.AgentFrame, sent.SerializeToString())
    assert ours.WhichOneof("frame") is None
    assert newer("AgentFrame").FromString(relay(messages.AgentFrame, sent.SerializeToString())) == sent


def test_an_unknown_section_is_told_by_its_number_and_survives_a_relay(newer):
    sent = newer("DesiredStateBody")(generation=4, full={"poems": {"text": "tides"}, "daemon": {"log_level": "info"}})
    ours = decode_message(messages.DesiredStateBody, sent.SerializeToString())
    assert unknown_field_numbers(ours.full) == (61,)
    assert newer("DesiredStateBody").FromString(relay(messages.DesiredStateBody, sent.SerializeToString())) == sent


def test_known_messages_have_no_unknown_fields():
    assert unknown_field_numbers(messages.Hello(node_id="n1")) == ()
