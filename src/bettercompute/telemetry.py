"""Every metric, log field and published event name, in one place: what operators' dashboards and alerts rely on."""

from __future__ import annotations

# Published events (the outbox and `/v1/events`).
EVENT_NODE_JOINED = "node.joined"
EVENT_NODE_CONNECTED = "node.connected"
EVENT_NODE_DISCONNECTED = "node.disconnected"
EVENT_NODE_UNREACHABLE = "node.unreachable"
EVENT_COMMAND_FINISHED = "command.finished"
EVENT_DUPLICATE_SESSION = "security.node.duplicate-session"
EVENT_NODE_QUARANTINED = "security.node.quarantined"
EVENT_SUPERSEDED_CERTIFICATE = "security.node.superseded-certificate"
