"""Which machine this is, and what becomes of an identity that was copied to another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bettercompute.daemon.identity import Identity, IdentityStore, Machine
from bettercompute.daemon.inventory.host import HostRoot
from bettercompute.daemon.machine import check_machine, hardware_claims, read_boot_id, read_machine
from bettercompute.errors import Refused
from tests.unit.daemon.fake_gateway import join, state_config

FILES = {
    "etc/machine-id": "m1\n",
    "proc/sys/kernel/random/boot_id": "b1\n",
    "proc/sys/kernel/hostname": "host-1\n",
    "sys/class/dmi/id/product_uuid": "4C4C4544-AA\n",
    "sys/class/dmi/id/product_serial": "S1\n",
    "sys/class/dmi/id/sys_vendor": "Maker\n",
    "sys/class/net/eth0/address": "02:00:00:00:00:02\n",
    "sys/class/net/eth0/device/x": "",
    "sys/class/net/eth1/address": "02:00:00:00:00:01\n",
    "sys/class/net/eth1/device/x": "",
    "sys/class/net/lo/address": "00:00:00:00:00:00\n",
}


@pytest.fixture
def root(tmp_path: Path) -> HostRoot:
    for name, content in FILES.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return replace(HostRoot.live(), folder=tmp_path / "root")


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    config = state_config(tmp_path)
    join(config)
    store = IdentityStore(config.state_dir)
    store.adopt(Machine(machine_id="m1", dmi_uuid="u1"))
    found = store.load()
    assert found is not None
    return found


def test_a_machine_is_read_and_claims_what_it_is(root: HostRoot) -> None:
    assert read_machine(root) == Machine(machine_id="m1", dmi_uuid="4c4c4544-aa")
    claims = hardware_claims(root, boot_id="b1")
    assert (claims.machine_id, claims.dmi_uuid, claims.serial, claims.board_serial) == ("m1", "4c4c4544-aa", "S1", "")
    assert list(claims.mac_addresses) == ["02:00:00:00:00:01", "02:00:00:00:00:02"]
    assert (claims.hostname, claims.vendor, claims.boot_id) == ("host-1", "Maker", "b1")


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    empty = replace(HostRoot.live(), folder=tmp_path)
    assert read_machine(empty) == Machine()
    assert list(hardware_claims(empty, boot_id="").mac_addresses) == []


def test_the_boot_is_named_by_the_kernel_or_a_configured_file(root: HostRoot) -> None:
    assert read_boot_id(root, None) == "b1"
    (root.folder / "run").mkdir()
    (root.folder / "run/boot").write_text("own\n")
    assert read_boot_id(root, Path("/run/boot")) == "own"
    with pytest.raises(Refused, match=r"/run/none tells no boot id: set reboot\.boot_id_file"):
        read_boot_id(root, Path("/run/none"))


@pytest.mark.parametrize(
    ("machine", "adopt", "warns"),
    [
        (Machine(machine_id="m1", dmi_uuid="u1"), False, False),
        (Machine(), False, False),
        (Machine(machine_id="m2", dmi_uuid="u1"), False, True),
        (Machine(machine_id="m1", dmi_uuid="u2"), False, True),
        (Machine(machine_id="m2", dmi_uuid="u2"), True, True),
    ],
)
def test_one_difference_warns(identity: Identity, machine: Machine, adopt: bool, warns: bool) -> None:
    warning = check_machine(identity, machine, adopt=adopt)
    assert bool(warning) == warns
    if warns:
        assert f"machine id m1 became {machine.machine_id}, DMI uuid u1 became {machine.dmi_uuid}" in warning


def test_both_refuse_with_the_two_cures(identity: Identity) -> None:
    with pytest.raises(Refused, match=r"join this machine anew.*start once with `bcd node --adopt`"):
        check_machine(identity, Machine(machine_id="m2", dmi_uuid="u2"), adopt=False)
