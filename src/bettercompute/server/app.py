"""The composition root: which parts a role needs, in what order they start, and in what order they stop.

Roles meet only in the database, so any number of processes may run any of them. A gateway reaches JoinService in its
own process, which therefore needs the key folder.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum

import structlog

import bettercompute
from bettercompute.api.app import create_app
from bettercompute.api.context import ApiContext, JoinEndpoint
from bettercompute.api.finished import FinishedFeed
from bettercompute.controllers.retention import Keep
from bettercompute.controllers.worker import Worker
from bettercompute.gateway.config import GatewayConfig
from bettercompute.gateway.gateway import Gateway
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.server.config import Config
from bettercompute.server.http import HttpServer, listen
from bettercompute.server.keys import advertised_url, ensure_operator_token, serving_secrets
from bettercompute.services.installation import Installation, publish_trust
from bettercompute.services.join import JoinService
from bettercompute.services.keys import ServiceKeys, load_service_keys
from bettercompute.services.provision import ProvisionService
from bettercompute.store import migrations
from bettercompute.store.database import GATEWAY_LIMITS, Database
from bettercompute.transport.tls import reloading
from bettercompute.world import World

_log = structlog.get_logger("bettercompute.server")

DAY_MS = 86_400_000
GATEWAY_READY_S = 10.0


class Role(StrEnum):
    """What a process of the control plane does."""

    API = "api"
    GATEWAY = "gateway"
    WORKER = "worker"


ALL_ROLES = frozenset(Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A started control plane: where it is reached. None for what this process does not do."""

    api_url: str | None
    gateway_url: str | None
    operator_token: str | None


@contextlib.asynccontextmanager
async def control_plane(config: Config, *, dsn: str, roles: frozenset[Role], world: World) -> AsyncIterator[Running]:
    """Run `roles` until the block ends.

    Raises `Refused` for missing keys, a port that is taken or a schema that is not current, Unavailable when the
    database does not answer.
    """
    await migrations.require_current(dsn)
    folder = KeyFolder(config.pki_path)
    keys = load_service_keys(folder)
    advertised = advertised_url(config, folder)
    installation = Installation(trust_domain=config.pki.trust_domain, gateway_urls=(advertised,))
    async with contextlib.AsyncExitStack() as stack:
        database = await Database.open(
            dsn, dice=world.dice, application_name="better-compute", pool_size=config.database.pool_size
        )
        stack.push_async_callback(database.close)
        await publish_trust(database, keys=keys, installation=installation, world=world)
        if Role.WORKER in roles:
            _start_worker(stack, config, database=database, world=world)
        gateway_url = None
        if Role.GATEWAY in roles:
            services = JoinService(database, keys=keys, installation=installation, world=world)
            await _start_gateway(stack, config, advertised=advertised, dsn=dsn, services=services, world=world)
            gateway_url = advertised
        api_url = operator_token = None
        if Role.API in roles:
            operator_token = await ensure_operator_token(database, state_dir=config.state_path, world=world)
            api_url = await _start_api(
                stack, config, database=database, dsn=dsn, keys=keys, installation=installation, world=world
            )
        _log.info("started", roles=sorted(roles), api=api_url, gateway=gateway_url, version=bettercompute.__version__)
        yield Running(api_url=api_url, gateway_url=gateway_url, operator_token=operator_token)
        _log.info("stopping")


def _start_worker(stack: contextlib.AsyncExitStack, config: Config, *, database: Database, world: World) -> None:
    keep_ms = config.worker.command_retention_days * DAY_MS
    holder = f"worker-{world.ids.random_bytes(4).hex()}"
    worker = Worker(
        database, world=world, holder=holder, keep=Keep(commands_ms=keep_ms, outbox_ms=keep_ms, events_ms=keep_ms)
    )
    worker.start()
    stack.push_async_callback(worker.stop)


async def _start_gateway(
    stack: contextlib.AsyncExitStack,
    config: Config,
    *,
    advertised: str,
    dsn: str,
    services: JoinService,
    world: World,
) -> None:
    # A pool of its own: the server bounds every transaction of a gateway, so that a hung one holds no lock for long.
    database = await Database.open(
        dsn,
        dice=world.dice,
        application_name="better-compute gateway",
        pool_size=config.database.pool_size,
        limits=GATEWAY_LIMITS,
    )
    stack.push_async_callback(database.close)
    gateway = Gateway(
        GatewayConfig(
            name=config.gateway.name,
            host=config.gateway.host,
            port=config.gateway.port,
            advertise_url=advertised,
            version=bettercompute.__version__,
            trust_domain=config.pki.trust_domain,
            streams_max=config.gateway.max_streams,
            handshakes_per_s=config.gateway.handshakes_per_s,
        ),
        database=database,
        services=services,
        world=world,
        tls=reloading(serving_secrets(KeyFolder(config.pki_path))),
    )
    await gateway.start()
    stack.push_async_callback(gateway.stop)
    # Not ready is no error: a database that is slow now must not keep the process from serving later.
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(gateway.until_ready(), GATEWAY_READY_S)


async def _start_api(
    stack: contextlib.AsyncExitStack,
    config: Config,
    *,
    database: Database,
    dsn: str,
    keys: ServiceKeys,
    installation: Installation,
    world: World,
) -> str:
    finished = FinishedFeed(dsn)
    context = ApiContext(
        database=database,
        world=world,
        finished=finished,
        join_endpoint=JoinEndpoint(
            gateway_urls=installation.gateway_urls,
            serving_ca_pins=(keys.serving_ca_pin,),
            join_signing_key=keys.join_signing.public_key(),
            join_encryption_key=keys.join_encryption.public_key(),
        ),
        provisioner=ProvisionService(database, keys=keys, installation=installation, world=world),
        trust_domain=config.pki.trust_domain,
        site=config.pki.site,
    )
    server = HttpServer(create_app(context), listener=listen(config.api.host, config.api.port, purpose="api"))
    finished.start()
    stack.push_async_callback(finished.stop)
    stack.push_async_callback(server.stop)
    return server.url
