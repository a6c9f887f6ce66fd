"""What the two sides can do beyond the protocol version, by name (docs/protocol.md, "Capabilities").

A daemon claims capabilities for itself in each Hello. The control plane keeps the well-formed ones and shows each as a
system label, on which placement and refusals depend, so that an older daemon never gets a field it would silently drop.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bettercompute.protocol.limits import MAX_CAPABILITIES

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
LABEL_PREFIX = "bc.dev/cap."
LABEL_VALUE = "1"

CDI = "cdi"
DEVICES_LIMITS = "devices.limits"
BINDING_KUBERNETES = "binding.kubernetes"
NVML = "nvml"
REBOOT = "reboot"
TUNNEL_INSTANCE_DIAL = "tunnel.instance-dial"
INSTANCE_NETWORK_POLICY = "instance.network-policy"
INSTANCE_SSH_HOST_ONLY = "instance.ssh-host-only"
INSTANCE_PLACEMENT = "instance.placement"
INSTANCE_VOLUMES = "instance.volumes"


@dataclass(frozen=True, slots=True)
class Capability:
    """One capability that this release knows: who advertises it, and what is refused without it."""

    name: str
    advertised_by: str
    needed_by: str


_GPU_NODE = "a node with GPUs"
_INSTANCE_HOST = "a node agent with an instance runtime that enforces it"

# Names that are not here are kept and labelled all the same: they may mean something to a newer gateway or an operator.
CAPABILITIES: Mapping[str, Capability] = MappingProxyType(
    {
        row.name: row
        for row in (
            Capability(CDI, _GPU_NODE, "nothing; shown, and usable in selectors"),
            Capability(DEVICES_LIMITS, _GPU_NODE, "reservations that book host resources with devices"),
            Capability(BINDING_KUBERNETES, _GPU_NODE, "reservations with binding `kubernetes`"),
            Capability(
                NVML, "a node whose inventory reports a CUDA driver version", "nothing; shown, and usable in selectors"
            ),
            Capability(
                REBOOT,
                "a daemon whose boot id is its own, or one configured with a reboot command and a boot id file",
                "`node.reboot`",
            ),
            Capability(
                TUNNEL_INSTANCE_DIAL, "a node agent that runs an instance runtime", "instance ssh and tcp tunnels"
            ),
            Capability(INSTANCE_NETWORK_POLICY, _INSTANCE_HOST, "placing an instance with a network policy"),
            Capability(INSTANCE_SSH_HOST_ONLY, _INSTANCE_HOST, "placing an instance with ssh from its host only"),
            Capability(
                INSTANCE_PLACEMENT, _INSTANCE_HOST, "placing an instance that asks for processors or NUMA nodes"
            ),
            Capability(INSTANCE_VOLUMES, _INSTANCE_HOST, "placing an instance with volumes"),
        )
    }
)

# What a gateway says of itself in Welcome.gateway_capabilities.
UPDATE_BATCH = "update-batch"  # it reads AgentFrame.updates; without it a daemon sends one frame for each update
GATEWAY_CAPABILITIES = (UPDATE_BATCH,)


def normalise(names: Iterable[str]) -> tuple[str, ...]:
    """Return the well-formed names, each once, sorted, the first 64 of them: what is stored of a Hello."""
    return tuple(sorted({name for name in names if NAME.fullmatch(name)})[:MAX_CAPABILITIES])


def labels(names: Iterable[str]) -> dict[str, str]:
    """Return the system labels that stand for these capabilities.

    They replace those of the Hello before: what is no longer advertised loses its label.
    """
    return {LABEL_PREFIX + name: LABEL_VALUE for name in normalise(names)}
