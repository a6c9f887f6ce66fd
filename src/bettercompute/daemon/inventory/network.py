"""The `network` section: interfaces, their addresses, and how the machine reaches others.

Left out is what changes by itself: counters, temporary and link-local addresses, and the interfaces that are made for
guests (a veth or tap without an address of its own), which come and go with every container.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterator

from bettercompute.daemon.inventory.findings import Findings, key_values
from bettercompute.daemon.inventory.host import MALFORMED, READ_FAILED, HostRoot
from bettercompute.daemon.inventory.places import numa_node, pci_address
from bettercompute.protocol import messages

NET = "sys/class/net"
IPV6_ADDRESSES = "proc/net/if_inet6"
IPV4_ROUTES = "proc/net/route"
IPV6_ROUTES = "proc/net/ipv6_route"
LOOPBACK = "lo"

# linux/if_arp.h, linux/if.h and linux/if_addr.h.
_LINK_ETHERNET = 1
_LINK_INFINIBAND = 32
_INTERFACE_UP = 0x1
_ADDRESS_TEMPORARY = 0x01
_ADDRESS_TENTATIVE = 0x40
_ROUTE_UP = 0x1
_ROUTE_REJECT = 0x200
_FOR_GUESTS = ("veth", "tap")


def collect(root: HostRoot) -> messages.NetworkInventory:
    """Return the interfaces, default routes and name servers."""
    findings = Findings(root)
    addresses = _addresses(findings)
    section = messages.NetworkInventory()
    for name in findings.entries(NET):
        if name == LOOPBACK or not findings.root.exists(f"{NET}/{name}/ifindex"):
            continue
        interface = _interface(findings, name)
        interface.addresses.extend(addresses.get(name, set()))
        if interface.addresses or interface.kind not in _FOR_GUESTS:
            section.interfaces.append(interface)
    section.default_routes.extend(_default_routes(findings))
    for line in findings.optional("etc/resolv.conf").splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == "nameserver":
            section.name_servers.append(words[1])
    section.unreadable.extend(findings.unreadable())
    return section


def _interface(findings: Findings, name: str) -> messages.NetworkInterface:
    folder = f"{NET}/{name}"
    device = f"{folder}/device"
    way = findings.root.device_path(folder)
    mac_address = findings.optional(f"{folder}/address").lower()
    permanent = findings.optional(f"{folder}/bonding_slave/perm_hwaddr").lower()
    speed_mbps = findings.number(f"{folder}/speed")
    return messages.NetworkInterface(
        name=name,
        mac_address=mac_address,
        permanent_mac_address="" if permanent == mac_address else permanent,
        kind=_kind(findings, name),
        driver=findings.root.link_name(f"{device}/driver"),
        pci_address=pci_address(way),
        numa_node=numa_node(findings, way),
        mtu_bytes=findings.number(f"{folder}/mtu") or 0,
        # Some drivers write 2^32 - 1 for "no link".
        speed_mbps=speed_mbps if speed_mbps is not None and speed_mbps < 0xFFFF_FFFF else None,
        up=bool((findings.number(f"{folder}/flags", radix=16) or 0) & _INTERFACE_UP),
        carrier=findings.number(f"{folder}/carrier") == 1,
        master=findings.root.link_name(f"{folder}/master"),
        sriov_functions=findings.number(f"{device}/sriov_numvfs") or 0,
        sriov_functions_max=findings.number(f"{device}/sriov_totalvfs") or 0,
    )


def _kind(findings: Findings, name: str) -> str:
    """Return what an interface is, by the type that its driver declares or by what only such a one has."""
    folder = f"{NET}/{name}"
    declared = key_values(findings.optional(f"{folder}/uevent"), separator="=").get("DEVTYPE")
    if declared:
        return declared
    link = findings.number(f"{folder}/type")
    tunnel_flags = findings.number(f"{folder}/tun_flags", radix=16)
    if tunnel_flags is not None:
        return "tap" if tunnel_flags & 0x2 else "tun"
    if findings.root.exists(f"{folder}/device"):
        return {_LINK_ETHERNET: "ethernet", _LINK_INFINIBAND: "infiniband"}.get(link or 0, "other")
    # A veth's peer is not among its own links: it is in another namespace, or a link of equal rank.
    peer = findings.number(f"{folder}/iflink")
    lower = any(entry.startswith("lower_") for entry in findings.entries(folder))
    if link == _LINK_ETHERNET and not lower and peer not in (None, 0, findings.number(f"{folder}/ifindex")):
        return "veth"
    return "virtual"


def _addresses(findings: Findings) -> dict[str, set[str]]:
    """Return each interface's addresses, without link-local, temporary and unproven ones."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    try:
        for entry in findings.root.calls.ipv4_addresses():
            if not ipaddress.ip_interface(entry.address).is_link_local:
                found[entry.interface].add(entry.address)
    except OSError as error:
        findings.gap("IPv4 addresses", READ_FAILED, str(error))
    for line in findings.optional(IPV6_ADDRESSES).splitlines():
        try:
            digits, _, prefix, _, flags, interface = line.split()
            address = ipaddress.IPv6Interface((int(digits, 16), int(prefix, 16)))
            unsteady = int(flags, 16) & (_ADDRESS_TEMPORARY | _ADDRESS_TENTATIVE)
        except ValueError:
            findings.gap(f"/{IPV6_ADDRESSES}", MALFORMED, repr(line[:80]))
            continue
        if not address.is_link_local and not unsteady:
            found[interface].add(str(address))
    return found


def _default_routes(findings: Findings) -> Iterator[messages.DefaultRoute]:
    readers = ((IPV4_ROUTES, _ipv4_default_route), (IPV6_ROUTES, _ipv6_default_route))
    for path, read in readers:
        for line in findings.optional(path).splitlines():
            try:
                route = read(line.split())
            except (ValueError, IndexError):
                findings.gap(f"/{path}", MALFORMED, repr(line[:80]))
                continue
            if route is not None:
                yield route


def _ipv4_default_route(fields: list[str]) -> messages.DefaultRoute | None:
    """Return the route of one line, None for one of another destination and for the heading."""
    if fields[1] != "00000000" or fields[7] != "00000000" or not _usable(int(fields[3], 16)):
        return None
    # The kernel prints the four bytes as a number of its own byte order, which is little-endian where we run.
    gateway = ipaddress.IPv4Address(bytes.fromhex(fields[2])[::-1])
    hop = "" if gateway.is_unspecified else str(gateway)
    return messages.DefaultRoute(family=4, gateway=hop, interface=fields[0], metric=int(fields[6]))


def _ipv6_default_route(fields: list[str]) -> messages.DefaultRoute | None:
    """Return the route of one line, None for one of another destination and for the kernel's own that refuses."""
    interface = fields[9]
    if int(fields[0], 16) != 0 or fields[1] != "00" or interface == LOOPBACK or not _usable(int(fields[8], 16)):
        return None
    gateway = ipaddress.IPv6Address(bytes.fromhex(fields[4]))
    hop = "" if gateway.is_unspecified else str(gateway)
    return messages.DefaultRoute(family=6, gateway=hop, interface=interface, metric=int(fields[5], 16))


def _usable(flags: int) -> bool:
    return bool(flags & _ROUTE_UP) and not flags & _ROUTE_REJECT
