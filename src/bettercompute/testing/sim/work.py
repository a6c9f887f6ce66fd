"""What operators and nodes do while a simulation runs: commands, cancels, specs, events."""

from __future__ import annotations

import asyncio
import json

from bettercompute import telemetry
from bettercompute.delivery.desired_state import next_generation
from bettercompute.delivery.spec_generations import Circumstances, compose
from bettercompute.delivery.spec_values import TUNNELS_MAX
from bettercompute.errors import BetterComputeError
from bettercompute.pki.identity import DEFAULT_TRUST_DOMAIN
from bettercompute.protocol import messages
from bettercompute.protocol.kinds import KINDS, pack_payload
from bettercompute.store import commands, specs, waiting
from bettercompute.store.database import Transaction
from bettercompute.store.signing import signer_of
from bettercompute.testing.sim.node import DURATIONS_S
from bettercompute.testing.sim.stage import Stage

NOT_AFTER_MS = (60_000, 600_000)
LATER_SHARE = 0.15
LATER_S = (1, 120)
BURSTS = (1, 1, 1, 1, 1, 1, 4, 12)
IN_FLIGHT = (2, 3, 4)
ATTEND_EVERY_S = 60
# How often a spec differs from the one before in one section only, and so goes out as a patch.
PATCH_SHARE = 0.7


async def enqueue_for_ever(stage: Stage) -> None:
    """Enqueue commands, and cancel some of them a while later."""
    every_s = stage.scenario.work.command_every_s
    while every_s:
        await asyncio.sleep(stage.rng.expovariate(1 / every_s))
        node = stage.rng.choice(stage.nodes)
        kind = stage.rng.choice(sorted(DURATIONS_S))
        # Now and then more than a lane has credits for.
        for _ in range(stage.rng.choice(BURSTS)):
            command_id = stage.world.ids.uuid7()
            later_ms = 0 if stage.rng.random() >= LATER_SHARE else int(1000 * stage.rng.uniform(*LATER_S))
            try:
                await enqueue(stage, node.node_id, command_id, kind=kind, later_ms=later_ms)
            except BetterComputeError as error:
                stage.tell(f"{command_id} was not enqueued: {error.message}")
                break
            if stage.rng.random() < stage.scenario.work.cancel_share:
                stage.operator_process.spawn(_cancel_later(stage, command_id))


async def enqueue(
    stage: Stage,
    node_id: str,
    command_id: str,
    *,
    kind: str,
    forged: bool = False,
    within_ms: tuple[int, int] = NOT_AFTER_MS,
    later_ms: int = 0,
) -> None:
    """Enqueue a command as the API does, signed where intent is; `forged`: without the signature."""
    known = KINDS[kind]
    now_ms = stage.server.now_ms()
    not_before_ms = now_ms + later_ms if later_ms else None
    not_after_ms = now_ms + later_ms + int(stage.rng.uniform(*within_ms))
    async with stage.operator.transaction() as transaction:
        [seq] = await commands.draw_seqs(transaction, count=1)
        body = messages.CommandBody(
            command_id=command_id,
            node_id=node_id,
            kind=kind,
            lane=known.lane,
            payload=pack_payload(known.payload()),
            not_before_ms=not_before_ms or 0,
            not_after_ms=not_after_ms,
            timeout_ms=known.timeout_ms,
            seq=seq,
            issued_at_ms=now_ms,
        )
        signer = None if forged else await signer_of(stage.signing, transaction)
        stored = body.SerializeToString()
        if forged:
            stage.frames.forged.add(command_id)
        new = commands.NewCommand(
            command_id=command_id,
            node_id=node_id,
            kind=kind,
            lane=int(known.lane),
            seq=seq,
            body=stored,
            signature=None if signer is None else signer.sign_command(stored),
            signed_under=None if signer is None else signer.root_sha256,
            created_by="operator",
            not_before_ms=not_before_ms,
            asked_not_before_ms=not_before_ms,
            not_after_ms=not_after_ms,
            timeout_ms=known.timeout_ms,
        )
        await commands.enqueue(transaction, [new])


async def _cancel_later(stage: Stage, command_id: str) -> None:
    await asyncio.sleep(stage.rng.uniform(0, 30))
    try:
        await cancel(stage, command_id)
    except BetterComputeError as error:
        stage.tell(f"{command_id} was not cancelled: {error.message}")


async def cancel(stage: Stage, command_id: str) -> None:
    """Cancel a command as the API does."""
    async with stage.operator.transaction() as transaction:
        await commands.request_cancel(
            transaction,
            command_ids=[command_id],
            requested_by="operator",
            draw_id=stage.world.ids.uuid7,
            event_type=telemetry.EVENT_COMMAND_FINISHED,
        )


async def abandon_for_ever(stage: Stage) -> None:
    """Let an administrator give up on commands that are in flight, now and then."""
    every_s = stage.scenario.work.abandon_every_s
    while every_s:
        await asyncio.sleep(stage.rng.expovariate(1 / every_s))
        flying = [key for key, row in sorted(stage.ledger.rows["commands"].items()) if row["state"] in IN_FLIGHT]
        if not flying:
            continue
        [command_id] = stage.rng.choice(flying)
        try:
            async with stage.operator.transaction() as transaction:
                await waiting.abandon(
                    transaction,
                    command_id=command_id,
                    abandoned_by="operator",
                    why="a simulation",
                    outbox_id=stage.world.ids.uuid7(),
                    event_type=telemetry.EVENT_COMMAND_FINISHED,
                )
        except BetterComputeError as error:
            stage.tell(f"{command_id} was not abandoned: {error.message}")


async def attend_for_ever(stage: Stage) -> None:
    """Let an operator look after nodes whose certificate has expired, from time to time."""
    while True:
        await asyncio.sleep(ATTEND_EVERY_S)
        for node in stage.nodes:
            await stage.mend(node, why="has expired")


async def specs_for_ever(stage: Stage) -> None:
    """Desire something else of a node, again and again: one section, several, or nothing any more."""
    every_s = stage.scenario.work.spec_every_s
    while every_s:
        await asyncio.sleep(stage.rng.expovariate(1 / every_s))
        node_id = stage.rng.choice(stage.nodes).node_id
        try:
            await desire(stage, node_id=node_id)
        except BetterComputeError as error:
            stage.tell(f"nothing new is desired of {node_id}: {error.message}")


async def desire(stage: Stage, *, node_id: str) -> None:
    """Desire something else of a node."""
    async with stage.operator.transaction() as transaction:
        await _desire(stage, transaction, node_id=node_id)


async def _desire(stage: Stage, transaction: Transaction, *, node_id: str) -> None:
    locked = await specs.lock(transaction, node_id=node_id)
    if locked is None:
        return  # it was forgotten
    spec = messages.NodeSpec()
    if locked.body is not None and stage.rng.random() < PATCH_SHARE:
        spec.CopyFrom(locked.body.full)
    if stage.rng.random() < PATCH_SHARE:
        spec.daemon.status_interval_ms = stage.rng.randrange(60_000, 600_000)
    else:
        spec.access.tunnels_max = stage.rng.randrange(1, TUNNELS_MAX)
    new = compose(
        spec,
        before=locked.body,
        of=Circumstances(
            node_id=node_id,
            trust_domain=DEFAULT_TRUST_DOMAIN,
            generation=next_generation(locked.generations),
            issued_at_ms=locked.now_ms,
        ),
        signer=await signer_of(stage.signing, transaction),
    )
    await specs.publish(
        transaction, new, node_id=node_id, issued_at_ms=locked.now_ms, issued_by="operator", why="a simulation"
    )


async def events_for_ever(stage: Stage) -> None:
    """Let something happen at nodes."""
    every_s = stage.scenario.work.event_every_s
    number = 0
    while every_s:
        await asyncio.sleep(stage.rng.expovariate(1 / every_s))
        for _ in range(stage.rng.choice([1, 1, 1, 30])):
            number += 1
            stage.rng.choice(stage.nodes).record_event(json.dumps({"number": number}))
