"""Health and metrics of a process: for those without the API, on a plain listener of their own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from bettercompute.errors import BetterComputeError

# Returns when its part is ready; raises one of our errors, with the reason in words, when it is not.
Check = Callable[[], Awaitable[None]]


def process_registry() -> CollectorRegistry:
    """Return a registry with the process's own metrics: one for all parts of a process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def create_health_app(*, checks: Sequence[Check], registry: CollectorRegistry) -> Starlette:
    """Return `/healthz` (the process lives), `/readyz` (every check passes; else 503 and why) and `/metrics`."""

    async def healthz(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(_: Request) -> Response:
        for check in checks:
            try:
                await check()
            except BetterComputeError as error:
                return JSONResponse({"status": "not ready", "detail": error.message}, status_code=503)
        return JSONResponse({"status": "ready"})

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(routes=[Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)])
