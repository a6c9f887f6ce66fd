"""`logs.collect`: the system's journal or files, filtered and compressed into a spool, then one PUT of it.

A presigned PUT needs its length beforehand, so the logs are spooled first, into files without a name: nothing of them
is left when the daemon dies. What may be read is `log_sources`, what may be reached is `_upload`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import BinaryIO

from bettercompute.daemon import log_sources
from bettercompute.daemon.handlers import Handler, HandlerCancelled, HandlerContext, HandlerFailed, _upload
from bettercompute.daemon.inventory.host import Unreadable
from bettercompute.daemon.log_sources import Packing
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import KINDS, encode_result

UNITS_MAX = 64
STOP_S = 10.0
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_STDERR_BYTES = 4_096

# `head` ends the reader when the bound is reached; one byte more than the bound tells that it was.
_JOURNAL = 'spool=$1 limit=$2 text=$3; shift 3; "$@" | grep -aF -e "$text" | head -c "$limit" > "$spool"'


class LogsCollect:
    """Collects into the state folder's file system."""

    kind = "logs.collect"

    async def run(self, context: HandlerContext) -> bytes:
        """Collect and upload; returns the serialized `LogsCollectResult`."""
        payload, settings = context.payload, context.config.value.logs
        assert isinstance(payload, messages.LogsCollectPayload), "the kind table names the payload"
        _check(payload)
        headers = [(header.name, header.value) for header in payload.upload_headers]
        target = await _upload.judge(payload.upload_url, headers, settings=settings)
        limit_bytes = min(payload.size_max_bytes or settings.size_max_bytes, settings.size_max_bytes)
        result = messages.LogsCollectResult()
        try:
            with tempfile.TemporaryFile(dir=context.state_dir) as spool:
                packing = Packing(
                    spool,
                    limit_bytes=limit_bytes,
                    compress=payload.compression != messages.LOG_COMPRESSION_NONE,
                    contains=payload.contains.encode(),
                )
                if payload.units or not payload.files:
                    await _add_journal(context, payload, packing)
                await _add_files(context, payload, packing, result)
                if payload.files and len(result.unreadable) == len(payload.files) and not packing.lines:
                    first = result.unreadable[0]
                    raise HandlerFailed("nothing-readable", f"{first.what}: {first.reason}")
                size_bytes = await asyncio.to_thread(packing.finish)
                result.sha256 = await asyncio.to_thread(log_sources.sha256_of, spool)
                body = _told(context, spool, size_bytes)
                sending = _upload.put(target, body, size_bytes=size_bytes, settings=settings)
                result.http_status = await _unless_cancelled(context, sending)
        except OSError as error:
            raise HandlerFailed("spool-failed", f"{context.state_dir} cannot hold the logs: {error.strerror}") from None
        result.lines, result.read_bytes, result.truncated = packing.lines, packing.read_bytes, packing.truncated
        result.uploaded_bytes = size_bytes
        return encode_result(KINDS[self.kind], result)


HANDLER: Handler = LogsCollect()


def _check(payload: messages.LogsCollectPayload) -> None:
    if len(payload.units) > UNITS_MAX or len(payload.files) > log_sources.FILES_MAX:
        raise _invalid(f"at most {UNITS_MAX} units and {log_sources.FILES_MAX} files can be asked for at once")
    if payload.HasField("priority_max") and payload.priority_max > 7:
        raise _invalid(f"priority_max is {payload.priority_max}; it must be from 0 to 7")
    if payload.files and (payload.since_ms or payload.until_ms or payload.HasField("priority_max")):
        raise _invalid("since_ms, until_ms and priority_max are of the journal: the lines of files have neither")
    if any(character in payload.contains for character in "\0\n"):
        raise _invalid("contains must be one line")
    if not all(unit.isprintable() and unit for unit in payload.units):
        raise _invalid("units must be names of units")


def _invalid(message: str) -> HandlerFailed:
    return HandlerFailed("invalid-payload", message)


async def _add_journal(context: HandlerContext, payload: messages.LogsCollectPayload, packing: Packing) -> None:
    program = shutil.which("journalctl", path=_ENVIRONMENT["PATH"])
    if program is None:
        raise HandlerFailed("no-journal", "there is no journalctl on this host; ask for files")
    await context.progress("reading the journal", 0)
    argv = [program, "--no-pager", "--quiet", "--output=short-iso", *(f"--unit={unit}" for unit in payload.units)]
    argv += [f"--since=@{payload.since_ms / 1000:.3f}"] if payload.since_ms else []
    argv += [f"--until=@{payload.until_ms / 1000:.3f}"] if payload.until_ms else []
    argv += [f"--priority={payload.priority_max}"] if payload.HasField("priority_max") else []
    with tempfile.TemporaryFile(dir=context.state_dir) as raw:
        # The file has no name; the program opens it through ours.
        name, limit = f"/proc/{os.getpid()}/fd/{raw.fileno()}", str(packing.limit_bytes + 1)
        outcome = await context.run_program(
            ["/bin/sh", "-c", _JOURNAL, "sh", name, limit, payload.contains, *argv],
            environment=_ENVIRONMENT,
            timeout_ms=KINDS["logs.collect"].timeout_ms,
            limit_bytes=_STDERR_BYTES,
        )
        said = outcome.stderr.decode(errors="replace").replace("\0", " ").strip()
        if outcome.timed_out or outcome.exit_code or (said and not os.fstat(raw.fileno()).st_size):
            raise HandlerFailed(
                "journal-failed", f"journalctl could not be read to the end: {said or 'no reason told'}"
            )
        await _reading(context, packing, lambda: packing.add(raw))


async def _add_files(
    context: HandlerContext, payload: messages.LogsCollectPayload, packing: Packing, result: messages.LogsCollectResult
) -> None:
    for done, path in enumerate(payload.files):
        if context.cancelled.is_set():
            raise HandlerCancelled
        await context.progress(f"reading {path}", 50 * done // len(payload.files))
        try:
            await _reading(context, packing, partial(_add_file, context.config.value.logs.folders, path, packing))
        except Unreadable as error:
            result.unreadable.add(what=path, reason=error.stated)


def _add_file(folders: tuple[str, ...], path: str, packing: Packing) -> None:
    with log_sources.open_below(folders, path) as file:
        packing.add(file)


async def _reading(context: HandlerContext, packing: Packing, work: Callable[[], None]) -> None:
    """Read in a thread that a cancel, or the end of the command's time, stops at its next line."""
    thread = asyncio.ensure_future(asyncio.to_thread(work))
    cancelled = asyncio.ensure_future(context.cancelled.wait())
    try:
        await asyncio.wait({thread, cancelled}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        cancelled.cancel()
        packing.stopped = not thread.done()
        # A disk that does not answer at all holds the thread, but not the command.
        await asyncio.wait({thread}, timeout=STOP_S)
    if packing.stopped:
        raise HandlerCancelled
    thread.result()


async def _told(context: HandlerContext, spool: BinaryIO, size_bytes: int) -> AsyncIterator[bytes]:
    """Return the spool's content, telling how far it is."""
    sent = 0
    for piece in log_sources.pieces(spool):
        yield piece
        sent += len(piece)
        await context.progress("uploading", 50 + 50 * sent // size_bytes)


async def _unless_cancelled(context: HandlerContext, sending: Coroutine[None, None, int]) -> int:
    """Break the upload off when the command is cancelled, also while the other side does not read."""
    upload_task = asyncio.ensure_future(sending)
    cancelled = asyncio.ensure_future(context.cancelled.wait())
    try:
        await asyncio.wait({upload_task, cancelled}, return_when=asyncio.FIRST_COMPLETED)
        if not upload_task.done():
            raise HandlerCancelled
        return upload_task.result()
    finally:
        upload_task.cancel()
        cancelled.cancel()
        await asyncio.gather(upload_task, cancelled, return_exceptions=True)
