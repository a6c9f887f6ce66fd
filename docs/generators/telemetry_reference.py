"""What operators watch: reasons of refusals, metrics and published events, from the code that uses them."""

from __future__ import annotations

from bettercompute import telemetry
from bettercompute.gateway.metrics import GatewayMetrics
from bettercompute.protocol.statuses import STATUS_OF, Reason
from docs.generators.markdown import code, generated, table

REASONS_INTRODUCTION = """\
Every reason of a refusal (`x-bc-reason`, `reason` in the API's problem documents and in logs) with its gRPC status.
Reasons are stable: programs may compare them. The sentence beside one says what to do.
[protocol.md](../protocol.md#errors-outside-frames) says how refusals travel."""

EVENT_PREFIX = "EVENT_"


def reasons() -> str:
    """Return docs/reference/reasons.md."""
    rows = [(code(reason.value), STATUS_OF[reason].name, str(STATUS_OF[reason].value)) for reason in Reason]
    return "\n\n".join(
        (
            generated("src/bettercompute/protocol/statuses.py"),
            "# Reasons",
            REASONS_INTRODUCTION,
            table(("reason", "status", "number"), rows),
        )
    )


def metrics_and_events() -> str:
    """Return docs/reference/metrics.md."""
    registry = GatewayMetrics().registry
    rows = []
    for family in registry.collect():
        labels = sorted({name for sample in family.samples for name in sample.labels} - {"le"})
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.append(
            (code(name), family.type, ", ".join(map(code, labels)) or _labels(family.name), family.documentation)
        )
    events = [
        (code(value),)
        for name, value in vars(telemetry).items()
        if name.startswith(EVENT_PREFIX) and isinstance(value, str)
    ]
    return "\n\n".join(
        (
            generated("src/bettercompute/telemetry.py and gateway/metrics.py"),
            "# Metrics and events",
            "## Metrics of a gateway",
            "Counted by each gateway, times in seconds. No listener shows them yet; `/metrics` is the API's own.",
            table(("metric", "type", "labels", "meaning"), sorted(rows)),
            "## Published events",
            "Written in the transaction of what they tell of, and numbered after its commit. The names are stable.",
            table(("event",), events),
        )
    )


def _labels(family: str) -> str:
    """A metric with labels has no sample before its first use, so those are named here."""
    known = {telemetry.METRIC_GATEWAY_REFUSALS: ("method", "reason"), telemetry.METRIC_GATEWAY_CLOSES: ("reason",)}
    return ", ".join(map(code, known.get(family, ())))
