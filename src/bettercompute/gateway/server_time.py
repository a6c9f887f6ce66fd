"""The control plane's time at a gateway: the database's clock, carried on between readings by a monotonic one."""

from __future__ import annotations

from bettercompute.world import Clock


class ServerTime:
    """Knows compute_now() without asking for it each time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._read_ms = clock.now_ms()
        self._read_at_ms = clock.monotonic_ms()

    def read(self, server_time_ms: int) -> None:
        """Take a reading of compute_now()."""
        self._read_ms = server_time_ms
        self._read_at_ms = self._clock.monotonic_ms()

    def now_ms(self) -> int:
        """Return the control plane's time in Unix milliseconds; the host's before the first reading."""
        return self._read_ms + self._clock.monotonic_ms() - self._read_at_ms
