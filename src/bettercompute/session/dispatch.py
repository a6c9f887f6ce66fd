"""What dispatch may take from a session and how marked commands go out.

Dispatch marks first and sends after the commit. It asks each session what it can take: commands held back in this
epoch first, then pending ones, both in seq order within a lane. A mark that commits after credits shrank is kept as
held back, never sent past a credit and never lost. See docs/delivery.md, "Dispatch"; decisions 0053.
"""

from __future__ import annotations

from collections.abc import Iterable

from bettercompute.delivery import lanes
from bettercompute.delivery.commands import OutgoingCommand
from bettercompute.protocol.kinds import KINDS
from bettercompute.protocol.versions import UPGRADE_KIND
from bettercompute.session.changes import changed
from bettercompute.session.effects import GatewayEffect, PokeDispatch, SendFrame
from bettercompute.session.gateway_state import DispatchDemand, GatewaySession, LaneDemand
from bettercompute.session.hello_plan import HeldCommand
from bettercompute.session.inputs import CommandsMarked
from bettercompute.session.welcome import command_frame


def wants(state: GatewaySession) -> DispatchDemand | None:
    """Return what dispatch may mark for this session now; None when it can take nothing."""
    if state.closed or state.awaits_new_journal or state.drain_at_ms is not None:
        return None
    kinds = kinds_allowed(state)
    demands = []
    for key, lane in sorted(state.lanes.items()):
        if lane.available == 0:
            continue
        sendable = [held.command_id for held in state.held if held.lane == key and _may_go(state, held, kinds)]
        held = tuple(sendable[: lane.available])
        demands.append(LaneDemand(lane=key, free=lane.available, held=held, pending=lane.available - len(held)))
    if not demands:
        return None
    return DispatchDemand(
        node_id=state.node_id,
        session_id=state.session_id,
        epoch=state.epoch,
        boot_id=state.boot_id,
        lanes=tuple(demands),
        kinds=kinds,
        signed_only=state.signed_only,
    )


def kinds_allowed(state: GatewaySession) -> frozenset[str] | None:
    """Return the kinds this session may be sent; None: all.

    The certificate's, without those that need a capability which the daemon lacks; in an upgrade-only session only the
    upgrade.
    """
    allowed = state.allowed_kinds
    if state.upgrade_only:
        upgrade = frozenset({UPGRADE_KIND})
        return upgrade if allowed is None else upgrade & allowed
    if not state.lacking:
        return allowed
    return (frozenset(KINDS) if allowed is None else allowed) - state.lacking


def kinds_lacking(capabilities: Iterable[str]) -> frozenset[str]:
    """Return the kinds that need a capability which is not among these."""
    held = frozenset(capabilities)
    return frozenset(
        kind.name for kind in KINDS.values() if kind.capability is not None and kind.capability not in held
    )


def answered(demand: DispatchDemand, marked: Iterable[OutgoingCommand]) -> CommandsMarked:
    """Return what a session is given once the transaction that asked for `demand` has committed these marks."""
    commands = tuple(marked)
    names = {command.command_id for command in commands}
    return CommandsMarked(commands, tuple(held for lane in demand.lanes for held in lane.held if held not in names))


def commands_marked(
    state: GatewaySession, commands: Iterable[OutgoingCommand], settled: Iterable[str] = ()
) -> tuple[GatewaySession, tuple[GatewayEffect, ...]]:
    """Send what was marked, in seq order, as far as credits go; hold the rest, and forget what is settled.

    A held command may have ended without this session's noticing: its mark was read before its end was committed, and
    came after. Eight of them, asked for again and again, once took every place of a lane.
    """
    marked = sorted(commands, key=lambda command: command.seq)
    names = {command.command_id for command in marked}.union(settled)
    effects: list[GatewayEffect] = [PokeDispatch()] if settled else []
    held = [command for command in state.held if command.command_id not in names]
    room = {key: lane.available for key, lane in state.lanes.items()}
    going: dict[int, list[str]] = {key: [] for key in room}
    sent = dict(state.sent)
    for command in marked:
        if not room.get(command.lane):
            held.append(
                HeldCommand(
                    command_id=command.command_id,
                    kind=command.kind,
                    lane=command.lane,
                    seq=command.seq,
                    signed=bool(command.signature),
                )
            )
            continue
        room[command.lane] -= 1
        going[command.lane].append(command.command_id)
        sent[command.command_id] = command.lane
        effects.append(SendFrame(command_frame(command)))
    held.sort(key=lambda command: command.seq)
    counted = {key: lanes.sent(lane, *going[key]) for key, lane in state.lanes.items()}
    return changed(state, lanes=counted, sent=sent, held=tuple(held)), tuple(effects)


def marks_found(
    state: GatewaySession, commands: Iterable[HeldCommand]
) -> tuple[GatewaySession, tuple[GatewayEffect, ...]]:
    """Hold what is marked for this session and was never sent: it is marked and sent again, with its next attempt.

    One whose end waits for the database was sent, although its row does not say so yet.
    """
    known = {*state.sent, *state.ending, *(held.command_id for held in state.held)}
    missed = [command for command in commands if command.command_id not in known]
    if not missed:
        return state, ()
    held = sorted((*state.held, *missed), key=lambda command: command.seq)
    return changed(state, held=tuple(held)), (PokeDispatch(),)


def back_off_over(state: GatewaySession, command: HeldCommand) -> tuple[GatewaySession, tuple[GatewayEffect, ...]]:
    """Hold a command that was refused BUSY after it had been accepted once; nothing when it was settled meanwhile."""
    return marks_found(state, (command,)) if command.command_id in state.busy else (state, ())


def _may_go(state: GatewaySession, held: HeldCommand, kinds: frozenset[str] | None) -> bool:
    return (kinds is None or held.kind in kinds) and (held.signed or not state.signed_only)
