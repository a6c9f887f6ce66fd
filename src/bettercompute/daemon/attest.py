"""What this node signs of itself: the end of a command of an attested kind, and a statement in its status report.

Signed by the key of the identity as it is now, so that no gateway can say it in the node's place. See
docs/security.md, "Attested results"; decisions 0142.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bettercompute import __version__
from bettercompute.daemon.identity import Identity
from bettercompute.delivery.commands import CommandState
from bettercompute.pki import signatures
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import attested_report_input, command_update_input
from bettercompute.protocol.kinds import CommandKind
from bettercompute.session.inputs import SpecHeld

# The certificate comes along, for a control plane that was restored to before it was issued; its CA is there.
LEAF = 1


class NodeAttestor:
    """Signs under the identity that `identity` gives at that moment."""

    def __init__(
        self,
        *,
        boot_id: str,
        identity: Callable[[], Identity],
        spec: Callable[[], SpecHeld],
        inventory: Callable[[], Mapping[str, bytes]],
        now_ms: Callable[[], int],
    ) -> None:
        """`now_ms` is confirmed server time where there is any."""
        self._boot_id = boot_id
        self._identity = identity
        self._spec = spec
        self._inventory = inventory
        self._now_ms = now_ms

    def update(
        self, kind: CommandKind, command_id: str, state: CommandState, result: bytes
    ) -> messages.Signature | None:
        """Sign the end of a command; None for a kind that is not attested."""
        if not kind.attested:
            return None
        covered = command_update_input(command_id=command_id, state=state, result=result)
        identity = self._identity()
        return signatures.sign(identity.key, covered, chain_der=identity.chain_der[:LEAF])

    def report(self) -> messages.AttestedReport:
        """State what this node is, runs and holds."""
        identity, spec = self._identity(), self._spec()
        body = messages.AttestedReportBody(
            node_id=identity.record.node_id,
            boot_id=self._boot_id,
            at_ms=self._now_ms(),
            daemon_version=__version__,
            applied_generation=spec.applied_generation,
            spec_sha256=spec.spec_sha256,
            inventory=[
                messages.SectionHash(name=name, sha256=digest) for name, digest in sorted(self._inventory().items())
            ],
        ).SerializeToString(deterministic=True)
        return messages.AttestedReport(
            body=body,
            signature=signatures.sign(identity.key, attested_report_input(body), chain_der=identity.chain_der[:LEAF]),
        )
