"""The API as one ASGI application: routes, problem documents, health and metrics."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

import bettercompute
from bettercompute.api import (
    approvals,
    approvers,
    batches,
    commands,
    events,
    gateways,
    nodes,
    problems,
    specs,
    standing,
    steps,
    tokens,
    trust_keys,
    waiting,
)
from bettercompute.api.api_tokens import router as api_tokens_router
from bettercompute.api.auth import Principal, authenticate
from bettercompute.api.bounds import Bounds
from bettercompute.api.certificates import router as certificates_router
from bettercompute.api.context import ApiContext, Context
from bettercompute.api.doctor import router as doctor_router
from bettercompute.api.node_events import router as node_events_router
from bettercompute.store import controller_runs

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
async def metrics(context: Context) -> Response:
    """Return this process's metrics in Prometheus' text format."""
    return Response(generate_latest(context.registry), media_type=CONTENT_TYPE_LATEST)


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
    app.state.batches = batches.BatchBoard(context)

    async def admit(authorization: str) -> Principal:
        return await authenticate(context.database, authorization)

    app.add_middleware(Bounds, admit=admit)
    problems.install(app)
    for part in (
        router,
        doctor_router,
        certificates_router,
        node_events_router,
        nodes.router,
        standing.router,
        specs.router,
        waiting.router,
        events.router,
        commands.router,
        batches.router,
        steps.router,
        tokens.router,
        api_tokens_router,
        gateways.router,
        trust_keys.router,
        approvers.router,
        approvals.router,
    ):
        app.include_router(part)
    return app
