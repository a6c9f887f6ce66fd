"""The operators' API in this process: what its routes are given.

Its libraries are half of what a process of all roles loads, in time and memory; who needs no API imports none of this.
"""

from __future__ import annotations

import contextlib

from prometheus_client import CollectorRegistry

from bettercompute.api.app import create_app
from bettercompute.api.context import ApiContext, JoinEndpoint
from bettercompute.api.finished import FinishedFeed
from bettercompute.server.config import Config
from bettercompute.server.examining import make_doctor
from bettercompute.server.http import HttpServer, listen
from bettercompute.server.joining import Joining
from bettercompute.services.provision import ProvisionService
from bettercompute.services.rotating import RotationService
from bettercompute.store.signing import Signing
from bettercompute.world import World


def start_api(
    stack: contextlib.AsyncExitStack,
    config: Config,
    *,
    joining: Joining,
    dsn: str,
    registry: CollectorRegistry,
    signing: Signing | None,
    world: World,
) -> str:
    """Serve the operators' API until the stack is closed, and return its address. Raises `Refused` for a taken port."""
    keys, installation = joining.keys, joining.installation
    finished = FinishedFeed(dsn)
    context = ApiContext(
        database=joining.database,
        world=world,
        finished=finished,
        registry=registry,
        doctor=make_doctor(config, database=joining.database, dsn=dsn, world=world),
        join_endpoint=JoinEndpoint(
            gateway_urls=installation.gateway_urls,
            serving_ca_pins=(keys.read().serving_ca_pin,),
            join_signing_key=keys.read().join_signing.public_key(),
            join_encryption_key=keys.read().join_encryption.public_key(),
        ),
        provisioner=ProvisionService(joining.database, keys=keys, installation=installation, world=world),
        trust_domain=config.pki.trust_domain,
        site=config.pki.site,
        trust=RotationService(
            joining.database,
            keys=keys.read,
            installation=installation,
            signing=signing,
            world=world,
        ),
        signing=signing,
    )
    server = HttpServer(create_app(context), listener=listen(config.api.host, config.api.port, purpose="api"))
    finished.start()
    stack.push_async_callback(finished.stop)
    stack.push_async_callback(server.stop)
    return server.url
