"""The check of the host on which the API runs, and with it the embedded database."""

from __future__ import annotations

from bettercompute.services.doctor.finding import Disk, Finding, Surroundings, failed, ok, warning

GIB = 1 << 30
# A database that cannot write its log stops; and a tenth of a large disk is still a lot.
FAILS_BYTES = GIB // 2
WARNS_BYTES, WARNS_SHARE = 10 * GIB, 0.10


async def check_disk(around: Surroundings) -> Finding:
    """Whether the state folder's file system has room."""
    return judge_disk(around.disk())


def judge_disk(disk: Disk) -> Finding:
    """Judge what is free."""
    share = disk.free_bytes / max(1, disk.total_bytes)
    sentence = f"{disk.path} has {disk.free_bytes / GIB:.1f} GiB free, {share:.0%}"
    cure = "make room there: logs, backups, or a larger disk; shorter retention helps only after the next vacuum"
    if disk.free_bytes < FAILS_BYTES:
        return failed(sentence, cure=cure)
    if disk.free_bytes < WARNS_BYTES and share < WARNS_SHARE:
        return warning(sentence, cure=cure)
    return ok(sentence)
