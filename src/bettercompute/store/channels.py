"""Every NOTIFY channel and what its payload means. A notification is a hint: every listener also polls."""

from __future__ import annotations

from collections.abc import Iterable

# Node ids, separated by commas, that have a new command which may go at once. `*` means any node.
COMMANDS = "bc_commands"
# Node ids that have something else to be sent, or may have anything: a command for later, a cancel, a newer spec.
DISPATCH = "bc_dispatch"
# A certificate was revoked. Payload: node ids, or `*`.
REVOCATIONS = "bc_revocations"
# Outbox rows were committed and wait for their position. No payload.
OUTBOX = "bc_outbox"
# Positions were assigned: readers of the stream may read on. Payload: the last position.
STREAM = "bc_stream"
# Commands came to their end: those who wait for them may look. Payload: command ids, or `*`.
FINISHED = "bc_finished"
# A newer trust bundle was published. Payload: its version.
TRUST = "bc_trust"
# An operator has said something to gateways: drain, or drain no more. Payload: gateway ids.
GATEWAYS = "bc_gateways"
# A Hello tells what the node's own controllers must look at: a restart, another journal, a generation above the node's.
# Payload: its node id.
NODES = "bc_nodes"

ANY = "*"
# PostgreSQL takes payloads of less than 8,000 bytes.
PAYLOAD_BYTES_MAX = 7_900
# Beyond this many payloads in one transaction a listener is better off to look at everything it holds.
PAYLOADS_MAX = 16


def payloads(names: Iterable[str]) -> list[str]:
    """Pack names into as few payloads as hold them, or into the one that means any of them."""
    packed: list[str] = []
    for name in sorted(set(names)):
        if packed and len(packed[-1]) + 1 + len(name) <= PAYLOAD_BYTES_MAX:
            packed[-1] += f",{name}"
        elif len(packed) == PAYLOADS_MAX:
            return [ANY]
        else:
            packed.append(name)
    return packed


def names(payload: str) -> frozenset[str] | None:
    """Return the names in a payload, or None where it means any."""
    return None if payload == ANY else frozenset(payload.split(",")) - {""}
