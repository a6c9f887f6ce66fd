"""Which proxy a dial goes through, by the environment it was given, and the HTTP CONNECT that opens the way.

HTTPS_PROXY, then ALL_PROXY, in lower or upper case; NO_PROXY as curl and Go read it: `*`, a host and its subdomains, an
address, a network, each with or without a port. The proxy sees the name and port dialed and, after that, TLS.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from bettercompute.transport.calls import DialFailed, DialKind
from bettercompute.transport.limits import PROXY_REPLY_BYTES_MAX


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy."""

    host: str
    port: int
    authorization: str | None = field(default=None, repr=False)


def proxy_for(host: str, port: int, environment: Mapping[str, str]) -> Proxy | None:
    """Return the proxy for a gateway, or None for a direct dial. Raises `DialFailed` BAD_TARGET for an unusable one."""
    url = _variable(environment, "https_proxy") or _variable(environment, "all_proxy")
    if not url or _exempt(host, port, _variable(environment, "no_proxy")):
        return None
    return parse_proxy(url)


def parse_proxy(url: str) -> Proxy:
    """Return the proxy of a URL; `http://` may be left out."""
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise _bad_proxy(f"the proxy URL in the environment is malformed: {error}") from error
    if parts.scheme != "http" or not parts.hostname:
        shown = f"{parts.scheme}://{parts.hostname or ''}"
        raise _bad_proxy(f"the proxy {shown} in the environment is not of the form http://host:port")
    authorization = None
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        try:
            authorization = "Basic " + base64.b64encode(pair.encode()).decode("ascii")
        except UnicodeEncodeError:
            # Nothing of it is quoted: it is a password.
            raise _bad_proxy(
                f"the name or password of the proxy {parts.hostname} in the environment is not UTF-8: write its bytes "
                "as %XX"
            ) from None
    return Proxy(parts.hostname, port or 80, authorization)


def _bad_proxy(text: str) -> DialFailed:
    """Return the failure of a dial that no waiting cures: the environment says the same at the next one."""
    return DialFailed(DialKind.BAD_TARGET, text)


def _variable(environment: Mapping[str, str], name: str) -> str:
    return environment.get(name) or environment.get(name.upper()) or ""


def _exempt(host: str, port: int, no_proxy: str) -> bool:
    return any(_matches(entry.strip().lower(), host.lower().rstrip("."), port) for entry in no_proxy.split(","))


def _matches(entry: str, host: str, port: int) -> bool:
    if entry == "*":
        return True
    entry, only_port = _split_port(entry)
    if not entry or (only_port is not None and only_port != port):
        return False
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        name = entry.removeprefix("*").removeprefix(".")
        return bool(name) and (host == name or host.endswith("." + name))
    try:
        return address in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False


def _split_port(entry: str) -> tuple[str, int | None]:
    if entry.startswith("["):
        inside, _, rest = entry[1:].partition("]")
        return inside, int(rest[1:]) if rest.startswith(":") and rest[1:].isdigit() else None
    name, colon, port = entry.rpartition(":")
    if colon and port.isdigit() and ":" not in name:
        return name, int(port)
    return entry, None


def authority_of(host: str, port: int) -> str:
    """Return host and port as HTTP writes them, IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def connect_through(sock: socket.socket, *, proxy: Proxy, host: str, port: int) -> None:
    """Ask the proxy at the other end of `sock` for a way to the gateway; raises `DialFailed` PROXY when it says no."""
    loop = asyncio.get_running_loop()
    authority = authority_of(host, port)
    lines = [f"CONNECT {authority} HTTP/1.1", f"Host: {authority}", "User-Agent: better-compute"]
    if proxy.authorization is not None:
        lines.append(f"Proxy-Authorization: {proxy.authorization}")
    await loop.sock_sendall(sock, "\r\n".join([*lines, "", ""]).encode("ascii"))
    where = authority_of(proxy.host, proxy.port)
    reply = bytearray()
    while b"\r\n\r\n" not in reply:
        # A gateway says nothing before its client, so what follows the reply can only be a mistake.
        piece = await loop.sock_recv(sock, PROXY_REPLY_BYTES_MAX + 1 - len(reply))
        reply += piece
        if not piece or len(reply) > PROXY_REPLY_BYTES_MAX:
            raise DialFailed(DialKind.PROXY, f"the proxy {where} ended its answer to CONNECT {authority} halfway")
    status_line = reply.partition(b"\r\n")[0].decode("latin-1")
    version, _, status = status_line.partition(" ")
    if not version.startswith("HTTP/1.") or not status.startswith("2"):
        raise DialFailed(DialKind.PROXY, f"the proxy {where} refused CONNECT {authority}: {status_line[:200]}")
    if not reply.endswith(b"\r\n\r\n"):
        raise DialFailed(
            DialKind.PROXY, f"the proxy {where} sent data before the gateway could: it is not a plain tunnel"
        )
