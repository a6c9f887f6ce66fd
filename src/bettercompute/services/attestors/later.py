"""The attestors `cloud-iid` and `tpm`: named by the protocol, and refused in words until they are built.

Nothing of their evidence is looked at. See docs/security.md, "Attestors"; decisions 0145.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.services.issuing import Request

LATER = ("cloud-iid", "tpm")


@dataclass(frozen=True, slots=True)
class LaterAttestor:
    """Refuses everything."""

    name: str
    instead: str
    """What to join by meanwhile."""

    def examine(
        self,
        request: messages.JoinRequest,  # noqa: ARG002 - the port's
        csr: Request,  # noqa: ARG002 - as above
        *,
        role: str,  # noqa: ARG002 - as above
    ) -> NoReturn:
        """Refuse UNIMPLEMENTED."""
        raise refuse(
            Reason.ATTESTOR_UNKNOWN,
            f"attestor {self.name} is not supported by this version of the control plane: join by {self.instead}",
        )
