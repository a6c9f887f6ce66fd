"""Under which command root something is signed: the one that is in use in the transaction that stores it.

So all processes change over at one instant, that of the commit of `pki rotate-command-root --stage switch`. See
decisions 0130.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bettercompute.errors import Unavailable
from bettercompute.pki.intent import IntentSigner
from bettercompute.pki.rotation import Purpose
from bettercompute.store import trust
from bettercompute.store.database import Queries


@dataclass(frozen=True, slots=True)
class Signing:
    """Signs with the worker keys that this process holds."""

    under: Callable[[str], IntentSigner | None]
    """The worker key under a command root, by the SHA-256 of the root's key; None: it is not held here."""

    async def signer(self, queries: Queries) -> IntentSigner:
        """Return the signer of the root in use; Unavailable where this process does not hold its worker key."""
        root_sha256 = await trust.key_in_use(queries, Purpose.COMMAND_ROOT)
        if root_sha256 is None:
            raise Unavailable("no command root is in use yet: the control plane is starting")
        return self.held(root_sha256)

    def held(self, root_sha256: str) -> IntentSigner:
        """Return the signer under a certain root; Unavailable where this process does not hold its worker key."""
        signer = self.under(root_sha256)
        if signer is None:
            raise Unavailable(
                f"this process cannot sign under the command root {root_sha256[:16]}: its key folder lacks that root's "
                "worker key; copy the worker files of the folder in which the rotation was prepared"
            )
        return signer


async def signer_of(signing: Signing | None, queries: Queries) -> IntentSigner | None:
    """Return who signs what is stored by `queries`; None: the installation signs nothing."""
    return None if signing is None else await signing.signer(queries)
