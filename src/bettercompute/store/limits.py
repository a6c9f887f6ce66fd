"""What the server enforces on the connections of each role, and why it is as long as it is."""

from __future__ import annotations

from dataclasses import dataclass

TRANSACTION_TIMEOUT_SINCE = 17


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server enforces on a role's connections; None leaves the server's own setting."""

    statement_timeout_ms: int | None = None
    idle_in_transaction_timeout_ms: int | None = None
    transaction_timeout_ms: int | None = None
    """The only one that ends a transaction whose client stopped between preparing a statement and running it.

    The driver prepares with a Flush: until the statement runs the server takes itself for busy with the client's
    message, so neither of the two others counts. Only PostgreSQL 17 and later have it. See decisions 0186.
    """
    generic_plans: bool = False
    """Plan each statement once per connection, without looking at its arguments, instead of five times more.

    Such a plan may be of the minute after the installation, when every table was empty and reading one whole was the
    cheapest; it would be kept. So these connections read by index wherever there is one. See decisions 0152.
    """

    def startup_settings(self) -> dict[str, str]:
        """Return the settings to connect with, which every supported server knows."""
        settings = {}
        if self.statement_timeout_ms is not None:
            settings["statement_timeout"] = str(self.statement_timeout_ms)
        if self.idle_in_transaction_timeout_ms is not None:
            settings["idle_in_transaction_session_timeout"] = str(self.idle_in_transaction_timeout_ms)
        if self.generic_plans:
            settings["plan_cache_mode"] = "force_generic_plan"
            settings["enable_seqscan"] = "off"
            # Before PostgreSQL 18 what has no index is made to look so dear that it would be compiled first.
            settings["jit"] = "off"
        return settings

    def settings_of_version(self, major: int) -> dict[str, str]:
        """Return the settings to make once connected to a server of this major version."""
        if self.transaction_timeout_ms is None or major < TRANSACTION_TIMEOUT_SINCE:
            return {}
        return {"transaction_timeout": str(self.transaction_timeout_ms)}


# A gateway's transactions are bounded by the server, so that a hung gateway holds no lock for long; as a whole by what
# a lease lasts: whoever was silent for that long has lost its sessions anyway.
GATEWAY_LIMITS = Limits(
    statement_timeout_ms=5_000,
    idle_in_transaction_timeout_ms=5_000,
    transaction_timeout_ms=15_000,
    generic_plans=True,
)
# The lease must renew or fail well inside its 15 s.
LEASE_LIMITS = Limits(statement_timeout_ms=3_000, idle_in_transaction_timeout_ms=3_000, transaction_timeout_ms=6_000)
# Of API and workers, whose longest statements touch some thousand rows: a connection that a firewall has forgotten must
# not hold a controller until TCP gives it up, a quarter of an hour later.
SERVER_LIMITS = Limits(
    statement_timeout_ms=30_000, idle_in_transaction_timeout_ms=30_000, transaction_timeout_ms=120_000
)
NO_LIMITS = Limits()
