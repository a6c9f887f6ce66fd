import dataclasses

import pytest

from bettercompute.protocol import messages
from bettercompute.protocol.capabilities import CAPABILITIES
from bettercompute.protocol.frames import ProtocolCode, ProtocolError
from bettercompute.protocol.kinds import (
    KINDS,
    Proof,
    decode_result,
    encode_result,
    pack_payload,
    unpack_payload,
)
from bettercompute.protocol.limits import MAX_COMMAND_BODY_BYTES

# The published table: lane, retry-safe, self-terminating, attested, destructive, roles.
PUBLISHED = {
    "diag.nvml": ("control", True, False, True, False, "node ramdisk"),
    "inventory.refresh": ("control", True, False, False, False, "node site ramdisk"),
    "logs.collect": ("bulk", True, False, False, False, "node site ramdisk"),
    "node.reboot": ("control", True, True, False, True, "node site"),
    "gpu.reset": ("control", False, False, True, True, "node"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_flags_are_the_published_ones(name):
    kind = KINDS[name]
    lane, *flags, roles = PUBLISHED[name]
    assert kind.lane == messages.Lane.Value(f"LANE_{lane.upper()}")
    assert [kind.retry_safe, kind.self_terminating, kind.attested, kind.destructive] == flags
    assert kind.roles == {messages.AgentRole.Value(f"AGENT_ROLE_{role.upper()}") for role in roles.split()}


def test_the_table_holds_the_published_kinds_and_the_upgrade():
    assert set(KINDS) == {*PUBLISHED, "daemon.upgrade"}


def test_self_terminating_kinds_have_their_proofs():
    proofs = {name: kind.proof for name, kind in KINDS.items() if kind.self_terminating}
    assert proofs == {"node.reboot": Proof.BOOT_ID, "daemon.upgrade": Proof.DAEMON_VERSION}


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_messages_are_named_after_the_kind(kind):
    words = "".join(word.capitalize() for word in kind.name.split("."))
    assert (kind.payload.__name__, kind.result.__name__) == (f"{words}Payload", f"{words}Result")
    assert kind.capability is None or kind.capability in CAPABILITIES


@pytest.mark.parametrize(
    "change",
    [
        {"self_terminating": True},
        {"destructive": True},
        {"roles": frozenset()},
        {"timeout_ms": 0},
        {"proof": Proof.BOOT_ID},
    ],
)
def test_a_row_that_contradicts_itself_is_a_bug(change):
    with pytest.raises(AssertionError):
        dataclasses.replace(KINDS["inventory.refresh"], **change)


def test_payload_round_trip():
    kind = KINDS["inventory.refresh"]
    payload = messages.InventoryRefreshPayload(sections=["cpu", "disks"])
    body = messages.CommandBody(kind=kind.name, payload=pack_payload(payload))
    assert body.payload.type_url == "type.googleapis.com/bettercompute.agent.v1.InventoryRefreshPayload"
    assert unpack_payload(kind, body) == payload


def test_an_absent_payload_is_one_with_nothing_set():
    body = messages.CommandBody(kind="inventory.refresh")
    assert unpack_payload(KINDS["inventory.refresh"], body) == messages.InventoryRefreshPayload()


@pytest.mark.parametrize("type_url", ["", "InventoryRefreshPayload", "x/bettercompute.agent.v1.NodeRebootPayload"])
def test_another_payload_is_refused(type_url):
    body = messages.CommandBody(payload=messages.PackedMessage(type_url=type_url, value=b""))
    with pytest.raises(ProtocolError, match=r"must be bettercompute\.agent\.v1\.InventoryRefreshPayload"):
        unpack_payload(KINDS["inventory.refresh"], body)


def test_a_payload_that_does_not_decode_is_refused():
    body = messages.CommandBody(payload=pack_payload(messages.NodeRebootPayload(force=True)))
    body.payload.value = b"\xff"
    with pytest.raises(ProtocolError, match="1 bytes are no NodeRebootPayload"):
        unpack_payload(KINDS["node.reboot"], body)


def test_payloads_and_results_are_bounded():
    long = "x" * MAX_COMMAND_BODY_BYTES
    for act in (
        lambda: pack_payload(messages.NodeRebootPayload(reason=long)),
        lambda: encode_result(KINDS["node.reboot"], messages.NodeRebootResult(boot_id=long)),
        lambda: decode_result(KINDS["node.reboot"], bytes(MAX_COMMAND_BODY_BYTES + 1)),
    ):
        with pytest.raises(ProtocolError) as caught:
            act()
        assert caught.value.code is ProtocolCode.FRAME_TOO_LARGE


def test_result_round_trip():
    kind = KINDS["gpu.reset"]
    result = messages.GpuResetResult(gpus=[messages.GpuResetOutcome(uuid="GPU-1", reset=True)])
    assert decode_result(kind, encode_result(kind, result)) == result


def test_a_result_of_another_kind_is_a_bug():
    with pytest.raises(AssertionError, match=r"a gpu\.reset ends with GpuResetResult"):
        encode_result(KINDS["gpu.reset"], messages.NodeRebootResult())
