"""The API as one ASGI application: routes, problem documents, health and metrics."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

import bettercompute
from bettercompute.api import commands, nodes, problems, tokens
from bettercompute.api.auth import Principal, Role, require
from bettercompute.api.context import ApiContext, Context
from bettercompute.api.shapes import GatewayShape, gateway_shape
from bettercompute.store import controller_runs, leases

router = APIRouter()


@router.get("/healthz", tags=["health"])
async def healthz() -> dict[str, str]:
    """Answer while the process lives."""
    return {"status": "ok"}


@router.get("/readyz", tags=["health"])
async def readyz(context: Context) -> dict[str, str]:
    """Answer while the database does; 503 otherwise."""
    await controller_runs.now_ms(context.database)
    return {"status": "ready"}


@router.get("/metrics", tags=["health"], include_in_schema=False)
async def metrics() -> Response:
    """Return this process's metrics in Prometheus' text format."""
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/gateways", tags=["gateways"])
async def list_gateways(
    context: Context, _: Annotated[Principal, Depends(require(Role.VIEWER))]
) -> dict[str, list[GatewayShape]]:
    """List the gateways that are not retired, by their leases."""
    return {"items": [gateway_shape(lease) for lease in await leases.list_all(context.database)]}


def create_app(context: ApiContext) -> FastAPI:
    """Return the application; whoever composes it starts and stops what is in `context`."""
    app = FastAPI(
        title="better-compute",
        version=bettercompute.__version__,
        summary="The operators' API: nodes, commands, join tokens.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.context = context
    problems.install(app)
    for part in (router, nodes.router, commands.router, tokens.router):
        app.include_router(part)
    return app
