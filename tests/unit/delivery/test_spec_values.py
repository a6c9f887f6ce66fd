"""What the values of a spec may be, and what is said of those that are not taken."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bettercompute.delivery import spec_values
from bettercompute.protocol import messages

MIB_2, GIB = 2**21, 2**30
KEYS = '{"keys": [{"kty": "EC", "crv": "P-256", "x": "x", "y": "y"}]}'


def daemon(**fields: object) -> messages.NodeSpec:
    return messages.NodeSpec(daemon=messages.DaemonSection(**fields))  # type: ignore[arg-type]  # test data


def access(**fields: object) -> messages.NodeSpec:
    return messages.NodeSpec(access=messages.AccessSection(**{"ticket_jwks": KEYS, **fields}))  # type: ignore[arg-type]


def pages(*entries: tuple[int, int, int | None]) -> messages.NodeSpec:
    spec = messages.NodeSpec(host=messages.HostSection())
    for size, count, node in entries:
        spec.host.huge_pages.add(size_bytes=size, count=count, numa_node=node)
    return spec


TAKEN: list[Callable[[], messages.NodeSpec]] = [
    daemon,
    lambda: daemon(log_level="debug", status_interval_ms=10_000, inventory_interval_ms=60_000, pinned_version="1.4.2"),
    lambda: access(ops=["exec", "ssh", "tcp"], exec_environment=["LANG", "_x1"], tunnels_max=16),
    lambda: access(ticket_jwks=""),
    lambda: pages((MIB_2, 512, None), (GIB, 4, None)),
    lambda: pages((MIB_2, 512, 0), (MIB_2, 512, 1), (GIB, 0, None)),
]
REFUSED: list[tuple[Callable[[], messages.NodeSpec], str]] = [
    (lambda: daemon(log_level="loud"), "daemon.log_level is 'loud': it must be one of debug"),
    (lambda: daemon(status_interval_ms=9_999), "daemon.status_interval_ms is 9999: it must be 0"),
    (lambda: daemon(inventory_interval_ms=59_999), "daemon.inventory_interval_ms is 59999"),
    (lambda: daemon(inventory_interval_ms=7 * 86_400_000 + 1), "daemon.inventory_interval_ms is 604800001"),
    (lambda: daemon(pinned_version="../1"), "daemon.pinned_version is '../1'"),
    (lambda: access(ops=["exec", "root"]), "access.ops[1] is 'root': it must be one of exec, ssh, tcp"),
    (lambda: access(ticket_jwks="", ops=["exec"]), "access.ticket_jwks is '': it must hold the keys"),
    (lambda: access(ticket_jwks="[]"), "it must be a JSON Web Key Set with at least one key"),
    (lambda: access(ticket_jwks="{"), "it must be a JSON Web Key Set"),
    (lambda: access(ticket_jwks="[" * 5_000), "it must be a JSON Web Key Set"),
    (lambda: access(ticket_jwks='{"keys": [{"d": "x"}]}'), "public keys only"),
    (lambda: access(exec_environment=["A=B"]), "access.exec_environment[0] is 'A=B'"),
    (lambda: access(tunnels_max=17), "access.tunnels_max is 17: it must be at most 16"),
    (lambda: pages((3 * MIB_2, 1, None)), "host.huge_pages[0].size_bytes is 6291456: it must be a power of two"),
    (lambda: pages((0, 1, None)), "host.huge_pages[0].size_bytes is 0"),
    (lambda: pages((MIB_2, 2**25 + 1, None)), "host.huge_pages[0].count is 33554433: it must be at most 33554432"),
    (lambda: pages((MIB_2, 1, 1_024)), "host.huge_pages[0].numa_node is 1024"),
    (
        lambda: pages((MIB_2, 1, None), (MIB_2, 2, None)),
        "host.huge_pages[1].size_bytes is 2097152: it must be given once",
    ),
    (lambda: pages((MIB_2, 1, None), (MIB_2, 2, 1)), "either for each NUMA node or for the whole host"),
]


def section(spec: messages.NodeSpec) -> str:
    [(field, _)] = spec.ListFields()
    return field.name


@pytest.mark.parametrize("index", range(len(TAKEN)))
def test_what_is_taken(index: int) -> None:
    spec = TAKEN[index]()
    assert spec_values.faults(spec, section(spec)) == []


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_what_is_not_taken_is_named_with_its_path_value_and_limit(index: int) -> None:
    made, said = REFUSED[index]
    spec = made()
    [fault] = spec_values.faults(spec, section(spec))
    assert said in fault.sentence()


def test_other_sections_have_no_rules_yet() -> None:
    assert spec_values.faults(messages.NodeSpec(devices=messages.DevicesSection()), "devices") == []
