"""Every purpose against checked-in bytes, which a second, plain computation in this file must give too."""

import hashlib
import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.protocol import envelopes, messages
from bettercompute.protocol.envelopes import Purpose, signing_input
from bettercompute.protocol.frames import ProtocolError

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "signing_inputs.json").read_text())["vectors"]


def from_hex(fields):
    """The vector's fields as builders take them: bytes from hexadecimal."""
    binary = {"body", "result", "csr", "epk", "scope_root", "content"}
    return {name: bytes.fromhex(value) if name in binary else value for name, value in fields.items()}


def of_body(build):
    return lambda fields: build(fields["body"])


def of_request(build, message):
    return lambda fields: build(message(**fields))


def batch_approval(fields):
    trust_domain = fields.pop("trust_domain")
    return envelopes.batch_approval_input(messages.BatchApproval(**fields), trust_domain=trust_domain)


def bundle_of(fields):
    names = ("approver_set_epoch", "approver_threshold", "quorum_tiers", "unbatched_destructive_per_hour")
    keys = [bytes.fromhex(key) for key in fields["approver_keys"]]
    return messages.TrustBundle(approver_keys=keys, **{name: fields[name] for name in names})


def approver_set(fields):
    return envelopes.approver_set_input(bundle_of(fields), trust_domain=fields["trust_domain"])


BUILDERS = {
    Purpose.COMMAND: of_body(envelopes.command_input),
    Purpose.DESIRED_STATE: of_body(envelopes.desired_state_input),
    Purpose.JOIN_RESPONSE: of_body(envelopes.join_response_input),
    Purpose.TRUST_BUNDLE: of_body(envelopes.trust_bundle_input),
    Purpose.ATTESTED_REPORT: of_body(envelopes.attested_report_input),
    Purpose.DISCOVERY_ASSERTION: of_body(envelopes.discovery_assertion_input),
    Purpose.COMMAND_UPDATE: lambda fields: envelopes.command_update_input(**fields),
    Purpose.SECRET_REQUEST: of_request(envelopes.secret_request_input, messages.SecretRequest),
    Purpose.WORKLOAD_TOKEN: of_request(envelopes.workload_token_input, messages.WorkloadTokenRequest),
    Purpose.RENEW_POP: lambda fields: envelopes.renew_pop_input(**fields),
    Purpose.X509POP: lambda fields: envelopes.x509pop_input(**fields),
    Purpose.BATCH_APPROVAL: batch_approval,
    Purpose.APPROVER_SET: approver_set,
}

vectors = pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])


@vectors
def test_builders_give_the_checked_in_bytes(vector):
    assert BUILDERS[Purpose(vector["purpose"])](from_hex(vector["fields"])).hex() == vector["input"]


@vectors
def test_a_plain_computation_gives_them_too(vector):
    plain = b"bettercompute.v1/" + vector["purpose"].encode() + b"\0"
    for part in map(bytes.fromhex, vector["parts"]):
        plain += struct.pack(">I", len(part)) + part
    assert plain.hex() == vector["input"]


@pytest.mark.parametrize("purpose", Purpose)
def test_every_purpose_has_a_builder_and_vectors(purpose):
    assert purpose in BUILDERS
    assert any(vector["purpose"] == purpose for vector in VECTORS)


@pytest.mark.parametrize("message", [messages.SecretRequest, messages.WorkloadTokenRequest])
def test_every_field_but_the_signature_is_covered(message):
    """A field that is added to a request without a part would travel unsigned."""
    purpose = Purpose.SECRET_REQUEST if message is messages.SecretRequest else Purpose.WORKLOAD_TOKEN
    fields = {field.name for field in message.DESCRIPTOR.fields} - {"node_sig"}
    plain = {name: b"epk" if name == "epk" else name for name in fields}
    before = BUILDERS[purpose](dict(plain))
    for name in fields:
        changed = {**plain, name: b"other" if name == "epk" else "other"}
        assert BUILDERS[purpose](changed) != before, name


@given(st.lists(st.binary(max_size=8), max_size=5), st.lists(st.binary(max_size=8), max_size=5))
def test_different_parts_never_give_the_same_input(one, other):
    same = signing_input(Purpose.COMMAND, *one) == signing_input(Purpose.COMMAND, *other)
    assert same == (one == other)


def test_different_purposes_never_give_the_same_input():
    inputs = {signing_input(purpose, b"body") for purpose in Purpose}
    assert len(inputs) == len(Purpose)
    # Nor is one purpose the beginning of another's input: the zero byte ends it.
    for one in inputs:
        assert not any(other.startswith(one) for other in inputs - {one})


def test_numbers_are_big_endian():
    assert envelopes.uint32_be(5) == b"\0\0\0\x05"
    assert envelopes.uint64_be(2**63) == b"\x80" + bytes(7)
    assert envelopes.timestamp(1) == bytes(7) + b"\x01"


@pytest.mark.parametrize(
    "build",
    [
        lambda: envelopes.uint32_be(-1),
        lambda: envelopes.uint32_be(2**32),
        lambda: envelopes.uint64_be(2**64),
        lambda: envelopes.timestamp(-1),
        lambda: envelopes.command_update_input(command_id="c", state=-5, result=b""),
        lambda: envelopes.renew_pop_input(csr=b"", node_id="n", client_time_ms=-1),
    ],
)
def test_a_number_from_a_peer_that_does_not_fit_is_a_protocol_error(build):
    with pytest.raises(ProtocolError, match="cannot be signed: it must be from 0 to"):
        build()


def approvers(**changes):
    tiers = [messages.DESTRUCTIVE_TIER_NODE, messages.DESTRUCTIVE_TIER_DISK]
    fields = {"approver_keys": [b"key-1", b"key-2"], "approver_threshold": 2, "quorum_tiers": tiers}
    return messages.TrustBundle(**{**fields, **changes})


def test_the_order_in_which_a_set_is_listed_does_not_matter():
    other = approvers(approver_keys=[b"key-2", b"key-1"], quorum_tiers=[2, 1])
    assert envelopes.approver_set_sha256(approvers()) == envelopes.approver_set_sha256(other)


@pytest.mark.parametrize(
    "change",
    [
        {"approver_keys": [b"key-1"]},
        {"approver_keys": [b"key-1", b"key-3"]},
        {"approver_threshold": 1},
        {"quorum_tiers": [1]},
        {"quorum_tiers": [1, 2, 3]},
        {"unbatched_destructive_per_hour": 1},
    ],
)
def test_every_change_of_a_set_changes_its_digest(change):
    assert envelopes.approver_set_sha256(approvers()) != envelopes.approver_set_sha256(approvers(**change))


def test_the_set_digest_is_that_of_its_content():
    vector = next(vector for vector in VECTORS if vector["name"] == "approver-set: two keys listed out of order")
    content = bytes.fromhex(vector["fields"]["content"])
    assert envelopes.approver_set_sha256(bundle_of(vector["fields"])) == hashlib.sha256(content).digest()


def test_without_approver_keys_there_is_no_digest():
    assert envelopes.approver_set_sha256(messages.TrustBundle(approver_set_epoch=4)) == b""


def test_a_key_that_could_be_taken_for_a_number_is_refused():
    with pytest.raises(ProtocolError, match="4 bytes is no SubjectPublicKeyInfo"):
        envelopes.approver_set_sha256(messages.TrustBundle(approver_keys=[b"\0\0\0\x02"]))
