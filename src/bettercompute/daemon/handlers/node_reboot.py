"""`node.reboot`: ask the host to reboot, and wait to be ended.

The proof is the next process's: a boot id other than the one that the journal holds. Nothing that this process could
say would prove anything, so after the request it only waits; a host that still runs at the command's timeout did not
reboot.
"""

from __future__ import annotations

import asyncio

from bettercompute.daemon.handlers import Handler, HandlerCancelled, HandlerContext, HandlerFailed
from bettercompute.daemon.inventory.capabilities import can_reboot
from bettercompute.protocol import messages

SYSTEMD = ("systemctl", "--no-wall", "reboot")
# systemd hands the request on and returns; a command of the operator's may take its time to sync disks.
REQUEST_TIMEOUT_MS = 120_000
REASON_MAX_CHARS = 256
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_STDERR_BYTES = 4_096


class NodeReboot:
    """Reboots by systemd, or by the configured command."""

    kind = "node.reboot"

    async def run(self, context: HandlerContext) -> bytes:
        """Request the reboot; returns never, unless by an exception."""
        payload, settings = context.payload, context.config.value.reboot
        assert isinstance(payload, messages.NodeRebootPayload), "the kind table names the payload"
        if not can_reboot(context.held_sections(), settings):
            raise HandlerFailed(
                "reboot-not-allowed", "this node cannot reboot its host, or [reboot] in bcd's configuration forbids it"
            )
        _inhibited(context, force=payload.force)
        if payload.delay_ms:
            await context.progress(f"rebooting in {payload.delay_ms} ms")
            await _wait(context, payload.delay_ms)
            # What began meanwhile counts as well.
            _inhibited(context, force=payload.force)
        if context.cancelled.is_set():
            raise HandlerCancelled
        await context.progress("rebooting")
        await _request(context, settings.command, reason=_line(payload.reason))
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # it is never set


HANDLER: Handler = NodeReboot()


def _inhibited(context: HandlerContext, *, force: bool) -> None:
    running = context.unrepeatable_running()
    if running and not force:
        raise HandlerFailed(
            "inhibited", f"command {running[0]} runs and must not be repeated: wait for its end, or reboot with force"
        )


async def _wait(context: HandlerContext, delay_ms: int) -> None:
    try:
        async with asyncio.timeout(delay_ms / 1000):
            await context.cancelled.wait()
    except TimeoutError:
        return
    raise HandlerCancelled


async def _request(context: HandlerContext, command: tuple[str, ...], *, reason: str) -> None:
    argv = command or (*SYSTEMD, *([f"--message={reason}"] if reason else []))
    environment = {**_ENVIRONMENT, "BC_COMMAND_ID": context.command_id, "BC_REASON": reason}
    try:
        outcome = await context.run_program(
            argv, environment=environment, timeout_ms=REQUEST_TIMEOUT_MS, limit_bytes=_STDERR_BYTES, live=True
        )
    except OSError as error:
        raise HandlerFailed("reboot-failed", f"{argv[0]} cannot be started: {error.strerror}") from None
    if outcome.timed_out:
        raise HandlerFailed("reboot-failed", f"{argv[0]} did not end within {REQUEST_TIMEOUT_MS} ms and was ended")
    if outcome.exit_code:
        said = outcome.stderr.decode(errors="replace").replace("\0", " ").strip()
        raise HandlerFailed("reboot-failed", f"{argv[0]} ended with exit code {outcome.exit_code}: {said}")


def _line(text: str) -> str:
    """Return a reason as one line that a log can hold."""
    return "".join(character if character.isprintable() else " " for character in text)[:REASON_MAX_CHARS].strip()
