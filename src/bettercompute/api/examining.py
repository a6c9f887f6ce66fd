"""What the API asks of `doctor`: `services.doctor` behind a port, because the API calls no service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Concerned(Protocol):
    """A node that a check found something about."""

    @property
    def node_id(self) -> str:
        """Return the node's id."""
        ...

    @property
    def about(self) -> str:
        """Return what is to be said of it; may be empty."""
        ...


class Found(Protocol):
    """What a check has found."""

    @property
    def level(self) -> int:
        """Return 0 when all is well, 1 for a warning, 2 for a failure."""
        ...

    @property
    def sentence(self) -> str:
        """Return what it is."""
        ...

    @property
    def cure(self) -> str:
        """Return what to do about it; empty when all is well."""
        ...

    @property
    def nodes(self) -> Sequence[Concerned]:
        """Return the nodes concerned, the first of them."""
        ...


class Checked(Protocol):
    """A check that was made."""

    @property
    def name(self) -> str:
        """Return its name."""
        ...

    @property
    def finding(self) -> Found:
        """Return what it has found."""
        ...

    @property
    def took_ms(self) -> int:
        """Return how long it took."""
        ...


class Doctor(Protocol):
    """Examines the installation: `services.doctor` behind a port."""

    async def examine(self, names: Sequence[str] = ()) -> Sequence[Checked]:
        """Make all checks, or those that are named; refuse BAD_REQUEST a name that none has."""
        ...
