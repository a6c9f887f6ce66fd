"""What the server enforces on the connections of each role, and why it is as long as it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server enforces on a role's connections; None leaves the server's own setting."""

    statement_timeout_ms: int | None = None
    idle_in_transaction_timeout_ms: int | None = None
    generic_plans: bool = False
    """Plan each statement once per connection, without looking at its arguments, instead of five times more.

    Such a plan may be of the minute after the installation, when every table was empty and reading one whole was the
    cheapest; it would be kept. So these connections read by index wherever there is one. See decisions 0152.
    """


# A gateway's transactions are bounded by the server, so that a hung gateway holds no lock for long.
GATEWAY_LIMITS = Limits(statement_timeout_ms=5_000, idle_in_transaction_timeout_ms=5_000, generic_plans=True)
# The lease must renew or fail well inside its 15 s.
LEASE_LIMITS = Limits(statement_timeout_ms=3_000, idle_in_transaction_timeout_ms=3_000)
# Of API and workers, whose longest statements touch some thousand rows: a connection that a firewall has forgotten must
# not hold a controller until TCP gives it up, a quarter of an hour later.
SERVER_LIMITS = Limits(statement_timeout_ms=30_000, idle_in_transaction_timeout_ms=30_000)
NO_LIMITS = Limits()
