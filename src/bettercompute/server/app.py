"""The composition root: which parts a role needs, in what order they start, and in what order they stop.

Roles meet only in the database, so any number of processes may run any of them; only a gateway also calls JoinService.
It finds it in its own process, which then holds the installation's keys, or over the internal HTTP in the api's, and
then holds no key but its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum

import structlog
from prometheus_client import CollectorRegistry

import bettercompute
from bettercompute.controllers.retention import Keep
from bettercompute.controllers.worker import Worker
from bettercompute.errors import Unavailable
from bettercompute.gateway.config import GatewayConfig
from bettercompute.gateway.gateway import Gateway
from bettercompute.gateway.metrics import GatewayMetrics
from bettercompute.gateway.services import GatewayServices
from bettercompute.pki import keyfiles
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.protocol.statuses import Reason
from bettercompute.server.config import Config
from bettercompute.server.examining import held_certificates
from bettercompute.server.health import Check, create_health_app, process_registry
from bettercompute.server.http import HttpServer, listen
from bettercompute.server.internal_client import RemoteServices
from bettercompute.server.internal_server import CONNECTIONS_MAX, CallerProtocol, create_internal_app
from bettercompute.server.internal_tls import dialer_tls, listener_tls
from bettercompute.server.joining import Joining
from bettercompute.server.keys import (
    GATEWAY_FILES,
    SERVING_FILES,
    advertised_url,
    check_serving_files,
    ensure_operator_token,
    serving_secrets,
    warn_of_needless_keys,
    worker_signing,
)
from bettercompute.services.installation import Installation, publish_trust
from bettercompute.services.join import JoinService
from bettercompute.services.keys import KeyRing
from bettercompute.store import controller_runs, migrations, sessions
from bettercompute.store.database import Database
from bettercompute.store.limits import GATEWAY_LIMITS, SERVER_LIMITS
from bettercompute.store.signing import Signing
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
    internal_url: str | None = None
    """Where gateways elsewhere reach the join service."""


def needs_service_keys(roles: frozenset[Role], config: Config) -> bool:
    """Say whether JoinService runs in this process: for the api, and for a gateway that is not told of another one."""
    return Role.API in roles or (Role.GATEWAY in roles and not config.gateway.services_url)


@contextlib.asynccontextmanager
async def control_plane(config: Config, *, dsn: str, roles: frozenset[Role], world: World) -> AsyncIterator[Running]:
    """Run `roles` until the block ends.

    Raises `Refused` for missing keys, a port that is taken or a schema that is not current, Unavailable when the
    database does not answer.
    """
    _check_files(config, roles=roles, world=world)
    await migrations.require_current(dsn)
    registry = process_registry()
    checks: list[Check] = []
    async with contextlib.AsyncExitStack() as stack:
        joining = None
        if needs_service_keys(roles, config):
            joining = await _open_joining(stack, config, dsn=dsn, roles=roles, world=world)
        if Role.WORKER in roles:
            shared = joining.database if joining is not None else await _open_database(stack, config, dsn, world)
            _start_worker(stack, config, database=shared, registry=registry, world=world)
            checks.append(lambda: _answers(shared))
        gateway_url = None
        if Role.GATEWAY in roles:
            services = _services(stack, config, joining=joining, world=world)
            gateway = await _start_gateway(
                stack, config, dsn=dsn, services=services, metrics=GatewayMetrics(registry), world=world
            )
            gateway_url = gateway.config.advertise_url
            checks.append(lambda: _admits(gateway))
        api_url = internal_url = operator_token = None
        if Role.API in roles:
            assert joining is not None, "the api needs the service keys"
            operator_token = await ensure_operator_token(joining.database, state_dir=config.state_path, world=world)
            # Here, because it doubles what a process loads: gateways start without it.
            from bettercompute.server.operators_api import start_api

            api_url = start_api(
                stack,
                config,
                joining=joining,
                dsn=dsn,
                registry=registry,
                signing=_signing(config, world=world),
                world=world,
            )
            if config.internal.host:
                internal_url = _start_internal(stack, config, services=joining.service)
        elif config.health.host:
            listener = listen(config.health.host, config.health.port, purpose="health")
            health = HttpServer(create_health_app(checks=checks, registry=registry), listener=listener)
            stack.push_async_callback(health.stop)
        running = Running(
            api_url=api_url, gateway_url=gateway_url, operator_token=operator_token, internal_url=internal_url
        )
        _log.info(
            "started",
            roles=sorted(roles),
            api=api_url,
            gateway=gateway_url,
            internal=internal_url,
            version=bettercompute.__version__,
        )
        yield running
        _log.info("stopping")


async def _answers(database: Database) -> None:
    await controller_runs.now_ms(database)


async def _admits(gateway: Gateway) -> None:
    if not gateway.ready:
        raise Unavailable("the gateway admits no sessions: it has no lease, or it drains", reason=Reason.STARTING)


def _check_files(config: Config, *, roles: frozenset[Role], world: World) -> None:
    """Refuse a key folder that lacks what a role here shows or believes, before anything starts."""
    folder = KeyFolder(config.pki_path)
    now_ms = world.clock.now_ms()
    if Role.GATEWAY in roles and config.gateway.services_url:
        check_serving_files(folder, files=GATEWAY_FILES, what="a gateway with services_url", now_ms=now_ms)
        if not needs_service_keys(roles, config):
            warn_of_needless_keys(folder)
    if Role.API in roles and config.internal.host:
        check_serving_files(folder, files=SERVING_FILES, what="the internal listener", now_ms=now_ms)


async def _open_database(stack: contextlib.AsyncExitStack, config: Config, dsn: str, world: World) -> Database:
    database = await Database.open(
        dsn,
        dice=world.dice,
        application_name="better-compute",
        pool_size=config.database.pool_size,
        limits=SERVER_LIMITS,
    )
    stack.push_async_callback(database.close)
    return database


async def _open_joining(
    stack: contextlib.AsyncExitStack, config: Config, *, dsn: str, roles: frozenset[Role], world: World
) -> Joining:
    folder = KeyFolder(config.pki_path)
    keys = KeyRing(folder)
    advertised = advertised_url(config, folder, gateway_is_here=Role.GATEWAY in roles)
    installation = Installation(
        trust_domain=config.pki.trust_domain,
        gateway_urls=(advertised,),
        command_signing=config.pki.command_signing,
        node_lifetime_ms=config.pki.node_certificate_s * 1000,
    )
    database = await _open_database(stack, config, dsn, world)
    await publish_trust(database, keys=keys.read(), installation=installation, world=world)
    service = JoinService(database, keys=keys, installation=installation, world=world)
    return Joining(database=database, keys=keys, installation=installation, service=service)


def _services(
    stack: contextlib.AsyncExitStack, config: Config, *, joining: Joining | None, world: World
) -> GatewayServices:
    """Return the join service that the gateway here is told of: the one in this process, or a client of another."""
    if not config.gateway.services_url:
        assert joining is not None, "a gateway without services_url needs the service keys"
        return joining.service
    secrets = serving_secrets(KeyFolder(config.pki_path), peers_ca=keyfiles.SERVING_CA)
    remote = RemoteServices(config.gateway.services_url, tls=dialer_tls(secrets), world=world)
    stack.push_async_callback(remote.close)
    return remote


def _start_internal(stack: contextlib.AsyncExitStack, config: Config, *, services: GatewayServices) -> str:
    secrets = serving_secrets(KeyFolder(config.pki_path), peers_ca=keyfiles.SERVING_CA)
    server = HttpServer(
        create_internal_app(services, gateway_names=config.internal.gateway_names),
        listener=listen(config.internal.host, config.internal.port, purpose="internal"),
        tls=listener_tls(secrets),
        protocol=CallerProtocol,
        connections_max=CONNECTIONS_MAX,
    )
    stack.push_async_callback(server.stop)
    return server.url


def _signing(config: Config, *, world: World) -> Signing | None:
    """Return what signs commands and specs; None where `pki.command_signing` is off."""
    return worker_signing(KeyFolder(config.pki_path), world=world) if config.pki.command_signing else None


def _start_worker(
    stack: contextlib.AsyncExitStack,
    config: Config,
    *,
    database: Database,
    registry: CollectorRegistry,
    world: World,
) -> None:
    keep_ms = config.worker.command_retention_days * DAY_MS
    holder = f"worker-{world.ids.random_bytes(4).hex()}"
    worker = Worker(
        database,
        world=world,
        holder=holder,
        keep=Keep(commands_ms=keep_ms, outbox_ms=keep_ms, events_ms=keep_ms),
        signing=_signing(config, world=world),
        registry=registry,
        trust_domain=config.pki.trust_domain,
    )
    worker.start()
    stack.push_async_callback(worker.stop)


async def _start_gateway(
    stack: contextlib.AsyncExitStack,
    config: Config,
    *,
    dsn: str,
    services: GatewayServices,
    metrics: GatewayMetrics,
    world: World,
) -> Gateway:
    folder = KeyFolder(config.pki_path)
    advertised = advertised_url(config, folder, gateway_is_here=True)
    # A pool of its own: the server bounds every transaction of a gateway, so that a hung one holds no lock for long.
    database = await Database.open(
        dsn,
        dice=world.dice,
        application_name="better-compute gateway",
        pool_size=config.database.pool_size,
        limits=GATEWAY_LIMITS,
        rehearsed=sessions.HELLO_STATEMENTS,
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
        tls=reloading(serving_secrets(folder)),
        metrics=metrics,
        # A source of its own: it is asked on the lease's thread.
        certificates=held_certificates(serving_secrets(folder)),
    )
    await gateway.start()
    stack.push_async_callback(gateway.stop)
    # Not ready is no error: a database that is slow now must not keep the process from serving later.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(GATEWAY_READY_S):
            await gateway.until_ready()
    return gateway
