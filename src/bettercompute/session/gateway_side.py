"""The gateway's end of a session: `step` routes each input to the rule of its heading and threads the state through.

The session begins with `open_session`, after the Hello transaction has committed, and ends with the first `Close`
effect. Nothing is decided here: one line per input; the rules live in `welcome`, `gateway_frames`, `liveness`,
`closing` and in `delivery`.
"""

from __future__ import annotations

from bettercompute.delivery.desired_state import StoredSpec
from bettercompute.protocol import messages
from bettercompute.session.effects import GatewayEffect
from bettercompute.session.gateway_state import DispatchDemand, GatewaySession, LaneDemand
from bettercompute.session.hello_plan import HelloPlan
from bettercompute.session.inputs import GatewayInput

__all__ = ["DispatchDemand", "GatewaySession", "LaneDemand", "open_session", "step", "wants"]


def open_session(
    plan: HelloPlan,
    *,
    spec: StoredSpec | None,
    trust: messages.SignedTrustBundle | None,
    server_time_ms: int,
    now_ms: int,
) -> tuple[GatewaySession, tuple[GatewayEffect, ...]]:
    """Return the session that a committed plan begins, and what is sent: Welcome, Ack, DesiredState, replay, cancels.

    `spec` when `plan.send_spec`, `trust` when `plan.send_trust`; `server_time_ms` is compute_now() of now.
    """
    raise NotImplementedError


def step(state: GatewaySession, given: GatewayInput, now_ms: int) -> tuple[GatewaySession, tuple[GatewayEffect, ...]]:
    """Return the state and the effects that follow from one input. A closed session ignores everything."""
    raise NotImplementedError


def wants(state: GatewaySession) -> DispatchDemand | None:
    """Return what dispatch may mark for this session now; None when it can take nothing."""
    raise NotImplementedError
