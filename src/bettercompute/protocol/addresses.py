"""Which texts name a host, and which are a gateway's URL: `https://HOST[:PORT]`, checked before anybody dials.

A configuration, a printed token and an issued identity carry such texts for months; one that cannot be dialed is found
where it is written, not by a node that dials it for ever. See docs/daemon.md, "When it is not connected".
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address

PORT_MAX = 65_535
_NAME_CHARACTERS_MAX = 253
# As DNS resolves them: underscores are no host names by the letter, and are in use.
_NAME = re.compile(
    r"(?:[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.)*[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
)
_URL = re.compile(r"https://(?:\[(?P<ipv6>[!-Z^-~]+)\]|(?P<host>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?/?")


def is_host(text: str) -> bool:
    """Say whether `text` is a DNS name in ASCII, an IPv4 address, or an IPv6 address without brackets."""
    if ":" in text:
        return _is_ipv6(text)
    name = text.removesuffix(".")
    if name.rpartition(".")[2].isdigit():  # no top-level domain is a number: an address, or a mistyped one
        return _is_ipv4(text)
    return len(name) <= _NAME_CHARACTERS_MAX and _NAME.fullmatch(name) is not None


def is_gateway_url(url: str) -> bool:
    """Say whether `url` is `https://HOST[:PORT]`, an IPv6 address in brackets, the port from 1 to 65535."""
    parts = _URL.fullmatch(url)
    if parts is None:
        return False
    ipv6, port = parts["ipv6"], parts["port"]
    host_good = is_host(parts["host"]) if ipv6 is None else _is_ipv6(ipv6)
    return host_good and (port is None or 1 <= int(port) <= PORT_MAX)


def _is_ipv4(text: str) -> bool:
    try:
        IPv4Address(text)
    except ValueError:
        return False
    return True


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True
