"""JoinService in this process, and what it is made of, which the operators' API uses as well."""

from __future__ import annotations

from dataclasses import dataclass

from bettercompute.services.installation import Installation
from bettercompute.services.join import JoinService
from bettercompute.services.keys import KeyRing
from bettercompute.store.database import Database


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """The service, its pool, and the keys and settings that it answers with."""

    database: Database
    keys: KeyRing
    installation: Installation
    service: JoinService
