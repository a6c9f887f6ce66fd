"""How long the gateway trusts its lease: local time may only make it stop sooner, never later.

A lease renewed at T holds in the database until T + 15 s. The gateway believes in it for 13 s only, counted from
*before* the renewal was sent, by a clock that counts suspended time. Every send and every write asks the fence first.
Once the trust has lapsed, everything that was open or queued belongs to an old **opening** and stays fenced, although
a later renewal may succeed (a process that was stopped and continued): the gateway first drops it, then reopens under
a new number.

See docs/gateway.md, "Its id, its lease, its fence"; decisions 0109.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from bettercompute.world import Clock

LEASE_MS = 15_000  # how long the row lives in the database
RENEW_EVERY_MS = 5_000  # two renewals may fail before the lease runs out
TRUST_MS = 13_000  # what we believe of the 15 s: 2 s are left for a statement already on its way
LEASE_STATEMENT_TIMEOUT_MS = 3_000  # the server gives up before the next renewal is due
LOOP_SILENCE_MS = 10_000  # a main loop silent for longer serves nobody; its lease is let go

assert TRUST_MS < LEASE_MS
assert RENEW_EVERY_MS + LEASE_STATEMENT_TIMEOUT_MS < TRUST_MS


@dataclass(frozen=True, slots=True)
class FenceView:
    """What can be shown of the fence: for health checks and metrics."""

    opening: int
    trusted: bool
    admitting: bool
    retired: bool
    trust_left_ms: int
    loop_silent_ms: int


class Fence:
    """Shared by the lease's thread, which renews, and the main loop, which asks before it sends or writes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._opening = 0
        self._reopened = 0
        self._trusted_until_ms = 0
        self._retired = False
        self._loop_ticked_ms = clock.monotonic_ms()

    @property
    def opening(self) -> int:
        """Return the number of the present opening; 0 before the first lease."""
        return self._opening

    @property
    def retired(self) -> bool:
        """Return whether the lease's row is gone: this gateway id never serves again."""
        return self._retired

    def renewed(self, *, started_ms: int) -> None:
        """Believe in the lease until `started_ms` + 13 s; a lapse since the last renewal starts a new opening."""
        with self._lock:
            if self._opening == 0 or self._clock.monotonic_ms() >= self._trusted_until_ms:
                self._opening += 1
            self._trusted_until_ms = max(self._trusted_until_ms, started_ms + TRUST_MS)

    def retire(self) -> None:
        """Close the fence for good."""
        with self._lock:
            self._retired = True

    def trusted(self) -> bool:
        """Return whether the lease is believed in at this moment."""
        return not self._retired and self._clock.monotonic_ms() < self._trusted_until_ms

    def holds(self, opening: int) -> bool:
        """Return whether what was begun under `opening` may still be sent or written."""
        return opening == self._opening and opening != 0 and self.trusted()

    def reopen(self, opening: int) -> None:
        """Say that everything of earlier openings has been dropped, so that `opening` may admit."""
        self._reopened = max(self._reopened, opening)

    def admitting(self) -> bool:
        """Return whether new work may begin: the lease is trusted and nothing old is left."""
        return self._reopened == self._opening and self.holds(self._opening)

    def tick(self) -> None:
        """Say that the main loop is alive."""
        self._loop_ticked_ms = self._clock.monotonic_ms()

    def loop_silent_ms(self) -> int:
        """Return how long ago the main loop last ticked."""
        return self._clock.monotonic_ms() - self._loop_ticked_ms

    def view(self) -> FenceView:
        """Return what can be shown."""
        return FenceView(
            opening=self._opening,
            trusted=self.trusted(),
            admitting=self.admitting(),
            retired=self._retired,
            trust_left_ms=max(0, self._trusted_until_ms - self._clock.monotonic_ms()),
            loop_silent_ms=self.loop_silent_ms(),
        )
