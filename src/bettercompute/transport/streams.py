"""The transport's public door: `serve` and `dial`, and the contract of what they give (`memory` gives the same)."""

from bettercompute.transport.calls import (
    NO_METADATA,
    CallEnded,
    ClientCall,
    Connection,
    DialFailed,
    DialKind,
    DialTarget,
    EndKind,
    Handler,
    Identity,
    Peer,
    ServerCall,
    ServerCertificate,
)
from bettercompute.transport.client import CallRefused, dial, parse_gateway_url, prepare, raise_for_status
from bettercompute.transport.limits import DEFAULT_LIMITS, Limits
from bettercompute.transport.server import (
    Server,
    by_path,
    refusal_trailers,
    refuse_unknown_method,
    run_handler,
    serve,
    tune_collector,
)
from bettercompute.transport.tls import ServerSecrets, reloading, server_context

__all__ = [
    "DEFAULT_LIMITS",
    "NO_METADATA",
    "CallEnded",
    "CallRefused",
    "ClientCall",
    "Connection",
    "DialFailed",
    "DialKind",
    "DialTarget",
    "EndKind",
    "Handler",
    "Identity",
    "Limits",
    "Peer",
    "Server",
    "ServerCall",
    "ServerCertificate",
    "ServerSecrets",
    "by_path",
    "dial",
    "parse_gateway_url",
    "prepare",
    "raise_for_status",
    "refusal_trailers",
    "refuse_unknown_method",
    "reloading",
    "run_handler",
    "serve",
    "server_context",
    "tune_collector",
]
