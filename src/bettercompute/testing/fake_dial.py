"""The ways on which a FakeDaemon reaches a gateway: real HTTP/2 over TLS, or a stream pair in memory."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from bettercompute.transport import streams
from bettercompute.transport.memory import MemoryServer
from bettercompute.transport.streams import Connection, DialTarget, Limits
from bettercompute.world import World

Dial = Callable[[], Awaitable[Connection]]


def over_tls(target: DialTarget, *, world: World, limits: Limits = streams.DEFAULT_LIMITS) -> Dial:
    """Return a dial of a real gateway. The pinned certificate that the first one finds saves the others their probe.

    The keys are read here and not at each dial: a thousand machines have a thousand processors for that, a thousand
    FakeDaemons share one.
    """
    known = target
    prepared = streams.prepare(target)

    async def dial() -> Connection:
        nonlocal known, prepared
        connection = await streams.dial(known, world=world, limits=limits, prepared=prepared)
        if known.serving_ca_pem is None:
            known = replace(known, serving_ca_pem=connection.serving_ca_pem)
            prepared = streams.prepare(known)
        return connection

    return dial


def in_memory(
    server: Callable[[], MemoryServer], *, certificate_chain: tuple[bytes, ...], address: str = "127.0.0.1"
) -> Dial:
    """Return a dial of whatever server there is at the time."""

    async def dial() -> Connection:
        return server().connect(certificate_chain=certificate_chain, address=address)

    return dial
