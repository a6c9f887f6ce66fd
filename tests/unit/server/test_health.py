"""Health and metrics of a process without the API."""

import httpx
from prometheus_client import Counter

from bettercompute.errors import Unavailable
from bettercompute.server.health import create_health_app, process_registry


async def passes() -> None:
    return


async def fails() -> None:
    raise Unavailable("the gateway admits no sessions")


async def test_it_lives_says_what_it_waits_for_and_counts() -> None:
    registry = process_registry()
    Counter("things", "Things", registry=registry).inc(3)
    for checks, status in (((passes,), 200), ((passes, fails), 503)):
        transport = httpx.ASGITransport(app=create_health_app(checks=checks, registry=registry))
        async with httpx.AsyncClient(transport=transport, base_url="http://health.test") as client:
            assert (await client.get("/healthz")).json() == {"status": "ok"}
            ready = await client.get("/readyz")
            assert ready.status_code == status
            assert ready.is_success or ready.json()["detail"] == "the gateway admits no sessions"
            metrics = (await client.get("/metrics")).text
            assert "things_total 3.0" in metrics
            assert "process_resident_memory_bytes" in metrics
