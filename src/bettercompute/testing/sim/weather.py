"""How the simulated database is: its latency, whether it answers, and what becomes of each transaction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class Fate:
    """What becomes of one transaction, drawn before it begins."""

    FINE = "fine"
    LOST_BEFORE = "lost-before-commit"
    LOST_AFTER = "lost-after-commit"


@dataclass(slots=True, kw_only=True)
class Weather:
    """How the server and the way to it are; a fault changes it."""

    latency_s: Callable[[], float] = lambda: 0.0
    fate: Callable[[str], str] = lambda _client: Fate.FINE
    down: bool = False
    """Connections are refused."""
    read_only: bool = False
    """It is a standby: whoever writes is refused."""
    silent: bool = False
    """Nothing answers: packets are dropped."""
