"""The `system` section: which machine this is, by DMI, the machine id and the boot id, and what it runs inside of."""

from __future__ import annotations

from bettercompute.daemon.inventory.findings import Findings, key_values
from bettercompute.daemon.inventory.host import NOT_FOUND, HostRoot, Unreadable
from bettercompute.protocol import messages

DMI = "sys/class/dmi/id"
SECURE_BOOT_VARIABLE = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"

# The kernel's fixed number of the first pid namespace (PROC_PID_INIT_INO): any other means that this is a container.
FIRST_PID_NAMESPACE = "pid:[4026531836]"
UNNAMED_CONTAINER = "container"
UNNAMED_HYPERVISOR = "vm"
# Container technologies by what they leave in their file system; `run/systemd/container` holds the name itself.
_CONTAINER_MARKS = (
    (".dockerenv", "docker"),
    ("run/.containerenv", "podman"),
    ("var/run/secrets/kubernetes.io", "kubernetes"),
)
_HYPERVISORS_BY_DMI = (
    ("amazon ec2", "amazon"),
    ("google compute engine", "google"),
    ("vmware", "vmware"),
    ("virtualbox", "virtualbox"),
    ("innotek", "virtualbox"),
    ("xen", "xen"),
    ("parallels", "parallels"),
    ("openstack", "kvm"),
    ("kvm", "kvm"),
    ("qemu", "kvm"),
    ("bhyve", "bhyve"),
)
_HYPERVISORS = frozenset({name for _, name in _HYPERVISORS_BY_DMI} | {"hyperv", UNNAMED_HYPERVISOR})
_TPM_VERSIONS = {1: "1.2", 2: "2.0"}


def collect(root: HostRoot) -> messages.SystemInventory:
    """Return the machine's identity; serial numbers are readable by root only and else stated as gaps."""
    findings = Findings(root)
    section = messages.SystemInventory(
        hostname=findings.expected("proc/sys/kernel/hostname"),
        machine_id=findings.expected("etc/machine-id"),
        boot_id=findings.expected("proc/sys/kernel/random/boot_id"),
        uefi=root.exists("sys/firmware/efi"),
    )
    _dmi(findings, section)
    section.virtualization = virtualization(findings, vendor=section.vendor, product=section.product)
    _security(findings, section)
    section.unreadable.extend(findings.unreadable())
    return section


def container(root: HostRoot) -> str:
    """Return the container technology that this process runs in, empty for none.

    The pid namespace decides and the marks only name: an image copied onto a disk keeps the marks of its making.
    """
    if root.link_name("proc/self/ns/pid") == FIRST_PID_NAMESPACE:
        return ""
    try:
        named = root.text("run/systemd/container")
    except Unreadable:
        named = ""
    marked = [name for mark, name in _CONTAINER_MARKS if root.exists(mark)]
    return named or next(iter(marked), UNNAMED_CONTAINER)


def is_container(technology: str) -> bool:
    """Return whether a section's `virtualization` names a container, which shares the boot of its host."""
    return technology != "" and technology not in _HYPERVISORS


def virtualization(findings: Findings, *, vendor: str, product: str) -> str:
    """Return the innermost technology around the daemon, empty on bare metal."""
    if inside := container(findings.root):
        return inside
    if findings.optional("sys/hypervisor/type") == "xen":
        return "xen"
    named = f"{vendor} {product}".lower()
    for mark, name in _HYPERVISORS_BY_DMI:
        if mark in named:
            return name
    if "microsoft" in named and "virtual machine" in named:
        return "hyperv"
    flags = key_values(findings.optional("proc/cpuinfo"), separator=":").get("flags", "")
    return UNNAMED_HYPERVISOR if "hypervisor" in flags.split() else ""


def _dmi(findings: Findings, section: messages.SystemInventory) -> None:
    if not findings.root.exists(DMI):
        findings.gap(f"/{DMI}", NOT_FOUND, "this machine's firmware has no DMI table")
        return
    section.vendor = findings.firmware(f"{DMI}/sys_vendor")
    section.product = findings.firmware(f"{DMI}/product_name")
    section.product_version = findings.firmware(f"{DMI}/product_version")
    section.serial = findings.firmware(f"{DMI}/product_serial")
    section.uuid = findings.firmware(f"{DMI}/product_uuid").lower()
    section.board_vendor = findings.firmware(f"{DMI}/board_vendor")
    section.board_name = findings.firmware(f"{DMI}/board_name")
    section.board_serial = findings.firmware(f"{DMI}/board_serial")
    section.chassis_type = findings.number(f"{DMI}/chassis_type") or 0
    section.chassis_serial = findings.firmware(f"{DMI}/chassis_serial")
    section.asset_tag = findings.firmware(f"{DMI}/chassis_asset_tag")
    section.bios_vendor = findings.firmware(f"{DMI}/bios_vendor")
    section.bios_version = findings.firmware(f"{DMI}/bios_version")
    section.bios_date = findings.firmware(f"{DMI}/bios_date")


def _security(findings: Findings, section: messages.SystemInventory) -> None:
    if section.uefi:
        try:
            # Four bytes of attributes, then the value.
            section.secure_boot = findings.root.data(SECURE_BOOT_VARIABLE)[4:5] == b"\x01"
        except Unreadable as error:
            findings.state(error)
    major = findings.number("sys/class/tpm/tpm0/tpm_version_major")
    if major is not None:
        section.tpm_version = _TPM_VERSIONS.get(major, str(major))
    section.bmc_device = next(iter(findings.entries("sys/class/ipmi", expected=False)), "")
