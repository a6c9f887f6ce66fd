"""The paths of the AgentGateway service, as HTTP/2 carries them (docs/protocol.md, "The service")."""

from __future__ import annotations

SERVICE = "bettercompute.agent.v1.AgentGateway"

JOIN = f"/{SERVICE}/Join"
RENEW = f"/{SERVICE}/Renew"
SESSION = f"/{SERVICE}/Session"
TUNNEL = f"/{SERVICE}/Tunnel"

PATHS = (JOIN, RENEW, SESSION, TUNNEL)
# Answered with one message for one message; the others are streams.
UNARY_PATHS = frozenset({JOIN, RENEW})
# Refused without a verified client certificate. Join is how a node comes by one.
CERTIFICATE_PATHS = frozenset({RENEW, SESSION, TUNNEL})
