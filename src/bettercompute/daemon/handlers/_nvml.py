"""NVML for the handlers: opened for one reading, closed before anything else, and its errors as a command's ending."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from bettercompute.daemon.apart import HANGS, apart
from bettercompute.daemon.handlers import HandlerFailed
from bettercompute.daemon.inventory.gpus import nvml_reason
from bettercompute.daemon.inventory.host import NO_DRIVER, HostRoot
from bettercompute.errors import Unavailable

LoadNvml = Callable[[], Any]
T = TypeVar("T")


async def asked(work: Callable[[], T]) -> T:
    """Return what a reading of NVML returns; raises `HandlerFailed` `host-hangs` while too many have not come back."""
    try:
        return await apart(work)
    except Unavailable as error:
        raise HandlerFailed(HANGS, error.message) from None


def load_live() -> Any:
    """Return this host's NVML; raises ImportError without a driver."""
    return HostRoot.live().calls.nvml()


@contextlib.contextmanager
def opened(load: LoadNvml) -> Iterator[Any]:
    """Give NVML; raises `HandlerFailed` `no-driver` where there is none, `nvml-failed` where it does not answer."""
    try:
        nvml = load()
    except ImportError as error:
        raise HandlerFailed(NO_DRIVER, f"there is no NVIDIA driver on this host: {error}") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise _failed(nvml, error) from None
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise _failed(nvml, error) from None
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def handle_of(nvml: Any, uuid: str) -> Any:
    """Return a GPU by its UUID; raises `HandlerFailed` `unknown-gpu`."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except nvml.NVMLError as error:
        if error.value not in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT):
            raise
        raise HandlerFailed("unknown-gpu", f"this host has no GPU {uuid[:64]!r}") from None


def processes_of(nvml: Any, handle: Any) -> dict[int, int | None]:
    """Return the processes that use a GPU, with the memory that each holds where NVML tells."""
    found: dict[int, int | None] = {}
    for question in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            found |= {process.pid: process.usedGpuMemory for process in question(handle)}
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_NOT_SUPPORTED:
                raise
    return found


def _failed(nvml: Any, error: Any) -> HandlerFailed:
    reason = nvml_reason(nvml, error)
    if reason == NO_DRIVER:
        return HandlerFailed(NO_DRIVER, f"there is no NVIDIA driver on this host: {error}")
    return HandlerFailed("nvml-failed", f"NVML: {error}")
