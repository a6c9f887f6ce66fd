"""`host.ping`: whether this node reaches another host. A complete kind, as docs/adding-a-kind.md explains it."""

from __future__ import annotations

from bettercompute.daemon.handlers import Handler, HandlerContext, HandlerFailed
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import MINUTE_MS, NODE, CommandKind

# The row: this goes into the table of protocol/kinds.py. Its messages go into commands.proto; the example borrows two.
ROW = CommandKind(
    name="host.ping",
    lane=messages.LANE_CONTROL,
    retry_safe=True,  # pinging twice does no harm, so a daemon that was killed may do it again
    self_terminating=False,
    attested=False,
    destructive=False,
    roles=frozenset({NODE}),
    payload=messages.InventoryRefreshPayload,
    result=messages.InventoryRefreshResult,
    timeout_ms=MINUTE_MS,
)


class HostPing:
    """The file: this is daemon/handlers/host_ping.py."""

    kind = "host.ping"

    async def run(self, context: HandlerContext) -> bytes:
        """Ping each host; the daemon handles deadline, cancel, journal and the program's process group."""
        payload = context.payload
        assert isinstance(payload, messages.InventoryRefreshPayload), "the row names the payload"
        for done, host in enumerate(payload.sections):
            await context.progress(f"pinging {host}", 100 * done // len(payload.sections))
            outcome = await context.run_program(
                ["ping", "-c1", "--", host],
                environment={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                timeout_ms=5_000,
                limit_bytes=4_096,
                live=True,
            )
            if outcome.timed_out or outcome.exit_code:
                raise HandlerFailed("unreachable", f"{host} did not answer")
        return messages.InventoryRefreshResult().SerializeToString()


HANDLER: Handler = HostPing()
