"""Every metric, log field and published event name, in one place: what operators' dashboards and alerts rely on."""

from __future__ import annotations

# Published events (the outbox and `/v1/events`).
EVENT_NODE_JOINED = "node.joined"
EVENT_NODE_CONNECTED = "node.connected"
EVENT_NODE_DISCONNECTED = "node.disconnected"
EVENT_NODE_UNREACHABLE = "node.unreachable"
EVENT_NODE_LOCKED = "node.locked"
EVENT_NODE_UNLOCKED = "node.unlocked"
EVENT_NODE_FORGOTTEN = "node.forgotten"
EVENT_NODE_SPEC_OVERTAKEN = "node.spec-overtaken"
EVENT_COMMAND_FINISHED = "command.finished"
EVENT_DUPLICATE_SESSION = "security.node.duplicate-session"
EVENT_NODE_QUARANTINED = "security.node.quarantined"
EVENT_NODE_REVOKED = "security.node.revoked"
EVENT_SUPERSEDED_CERTIFICATE = "security.node.superseded-certificate"
EVENT_RESULT_NOT_ATTESTED = "security.command.result-not-attested"
EVENT_REPORT_NOT_ATTESTED = "security.node.report-not-attested"

# Metrics of a worker (`/metrics`).
METRIC_ATTESTATIONS = "better_compute_attestations"

# Metrics of a gateway (`/metrics`).
METRIC_GATEWAY_SESSIONS = "better_compute_gateway_sessions"
METRIC_GATEWAY_LEASE_LEFT = "better_compute_gateway_lease_left_seconds"
METRIC_GATEWAY_REFUSALS = "better_compute_gateway_refusals"
METRIC_GATEWAY_CLOSES = "better_compute_gateway_session_closes"
METRIC_GATEWAY_HELLO_SECONDS = "better_compute_gateway_hello_seconds"
METRIC_GATEWAY_HELLOS_PENDING = "better_compute_gateway_hellos_pending"
METRIC_GATEWAY_FACTS_WRITTEN = "better_compute_gateway_facts_written"
METRIC_GATEWAY_FACTS_FAILED = "better_compute_gateway_facts_failed"
METRIC_GATEWAY_FACTS_POISONED = "better_compute_gateway_facts_poisoned"
METRIC_GATEWAY_FACTS_LATE = "better_compute_gateway_facts_late"
METRIC_GATEWAY_FACTS_BACKWARDS = "better_compute_gateway_facts_backwards"
METRIC_GATEWAY_BATCH_SECONDS = "better_compute_gateway_batch_seconds"
METRIC_GATEWAY_COMMANDS_DISPATCHED = "better_compute_gateway_commands_dispatched"
METRIC_GATEWAY_COMMANDS_BUSY = "better_compute_gateway_commands_busy"
METRIC_GATEWAY_ZOMBIES = "better_compute_gateway_zombies"
METRIC_GATEWAY_HANDED_OVER = "better_compute_gateway_handed_over"
METRIC_GATEWAY_LOOP_LAG = "better_compute_gateway_loop_lag_seconds"
