"""The table of command kinds, the same for both sides (docs/protocol.md, "Command kinds").

Adding a kind: declare its payload and result in commands.proto, add a row here, and write its handler, one file under
`daemon/handlers/` with the kind's name. Nothing else knows kinds by name: lanes, resume rules, approval and placement
read the flags.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from bettercompute.protocol import capabilities, messages
from bettercompute.protocol.frames import ProtocolError, decode_message, encode_message
from bettercompute.protocol.limits import MAX_COMMAND_BODY_BYTES, MAX_TIMEOUT_MS
from bettercompute.protocol.versions import UPGRADE_KIND

NODE = messages.AGENT_ROLE_NODE
SITE = messages.AGENT_ROLE_SITE
RAMDISK = messages.AGENT_ROLE_RAMDISK

SECOND_MS = 1_000
MINUTE_MS = 60 * SECOND_MS


class Proof(Enum):
    """What a Hello shows when a self-terminating command, which ends the process that runs it, has had its effect."""

    BOOT_ID = "the boot id differs from the one it was sent to"
    BOOT_ID_AND_ROLE = "the boot id and the role differ from those it was sent to"
    DAEMON_VERSION = "the daemon's version is the payload's target_version"


@dataclass(frozen=True, slots=True)
class CommandKind:
    """What delivery must know of a kind."""

    name: str
    lane: messages.Lane.ValueType
    # May run again when it is not known whether it ran.
    retry_safe: bool
    # Ends the daemon that runs it; `proof` says how its success is seen afterwards.
    self_terminating: bool
    # Its terminal update is signed by the node.
    attested: bool
    # Counts against the approver set's quorum, in the tier `destructive_tier`.
    destructive: bool
    roles: frozenset[messages.AgentRole.ValueType]
    payload: type[messages.ProtoMessage]
    result: type[messages.ProtoMessage]
    # How long it may run when nobody says otherwise.
    timeout_ms: int
    proof: Proof | None = None
    destructive_tier: messages.DestructiveTier.ValueType = messages.DESTRUCTIVE_TIER_UNSPECIFIED
    # What the daemon must advertise before the kind is sent to it.
    capability: str | None = None

    def __post_init__(self) -> None:
        assert self.self_terminating == (self.proof is not None), f"{self.name}: only the self-terminating have a proof"
        assert self.destructive == bool(self.destructive_tier), f"{self.name}: only the destructive have a tier"
        assert self.roles, f"{self.name}: some role must be able to run it"
        assert 0 < self.timeout_ms <= MAX_TIMEOUT_MS, f"{self.name}: the timeout is {self.timeout_ms} ms"


KINDS: Mapping[str, CommandKind] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            CommandKind(
                name="diag.nvml",
                lane=messages.LANE_CONTROL,
                retry_safe=True,
                self_terminating=False,
                attested=True,
                destructive=False,
                roles=frozenset({NODE, RAMDISK}),
                payload=messages.DiagNvmlPayload,
                result=messages.DiagNvmlResult,
                timeout_ms=MINUTE_MS,
            ),
            CommandKind(
                name="inventory.refresh",
                lane=messages.LANE_CONTROL,
                retry_safe=True,
                self_terminating=False,
                attested=False,
                destructive=False,
                roles=frozenset({NODE, SITE, RAMDISK}),
                payload=messages.InventoryRefreshPayload,
                result=messages.InventoryRefreshResult,
                timeout_ms=2 * MINUTE_MS,
            ),
            CommandKind(
                name="logs.collect",
                lane=messages.LANE_BULK,
                retry_safe=True,
                self_terminating=False,
                attested=False,
                destructive=False,
                roles=frozenset({NODE, SITE, RAMDISK}),
                payload=messages.LogsCollectPayload,
                result=messages.LogsCollectResult,
                timeout_ms=15 * MINUTE_MS,
            ),
            CommandKind(
                name="node.reboot",
                lane=messages.LANE_CONTROL,
                retry_safe=True,
                self_terminating=True,
                attested=False,
                destructive=True,
                roles=frozenset({NODE, SITE}),
                payload=messages.NodeRebootPayload,
                result=messages.NodeRebootResult,
                # From the start to the end of the process; how long the machine takes to come back is not bounded.
                timeout_ms=5 * MINUTE_MS,
                proof=Proof.BOOT_ID,
                destructive_tier=messages.DESTRUCTIVE_TIER_NODE,
                capability=capabilities.REBOOT,
            ),
            CommandKind(
                name="gpu.reset",
                lane=messages.LANE_CONTROL,
                retry_safe=False,
                self_terminating=False,
                attested=True,
                destructive=True,
                roles=frozenset({NODE}),
                payload=messages.GpuResetPayload,
                result=messages.GpuResetResult,
                timeout_ms=5 * MINUTE_MS,
                destructive_tier=messages.DESTRUCTIVE_TIER_NODE,
            ),
            CommandKind(
                name=UPGRADE_KIND,
                # A transfer; and an upgrade-only session runs nothing that could stand before it.
                lane=messages.LANE_BULK,
                retry_safe=True,
                self_terminating=True,
                attested=False,
                destructive=False,
                roles=frozenset({NODE, SITE}),
                payload=messages.DaemonUpgradePayload,
                result=messages.DaemonUpgradeResult,
                timeout_ms=15 * MINUTE_MS,
                proof=Proof.DAEMON_VERSION,
            ),
        )
    }
)


def pack_payload(payload: messages.ProtoMessage) -> messages.PackedMessage:
    """Return the payload as CommandBody carries it.

    Raises:
        ProtocolError: FRAME_TOO_LARGE over 1 MiB.
    """
    encode_message(payload, limit=MAX_COMMAND_BODY_BYTES)
    packed = messages.PackedMessage()
    packed.Pack(payload, deterministic=True)
    return packed


def unpack_payload(kind: CommandKind, body: messages.CommandBody) -> messages.ProtoMessage:
    """Return the body's payload as the kind's message; one that is absent is the message with nothing set.

    Raises:
        ProtocolError: the payload is another message, does not decode or is over 1 MiB.
    """
    payload = kind.payload()
    if not body.HasField("payload"):
        return payload
    packed = body.payload
    expected = kind.payload.DESCRIPTOR.full_name
    if packed.TypeName() != expected:
        raise ProtocolError(f"the payload of a {kind.name} is {packed.type_url!r}: it must be {expected}")
    return decode_message(kind.payload, packed.value, limit=MAX_COMMAND_BODY_BYTES)


def encode_result(kind: CommandKind, result: messages.ProtoMessage) -> bytes:
    """Return the result as CommandUpdate carries it and as signatures cover it.

    Raises:
        ProtocolError: FRAME_TOO_LARGE over 1 MiB.
    """
    assert isinstance(result, kind.result), (
        f"a {kind.name} ends with {kind.result.__name__}, not {type(result).__name__}"
    )
    return encode_message(result, limit=MAX_COMMAND_BODY_BYTES)


def decode_result(kind: CommandKind, result: bytes) -> messages.ProtoMessage:
    """Return what a CommandUpdate's result says.

    Raises:
        ProtocolError: it does not decode or is over 1 MiB.
    """
    return decode_message(kind.result, result, limit=MAX_COMMAND_BODY_BYTES)
