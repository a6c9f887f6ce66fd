"""The gateway's counters, under the names of `telemetry`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from bettercompute import telemetry

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class GatewayMetrics:
    """One set of metrics, in a registry of its own unless given one: two gateways may live in one process."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry = registry or CollectorRegistry()
        self.sessions = Gauge(telemetry.METRIC_GATEWAY_SESSIONS, "Live sessions", registry=registry)
        self.lease_left = Gauge(telemetry.METRIC_GATEWAY_LEASE_LEFT, "How long the lease is trusted", registry=registry)
        self.loop_lag = Gauge(telemetry.METRIC_GATEWAY_LOOP_LAG, "Lag of the main loop", registry=registry)
        self.hellos_pending = Gauge(
            telemetry.METRIC_GATEWAY_HELLOS_PENDING, "Hello transactions that run or wait", registry=registry
        )
        self.refusals = Counter(
            telemetry.METRIC_GATEWAY_REFUSALS, "Refused calls", ["method", "reason"], registry=registry
        )
        self.closes = Counter(telemetry.METRIC_GATEWAY_CLOSES, "Ended sessions", ["reason"], registry=registry)
        self.handed_over = Counter(
            telemetry.METRIC_GATEWAY_HANDED_OVER, "Sessions asked to go elsewhere", ["reason"], registry=registry
        )
        self.hello_seconds = Histogram(
            telemetry.METRIC_GATEWAY_HELLO_SECONDS, "Hello transactions", buckets=SECONDS_BUCKETS, registry=registry
        )
        self.batch_seconds = Histogram(
            telemetry.METRIC_GATEWAY_BATCH_SECONDS, "Group commits", buckets=SECONDS_BUCKETS, registry=registry
        )
        self.facts_written = Counter(telemetry.METRIC_GATEWAY_FACTS_WRITTEN, "Facts written", registry=registry)
        self.facts_failed = Counter(telemetry.METRIC_GATEWAY_FACTS_FAILED, "Frames not written", registry=registry)
        self.facts_poisoned = Counter(telemetry.METRIC_GATEWAY_FACTS_POISONED, "Frames found guilty", registry=registry)
        self.facts_late = Counter(
            telemetry.METRIC_GATEWAY_FACTS_LATE, "Ends of commands that had ended, or are unknown", registry=registry
        )
        self.facts_backwards = Counter(
            telemetry.METRIC_GATEWAY_FACTS_BACKWARDS, "Older states than what is stored", registry=registry
        )
        self.dispatched = Counter(telemetry.METRIC_GATEWAY_COMMANDS_DISPATCHED, "Commands sent", registry=registry)
        self.busy = Counter(telemetry.METRIC_GATEWAY_COMMANDS_BUSY, "Commands put back", registry=registry)
        self.zombies = Counter(
            telemetry.METRIC_GATEWAY_ZOMBIES, "Sessions whose row belonged to another", registry=registry
        )
