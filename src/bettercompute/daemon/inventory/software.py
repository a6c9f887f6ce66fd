"""The `software` section: operating system, kernel and the programs and modules that the daemon's features look for.

No program is run to ask for its version: the package manager's database tells it, and a program that was put there by
hand has none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import bettercompute
from bettercompute.daemon.inventory.findings import Findings, key_values
from bettercompute.daemon.inventory.host import NOT_FOUND, HostRoot
from bettercompute.daemon.inventory.packages import installed_versions
from bettercompute.protocol import messages

FOLDERS = ("usr/bin", "usr/sbin", "bin", "sbin", "usr/local/bin", "usr/local/sbin")
_FOLDER_BY_HAND = "usr/local/"
# Each program with the packages that bring it, as the distributions name them.
PROGRAMS: dict[str, tuple[str, ...]] = {
    "chronyd": ("chrony",),
    "cloud-hypervisor": ("cloud-hypervisor",),
    "containerd": ("containerd.io", "containerd"),
    "crio": ("cri-o",),
    "dcgmi": ("datacenter-gpu-manager", "datacenter-gpu-manager-4-core"),
    "dockerd": ("docker-ce", "docker.io", "moby-engine", "docker"),
    "firecracker": ("firecracker",),
    "ipmitool": ("ipmitool",),
    "kexec": ("kexec-tools",),
    "kubelet": ("kubelet",),
    "libvirtd": ("libvirt-daemon", "libvirt"),
    "mdadm": ("mdadm",),
    "nvidia-ctk": ("nvidia-container-toolkit", "nvidia-container-toolkit-base"),
    "nvidia-smi": ("nvidia-utils",),
    "nvme": ("nvme-cli",),
    "podman": ("podman",),
    "qemu-system-x86_64": ("qemu-system-x86", "qemu-system-x86_64"),
    "runc": ("runc", "containerd.io"),
    "sshd": ("openssh-server", "openssh"),
    "systemctl": ("systemd",),
    "virsh": ("libvirt-clients", "libvirt"),
}
KERNEL_MODULES = (
    "amdgpu",
    "br_netfilter",
    "gdrdrv",
    "ib_core",
    "ipmi_si",
    "kvm",
    "kvm_amd",
    "kvm_intel",
    "mlx5_core",
    "nbd",
    "nouveau",
    "nvidia",
    "nvidia_fs",
    "nvidia_peermem",
    "nvidia_uvm",
    "nvme_tcp",
    "overlay",
    "rdma_cm",
    "tun",
    "vfio_pci",
    "vhost_net",
    "vhost_vsock",
    "wireguard",
)
_SECRET_PARAMETER = re.compile(
    r"(?i)(\S*(?:passw|secret|token|credential|api_?key|private_?key)[^\s=]*)=(\"[^\"]*\"|\S+)"
)


def collect(root: HostRoot) -> messages.SoftwareInventory:
    """Return the software; the daemon's own version is this process's, whatever machine the files are of."""
    findings = Findings(root)
    versions = installed_versions(findings)
    release = _os_release(findings)
    init = findings.optional("proc/1/comm")
    section = messages.SoftwareInventory(
        os_id=release.get("ID", ""),
        os_version=release.get("VERSION_ID", ""),
        os_name=release.get("PRETTY_NAME", ""),
        kernel_release=findings.expected("proc/sys/kernel/osrelease"),
        kernel_version=findings.expected("proc/sys/kernel/version"),
        kernel_command_line=_SECRET_PARAMETER.sub(r"\1=***", findings.expected("proc/cmdline")),
        libc_version=root.calls.libc_version,
        init=f"{init} {versions.get(init, '')}".strip(),
        daemon_version=bettercompute.__version__,
        time_zone=_time_zone(findings),
        cgroup_version=_cgroup_version(root),
    )
    if root.exists("run/systemd/timesync/synchronized"):
        section.clock_synchronized = True
    section.programs.extend(_programs(findings, versions))
    section.kernel_modules.extend(name for name in KERNEL_MODULES if root.exists(f"sys/module/{name}"))
    section.unreadable.extend(findings.unreadable())
    return section


def _os_release(findings: Findings) -> dict[str, str]:
    text = findings.optional("etc/os-release") or findings.optional("usr/lib/os-release")
    if not text:
        findings.gap("/etc/os-release", NOT_FOUND)
    return {key: value.strip("\"'") for key, value in key_values(text, separator="=").items()}


def _time_zone(findings: Findings) -> str:
    """Return the zone by the link that systemd keeps, else by Debian's file."""
    _, inside, zone = findings.root.link_target("etc/localtime").partition("zoneinfo/")
    return zone if inside else findings.optional("etc/timezone")


def _cgroup_version(root: HostRoot) -> int:
    if root.exists("sys/fs/cgroup/cgroup.controllers"):
        return 2
    return 1 if root.exists("sys/fs/cgroup/memory") else 0


def _programs(findings: Findings, versions: dict[str, str]) -> Iterator[messages.Program]:
    for name, packages in PROGRAMS.items():
        path = next((f"{folder}/{name}" for folder in FOLDERS if findings.root.exists(f"{folder}/{name}")), "")
        if path:
            packaged = () if path.startswith(_FOLDER_BY_HAND) else packages
            version = next((versions[package] for package in packaged if package in versions), "")
            yield messages.Program(name=name, path=f"/{path}", version=version)
