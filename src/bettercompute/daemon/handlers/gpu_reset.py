"""`gpu.reset`: nvidia-smi resets one GPU after the other, and NVML says whether it answers again.

Nothing is reset unless every GPU named is there and, without `force`, none is in use. NVML is closed before each reset,
or the daemon itself would be what uses the GPU. A cancel is heard between two GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from bettercompute.daemon.handlers import Handler, HandlerCancelled, HandlerContext, HandlerFailed
from bettercompute.daemon.handlers._nvml import LoadNvml, asked, handle_of, load_live, opened, processes_of
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import KINDS, encode_result

GPUS_MAX = 256
# Resetting takes seconds; a GPU that takes longer hangs.
RESET_TIMEOUT_MS = 120_000
MESSAGE_MAX_CHARS = 1_024
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
_OUTPUT_BYTES = 16 << 10


class GpuReset:
    """Asks the NVML that `load` gives, which a test replaces by a recorded one."""

    kind = "gpu.reset"

    def __init__(self, load: LoadNvml = load_live) -> None:
        self._load = load

    async def run(self, context: HandlerContext) -> bytes:
        """Reset; returns the serialized `GpuResetResult` when every GPU was reset and answers."""
        payload = context.payload
        assert isinstance(payload, messages.GpuResetPayload), "the kind table names the payload"
        uuids = list(dict.fromkeys(payload.gpu_uuids))
        if not 0 < len(uuids) <= GPUS_MAX:
            raise HandlerFailed("invalid-payload", f"name from 1 to {GPUS_MAX} GPUs in gpu_uuids")
        await asked(partial(self._check, uuids, force=payload.force))
        result = messages.GpuResetResult()
        for done, uuid in enumerate(uuids):
            if context.cancelled.is_set():
                raise HandlerCancelled
            await context.progress(f"resetting {uuid}", 100 * done // len(uuids))
            result.gpus.append(await self._reset(context, uuid))
        failed = [f"{gpu.uuid}: {gpu.message}" for gpu in result.gpus if not gpu.reset]
        if failed:
            raise HandlerFailed("reset-failed", f"{len(failed)} of {len(uuids)} were not reset: {'; '.join(failed)}")
        return encode_result(KINDS[self.kind], result)

    def _check(self, uuids: Sequence[str], *, force: bool) -> None:
        with opened(self._load) as nvml:
            for uuid in uuids:
                pids = sorted(processes_of(nvml, handle_of(nvml, uuid)))
                if pids and not force:
                    raise HandlerFailed("gpu-in-use", f"process {pids[0]} uses {uuid}: end it, or reset with force")

    async def _reset(self, context: HandlerContext, uuid: str) -> messages.GpuResetOutcome:
        try:
            outcome = await context.run_program(
                ["nvidia-smi", "--gpu-reset", f"--id={uuid}"],
                environment=_ENVIRONMENT,
                timeout_ms=RESET_TIMEOUT_MS,
                limit_bytes=_OUTPUT_BYTES,
                live=True,
            )
        except OSError as error:
            raise HandlerFailed("no-nvidia-smi", f"nvidia-smi cannot be started: {error.strerror}") from None
        said = (outcome.stdout + outcome.stderr).decode(errors="replace").replace("\0", " ").strip()
        message = said[-MESSAGE_MAX_CHARS:]
        if outcome.timed_out:
            return messages.GpuResetOutcome(uuid=uuid, message=f"nvidia-smi was ended after {RESET_TIMEOUT_MS} ms")
        if outcome.exit_code:
            return messages.GpuResetOutcome(uuid=uuid, message=message or f"exit code {outcome.exit_code}")
        try:
            await asked(partial(self._check, [uuid], force=True))
        except HandlerFailed as error:
            return messages.GpuResetOutcome(uuid=uuid, message=f"it does not answer after the reset: {error.message}")
        return messages.GpuResetOutcome(uuid=uuid, reset=True, message=message)


HANDLER: Handler = GpuReset()
