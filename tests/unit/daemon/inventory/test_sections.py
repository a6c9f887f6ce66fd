"""Every section of two recorded machines: a large server with everything, and a guest with next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import bettercompute
from bettercompute.daemon.inventory import cpu, disks, gpus, memory, network, pci, software, system
from bettercompute.daemon.inventory.host import HostRoot, InterfaceAddress, Reason, Unreadable
from bettercompute.protocol import messages
from tests.unit.daemon.inventory.recorded import host_at, recorded_host

GIB = 1 << 30


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> HostRoot:
    ipv4 = {"bond0": "192.0.2.10/24", "docker0": "172.17.0.1/16", "ib0": "169.254.7.7/16"}
    return recorded_host(tmp_path_factory.mktemp("server"), "gpu_server", ipv4=ipv4)


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> HostRoot:
    return recorded_host(tmp_path_factory.mktemp("guest"), "firecracker_vm", ipv4={"eth0": "192.0.2.2/24"})


def gaps(section: object) -> dict[str, str]:
    return {gap.what: gap.reason for gap in section.unreadable}  # type: ignore[attr-defined]  # every section has them


class DeniedRoot(HostRoot):
    """A machine where an ordinary user may not read what is below these places."""

    PLACES = (
        "sys/class/dmi/id/product_",
        "sys/class/dmi/id/board_serial",
        "sys/firmware/dmi",
        "sys/firmware/efi/efivars",
    )

    def data(self, path: str, *, limit_bytes: int = 1 << 20) -> bytes:
        if path.startswith(self.PLACES):
            raise Unreadable(path, Reason("permission-denied"))
        return HostRoot.data(self, path, limit_bytes=limit_bytes)


def as_ordinary_user(root: HostRoot) -> HostRoot:
    return DeniedRoot(folder=root.folder, calls=root.calls)


def test_system_of_the_server(server: HostRoot) -> None:
    section = system.collect(server)
    assert section.hostname == "gpu-r12-u07"
    assert section.machine_id == "9f86d081884c7d659a2feaa0c55ad015"
    assert section.boot_id == "0d0f6b1a-52cf-4c5e-9d4c-6a5a36d9c3f1"
    assert (section.vendor, section.product) == ("Supermicro", "SYS-421GE-TNRT")
    assert section.serial == "S512345X3A00042"
    assert section.uuid == "1f0c2a00-6d3e-11ee-8000-3cecefaabbcc"
    assert (section.board_name, section.board_serial) == ("X13DEG-OA", "HM23CS600042")
    assert (section.chassis_type, section.chassis_serial) == (23, "C8470AM31N40042")
    assert (section.bios_version, section.bios_date) == ("2.1", "01/29/2024")
    assert section.virtualization == ""
    assert section.uefi
    assert section.secure_boot
    assert (section.tpm_version, section.bmc_device) == ("2.0", "ipmi0")
    # What nobody filled in is not passed on as an identity.
    assert (section.product_version, section.asset_tag) == ("", "")
    assert gaps(section).keys() == {"/sys/class/dmi/id/product_version", "/sys/class/dmi/id/chassis_asset_tag"}


def test_system_of_the_guest(guest: HostRoot) -> None:
    section = system.collect(guest)
    assert section.virtualization == "vm"
    assert section.machine_id
    assert not section.uefi
    assert not section.HasField("secure_boot")
    assert gaps(section) == {"/sys/class/dmi/id": "not-found: this machine's firmware has no DMI table"}


def test_an_ordinary_user_gets_the_rest_and_the_reasons(server: HostRoot) -> None:
    section = system.collect(as_ordinary_user(server))
    assert section.vendor == "Supermicro"
    assert section.serial == ""
    assert gaps(section)["/sys/class/dmi/id/product_serial"] == "permission-denied"
    assert gaps(section)["/sys/class/dmi/id/product_uuid"] == "permission-denied"
    assert not section.HasField("secure_boot")

    slots = memory.collect(as_ordinary_user(server))
    assert slots.total_bytes > 0
    assert not slots.modules
    assert gaps(slots) == {"/sys/firmware/dmi/tables/DMI": "permission-denied"}


@pytest.mark.parametrize(
    ("files", "technology"),
    [
        ({"run/systemd/container": "lxc"}, "lxc"),
        ({".dockerenv": ""}, "docker"),
        ({"run/.containerenv": ""}, "podman"),
        ({}, "container"),
    ],
)
def test_a_container_is_told_by_its_pid_namespace(tmp_path: Path, files: dict[str, str], technology: str) -> None:
    namespace = tmp_path / "proc/self/ns/pid"
    namespace.parent.mkdir(parents=True)
    namespace.symlink_to("pid:[4026532777]")
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert system.collect(host_at(tmp_path)).virtualization == technology


def test_a_disk_made_from_an_image_is_no_container(tmp_path: Path) -> None:
    namespace = tmp_path / "proc/self/ns/pid"
    namespace.parent.mkdir(parents=True)
    namespace.symlink_to(system.FIRST_PID_NAMESPACE)
    (tmp_path / ".dockerenv").touch()
    assert system.collect(host_at(tmp_path)).virtualization == ""


@pytest.mark.parametrize(
    ("vendor", "product", "technology"),
    [
        ("QEMU", "Standard PC (Q35 + ICH9, 2009)", "kvm"),
        ("VMware, Inc.", "VMware7,1", "vmware"),
        ("Microsoft Corporation", "Virtual Machine", "hyperv"),
        ("Microsoft Corporation", "Surface Laptop", ""),
        ("Amazon EC2", "m7i.large", "amazon"),
    ],
)
def test_hypervisors_by_what_the_firmware_says(tmp_path: Path, vendor: str, product: str, technology: str) -> None:
    for name, content in (("sys_vendor", vendor), ("product_name", product)):
        path = tmp_path / "sys/class/dmi/id" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    namespace = tmp_path / "proc/self/ns/pid"
    namespace.parent.mkdir(parents=True)
    namespace.symlink_to(system.FIRST_PID_NAMESPACE)
    found = system.collect(host_at(tmp_path)).virtualization
    assert found == technology
    assert not system.is_container(found)


def test_cpu_of_the_server(server: HostRoot) -> None:
    section = cpu.collect(server)
    assert section.architecture == "x86_64"
    assert (section.online, section.possible, section.cores, section.threads_per_core) == (8, 8, 4, 2)
    assert [(socket.number, socket.cores, socket.threads) for socket in section.sockets] == [(0, 2, 4), (1, 2, 4)]
    first = section.sockets[0]
    assert (first.vendor, first.model_name) == ("GenuineIntel", "Intel(R) Xeon(R) Platinum 8480+")
    assert (first.family, first.model, first.stepping, first.microcode) == (6, 143, 8, "0x2b000571")
    assert first.frequency_max_khz == 3_800_000
    assert "avx512f" in section.flags
    assert section.virtualization == "vmx"
    assert section.isolated == "2-3"
    assert {entry.name: entry.status for entry in section.vulnerabilities}["meltdown"] == "Not affected"
    assert [(cache.level, cache.size_bytes) for cache in section.caches][-1] == (3, 107_520 << 10)
    assert not section.unreadable


def test_cpu_of_the_guest(guest: HostRoot) -> None:
    section = cpu.collect(guest)
    assert (section.online, section.cores, section.threads_per_core) == (2, 2, 1)
    assert section.sockets[0].model_name == "AMD EPYC"
    assert section.sockets[0].frequency_max_khz == 0


def test_an_arm_processor_without_topology(tmp_path: Path) -> None:
    text = "processor\t: {}\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("\n".join(text.format(number) for number in range(2)))
    online = tmp_path / "sys/devices/system/cpu/online"
    online.parent.mkdir(parents=True)
    online.write_text("0-1\n")
    section = cpu.collect(host_at(tmp_path))
    assert (section.cores, section.sockets[0].vendor, section.sockets[0].model) == (2, "0x41", 0xD0C)
    assert set(section.flags) == {"asimd", "fp"}


def test_memory_of_the_server(server: HostRoot) -> None:
    section = memory.collect(server)
    assert section.total_bytes == 2_113_459_212 << 10
    assert section.swap_total_bytes == 8_388_604 << 10
    assert section.page_size_bytes == 4096
    assert [(pages.size_bytes, pages.reserved) for pages in section.huge_pages] == [(GIB, 16), (2 << 20, 1024)]
    first, second = section.numa_nodes
    assert (first.number, first.cpus, list(first.distances)) == (0, "0-1,4-5", [10, 21])
    assert first.memory_bytes == 1_056_720_606 << 10
    assert [(pages.size_bytes, pages.reserved) for pages in second.huge_pages] == [(GIB, 0), (2 << 20, 512)]
    assert section.transparent_huge_pages == "madvise"
    assert section.ecc_controllers[0] == "mc0 Intel_10nm Socket#0 IMC#0"
    slots = {module.locator: module for module in section.modules}
    assert slots["P1-DIMMA1"].size_bytes == 64 * GIB
    assert (slots["P1-DIMMA1"].type, slots["P1-DIMMA1"].speed_mts) == ("DDR5", 4800)
    assert slots["P2-DIMMA1"].serial == "80CE032338A1B2C3D5"
    assert slots["P1-DIMMA2"] == messages.MemoryModule(locator="P1-DIMMA2"), "an empty slot has no maker"
    assert not section.unreadable


def test_memory_of_the_guest(guest: HostRoot) -> None:
    section = memory.collect(guest)
    # The blocks tell what is there while the kernel, which initializes this guest's memory late, still says 4 GB.
    assert [node.memory_bytes for node in section.numa_nodes] == [192 * (128 << 20)]
    assert section.cgroup_limit_bytes == 0
    assert gaps(section) == {"/sys/firmware/dmi/tables/DMI": "not-found"}


@pytest.mark.parametrize(
    ("path", "content", "limit_bytes"),
    [
        ("sys/fs/cgroup/memory.max", "536870912", 512 << 20),
        ("sys/fs/cgroup/memory.max", "max", 0),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712", 0),
    ],
)
def test_the_limit_of_a_control_group(tmp_path: Path, path: str, content: str, limit_bytes: int) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(content)
    assert memory.collect(host_at(tmp_path)).cgroup_limit_bytes == limit_bytes


def test_disks_of_the_server(server: HostRoot) -> None:
    section = disks.collect(server)
    found = {disk.name: disk for disk in section.disks}
    assert found.keys() == {"nvme0n1", "sda", "sdb", "md0"}, "no loop, RAM, device-mapper or empty optical drive"
    nvme, sata, sas, raid = found["nvme0n1"], found["sda"], found["sdb"], found["md0"]
    assert (nvme.model, nvme.serial) == ("SAMSUNG MZQL23T8HCLS-00A07", "S64HNE0R500042")
    assert (nvme.transport, nvme.pci_address, nvme.numa_node) == ("nvme", "0000:02:00.0", 0)
    assert (nvme.wwn, nvme.firmware) == ("eui.36344830525000420025384500000001", "GDC5602Q")
    assert nvme.by_id == "nvme-SAMSUNG_MZQL23T8HCLS-00A07_S64HNE0R500042"
    assert (nvme.size_bytes, nvme.physical_block_bytes, nvme.rotational) == (7_501_476_528 * 512, 4096, False)
    assert [(part.number, part.label) for part in nvme.partitions] == [(1, "EFI"), (2, "root"), (3, "swap")]
    assert nvme.partitions[0].uuid == "2f6f0b6e-8a4e-4a8f-9a52-2a5d3c0e0001"
    assert nvme.partitions[0].start_bytes == 1 << 20
    assert (sata.transport, sata.vendor, sata.serial) == ("sata", "", "S6ESNE0T600042")
    assert (sas.transport, sas.vendor, sas.serial, sas.wwn) == ("sas", "SEAGATE", "ZR500042", "naa.5000c500d9a10042")
    assert (sas.rotational, sas.read_only) == (True, True)
    assert (raid.model, raid.transport) == ("software raid1", "md")
    assert not section.unreadable


def test_mounts_of_the_server(server: HostRoot) -> None:
    mounts = {mount.mount_point: mount for mount in disks.collect(server).mounts}
    assert mounts.keys() == {"/", "/boot/efi", "/srv/a disk"}, "no bind, image, guest's volume or network mount"
    assert (mounts["/"].source, mounts["/"].type, mounts["/"].size_bytes) == ("/dev/nvme0n1p2", "ext4", 10**12)
    assert mounts["/boot/efi"].read_only


def test_disks_of_the_guest(guest: HostRoot) -> None:
    section = disks.collect(guest)
    assert [(disk.name, disk.transport, disk.vendor) for disk in section.disks] == [("vda", "virtio", "")]
    assert section.disks[0].size_bytes == 256 * GIB
    assert section.disks[0].serial == "7301422618903355"
    assert [mount.mount_point for mount in section.mounts] == ["/"]


def test_network_of_the_server(server: HostRoot) -> None:
    section = network.collect(server)
    found = {interface.name: interface for interface in section.interfaces}
    assert found.keys() == {"bond0", "bond0.2007", "docker0", "ens1f0np0", "ens1f1np1", "ib0"}, "no loopback, no veth"
    assert {name: interface.kind for name, interface in found.items()} == {
        "bond0": "bond",
        "bond0.2007": "vlan",
        "docker0": "bridge",
        "ens1f0np0": "ethernet",
        "ens1f1np1": "ethernet",
        "ib0": "infiniband",
    }
    port = found["ens1f1np1"]
    assert (port.mac_address, port.permanent_mac_address) == ("b8:3f:d2:00:42:10", "b8:3f:d2:00:42:11")
    assert (port.driver, port.pci_address, port.numa_node, port.master) == ("mlx5_core", "0000:38:00.1", 0, "bond0")
    assert (port.mtu_bytes, port.speed_mbps, port.up, port.carrier) == (9000, 100_000, True, True)
    assert (port.sriov_functions, port.sriov_functions_max) == (0, 8)
    assert found["ens1f0np0"].permanent_mac_address == ""
    # Neither the temporary (privacy) nor the link-local addresses, of either family.
    assert set(found["bond0"].addresses) == {"192.0.2.10/24", "2001:db8:0:7::42/64"}
    assert not found["ib0"].addresses
    assert not found["docker0"].HasField("speed_mbps")
    assert [(route.family, route.gateway, route.metric) for route in section.default_routes] == [
        (4, "192.0.2.1", 100),
        (6, "2001:db8:0:7::1", 1024),
    ]
    assert list(section.name_servers) == ["192.0.2.53", "2001:db8::53"]


def test_network_of_the_guest(guest: HostRoot) -> None:
    section = network.collect(guest)
    interface = next(interface for interface in section.interfaces if interface.name == "eth0")
    assert (interface.kind, interface.driver, interface.pci_address) == ("ethernet", "virtio_net", "0000:00:03.0")
    assert set(interface.addresses) == {"192.0.2.2/24", "fd00::2/64"}
    assert not interface.HasField("numa_node")


def test_a_containers_own_veth_is_shown(server: HostRoot) -> None:
    addresses = [InterfaceAddress(interface="veth1a2b3c4", address="10.1.2.3/24")]
    section = network.collect(host_at(server.folder, addresses=addresses))
    assert [entry.kind for entry in section.interfaces if entry.name == "veth1a2b3c4"] == ["veth"]


@pytest.mark.parametrize(("flags", "kind"), [("0x1002", "tap"), ("0x1001", "tun")])
def test_tunnels(tmp_path: Path, flags: str, kind: str) -> None:
    folder = tmp_path / "sys/class/net/vnet3"
    folder.mkdir(parents=True)
    (folder / "tun_flags").write_text(flags)
    (folder / "ifindex").write_text("7")
    addresses = [InterfaceAddress(interface="vnet3", address="10.0.0.1/24")]
    assert [entry.kind for entry in network.collect(host_at(tmp_path, addresses=addresses)).interfaces] == [kind]
    assert len(network.collect(host_at(tmp_path)).interfaces) == (0 if kind == "tap" else 1)


def test_pci_of_the_server(server: HostRoot) -> None:
    functions = {function.address: function for function in pci.collect(server).functions}
    accelerator = functions["0000:1b:00.0"]
    assert (accelerator.class_code, accelerator.vendor_id, accelerator.device_id) == (0x030200, 0x10DE, 0x2330)
    assert (accelerator.subsystem_vendor_id, accelerator.subsystem_device_id) == (0x10DE, 0x16C1)
    assert (accelerator.driver, accelerator.numa_node, accelerator.iommu_group) == ("nvidia", 0, 25)
    assert (accelerator.vendor_name, accelerator.device_name) == ("NVIDIA Corporation", "GH100 [H100 SXM5 80GB]")
    # It sits in a slot with half of its lanes; the present speed depends on the load and is not told.
    assert (accelerator.link_width, accelerator.link_width_max) == (8, 16)
    assert (accelerator.link_speed, accelerator.link_speed_max) == ("", "32.0 GT/s PCIe")
    assert functions["0000:9b:00.0"].driver == "vfio-pci"
    assert functions["0000:17:00.0"].device_name == "", "not in this host's list of names"


def test_pci_of_the_guest(guest: HostRoot) -> None:
    section = pci.collect(guest)
    assert len(section.functions) == 6
    assert section.functions[0].driver == ""
    assert not section.functions[0].HasField("numa_node")
    assert not section.functions[0].HasField("iommu_group")
    assert not section.unreadable


def test_software_of_the_server(server: HostRoot) -> None:
    section = software.collect(server)
    assert (section.os_id, section.os_version, section.os_name) == ("ubuntu", "22.04", "Ubuntu 22.04.4 LTS")
    assert section.kernel_release == "5.15.0-105-generic"
    assert section.daemon_version == bettercompute.__version__
    assert (section.init, section.libc_version) == ("systemd 249.11-0ubuntu3.12", "glibc 2.35")
    assert (section.time_zone, section.cgroup_version) == ("Europe/Berlin", 2)
    assert section.clock_synchronized
    versions = {program.name: program.version for program in section.programs}
    assert versions["dockerd"] == "5:26.1.0-1~ubuntu.22.04~jammy"
    assert versions["kubelet"] == "1.29.4-2.1", "a package that is on hold is installed"
    assert versions["containerd"] == "1.6.31-1", "the description has a line that looks like a version"
    assert versions["libvirtd"] == "", "its package was removed; the file was put there by hand"
    assert set(section.kernel_modules) == {"kvm", "kvm_intel", "mlx5_core", "nvidia", "vfio_pci"}
    assert not section.unreadable


def test_no_secret_of_the_command_line_leaves_the_host(server: HostRoot) -> None:
    line = software.collect(server).kernel_command_line
    assert "hunter2" not in line
    assert "provision_token=*** quiet" in line
    assert "intel_iommu=on" in line


def test_software_of_the_guest(guest: HostRoot) -> None:
    section = software.collect(guest)
    assert section.os_id == "debian"
    assert section.cgroup_version == 1
    assert not section.HasField("clock_synchronized")
    assert [(program.name, program.path) for program in section.programs] == [("systemctl", "/usr/bin/systemctl")]


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("lib/apk/db/installed", "C:Q1\nP:podman\nV:5.0.2-r1\nA:x86_64\n\nC:Q2\nP:musl\nV:1.2.5-r0\n"),
        ("var/lib/pacman/local/podman-5.0.2-r1/desc", "%NAME%"),
    ],
)
def test_other_package_managers(tmp_path: Path, path: str, content: str) -> None:
    for name, text in ((path, content), ("usr/bin/podman", "")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    found = software.collect(host_at(tmp_path)).programs
    assert [(program.name, program.version) for program in found] == [("podman", "5.0.2-r1")]


@pytest.mark.parametrize(
    "collect",
    [module.collect for module in (system, cpu, memory, disks, network, pci, gpus, software)],
    ids=["system", "cpu", "memory", "disks", "network", "pci", "gpus", "software"],
)
def test_a_machine_without_files_gives_every_section(tmp_path: Path, collect: Callable[[HostRoot], object]) -> None:
    collect(host_at(tmp_path))
