"""One PUT to a presigned address, and nothing else: where it may go, and that nothing of the answer comes back.

The control plane names the address, so whoever may send commands could make a node reach for what only the node can
see. Therefore: https unless configured, no address of the host itself, of its links or of a cloud's metadata service
unless configured, the connection goes to the very address that was judged, no redirects, no proxy from the environment,
and of the answer only its status is told. See docs/daemon.md, "What a command may do".
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from bettercompute.daemon.handlers import HandlerFailed
from bettercompute.daemon.log_sources import LogsSettings

URL_MAX_CHARS = 8_192
HEADERS_MAX = 32
HEADER_VALUE_MAX_CHARS = 4_096
# For each step of the upload, not for all of it: that is the command's own timeout.
STEP_TIMEOUT_S = 30.0

# Clouds' metadata services outside of the link-local ranges: AWS, Google and Oracle over IPv6, Azure, Alibaba, Oracle.
METADATA = tuple(
    map(
        ipaddress.ip_network,
        (
            *("fd00:ec2::/32", "fd20:ce::254/128", "fd00:c1::a9fe:a9fe/128"),
            *("168.63.129.16/32", "100.100.100.200/32", "192.0.0.192/32"),
        ),
    )
)
# "This host on this network" (RFC 6890): no address of any other.
THIS_NETWORK = ipaddress.ip_network("0.0.0.0/8")
# Those decide what a request is and where it ends.
_OWN_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection", "te", "trailer", "upgrade"})
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An address that was judged: where to connect, and what is asked for there."""

    scheme: str
    host: str
    port: int
    authority: str
    path: str
    address: str
    headers: Mapping[str, str]


async def judge(url: str, headers: Sequence[tuple[str, str]], *, settings: LogsSettings) -> Target:
    """Return where an upload goes; raises `HandlerFailed` `upload-not-allowed` or `upload-failed`."""
    try:
        split = urlsplit(url)
        host, port = split.hostname, split.port
    except ValueError:
        raise _not_allowed("upload_url is not a URL") from None
    if len(url) > URL_MAX_CHARS or not url.isascii() or not url.isprintable() or " " in url:
        raise _not_allowed(f"upload_url must be printable ASCII of at most {URL_MAX_CHARS} characters")
    if split.scheme != "https" and not (split.scheme == "http" and settings.allow_http):
        raise _not_allowed(
            f"upload_url has the scheme {split.scheme!r}; only https is, unless `allow_http` under [logs] is set"
        )
    if not host or split.username is not None or split.password is not None:
        raise _not_allowed("upload_url must name a host, and no user")
    port = port if port is not None else (443 if split.scheme == "https" else 80)
    if port == 0:
        raise _not_allowed("upload_url names port 0, which nothing listens on")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise HandlerFailed("upload-failed", f"the name {host} cannot be looked up: {error.strerror}") from None
    except UnicodeError:  # a part of it that is empty, or longer than 63 characters
        raise _not_allowed(f"upload_url names {host[:64]!r}, which is no host name") from None
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        # All of them: a name with one good address and one forbidden one is no accident.
        if is_forbidden(address, settings.allow_networks):
            raise _not_allowed(f"{host} is {address}, which is not reachable for uploads; see `allow_networks`")
    return Target(
        scheme=split.scheme,
        host=host,
        port=port,
        authority=split.netloc,
        path=(split.path or "/") + (f"?{split.query}" if split.query else ""),
        address=addresses[0],
        headers=_checked(headers),
    )


def is_forbidden(address: str, allow_networks: Sequence[str]) -> bool:
    """Return whether an address is the host's own, its link's, a metadata service's or no host's at all."""
    judged: Address = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(judged, ipaddress.IPv6Address):
        judged = judged.ipv4_mapped or judged.sixtofour or judged
    if any(judged in ipaddress.ip_network(network) for network in allow_networks):
        return False
    special = judged.is_loopback or judged.is_link_local or judged.is_multicast or judged.is_unspecified
    return special or judged.is_reserved or any(judged in network for network in (*METADATA, THIS_NETWORK))


async def put(target: Target, body: AsyncIterator[bytes], *, size_bytes: int, settings: LogsSettings) -> int:
    """Send the body and return the answer's status, which is a success; raises `HandlerFailed`."""
    # Imported late: an idle daemon does not carry it.
    import httpx

    try:
        context = await asyncio.to_thread(ssl.create_default_context, cafile=settings.ca_file)
    except OSError as error:
        raise HandlerFailed("upload-failed", f"the authorities of uploads cannot be read: {error}") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    address = f"[{target.address}]" if ":" in target.address else target.address
    url = f"{target.scheme}://{address}:{target.port}{target.path}"
    headers = {**target.headers, "host": target.authority, "content-length": str(size_bytes)}
    client = httpx.AsyncClient(verify=context, trust_env=False, follow_redirects=False, timeout=STEP_TIMEOUT_S)
    try:
        async with (
            client,
            client.stream(
                "PUT", url, content=body, headers=headers, extensions={"sni_hostname": target.host}
            ) as answer,
        ):
            status = answer.status_code
    except (httpx.HTTPError, OSError) as error:
        told = str(error) or type(error).__name__
        raise HandlerFailed("upload-failed", f"the upload to {target.host}:{target.port} broke off: {told}") from None
    if not 200 <= status < 300:
        raise HandlerFailed("upload-refused", f"{target.host}:{target.port} answered the upload with status {status}")
    return status


def _checked(headers: Sequence[tuple[str, str]]) -> Mapping[str, str]:
    if len(headers) > HEADERS_MAX:
        raise _not_allowed(f"{len(headers)} upload_headers, at most {HEADERS_MAX} are allowed")
    for name, value in headers:
        if _TOKEN.fullmatch(name) is None or name.lower() in _OWN_HEADERS:
            raise _not_allowed(f"the upload header {name[:64]!r} cannot be given")
        fits = len(value) <= HEADER_VALUE_MAX_CHARS and value.isascii() and (value.isprintable() or not value)
        if not fits:
            raise _not_allowed(f"the value of the upload header {name[:64]} is not printable ASCII, or too long")
    return {name.lower(): value for name, value in headers}


def _not_allowed(message: str) -> HandlerFailed:
    return HandlerFailed("upload-not-allowed", message)
