"""The replay set: which commands in flight move to the new epoch, and which are sent again now.

First the resume rules, one command at a time; then what the session lets through, in seq order: what credits, a
missing signature (WebSocket) or upgrade-only hold back stays in flight, unsent and without a credit, ahead of what is
pending. See docs/sessions.md, "Resume rules"; decisions 0104.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from bettercompute.delivery.commands import CommandState, OutgoingCommand
from bettercompute.protocol.versions import UPGRADE_KIND
from bettercompute.session import resume
from bettercompute.session.hello_plan import CommandEnd, CommandInFlight, HeldCommand, HelloFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What the session does with every command in flight; seq order throughout."""

    ends: tuple[CommandEnd, ...]
    in_flight: tuple[str, ...]
    resent: tuple[OutgoingCommand, ...]
    held: tuple[HeldCommand, ...]
    running: Mapping[str, int]
    cancels: tuple[str, ...]
    wake: tuple[str, ...]


def replay(
    facts: HelloFacts, reconnect: resume.Reconnect, *, stored: frozenset[str], upgrade_only: bool, withheld: bool
) -> Replay:
    """Return the replay set of a Hello.

    `stored` are the commands that its results end; `withheld`: send nothing at all.
    """
    settled = [
        (command, resume.settle(command, reconnect)) for command in sorted(facts.commands, key=lambda one: one.seq)
    ]
    running = {command.command_id: command.lane for command, outcome in settled if outcome.keeps_credit}
    resent, held = _within_credits(
        [command for command, outcome in settled if outcome.resend],
        facts,
        running,
        upgrade_only=upgrade_only,
        withheld=withheld,
    )
    return Replay(
        ends=tuple(outcome.end for _, outcome in settled if outcome.end is not None),
        in_flight=tuple(
            command.command_id
            for command, outcome in settled
            if outcome.end is None and command.command_id not in stored
        ),
        resent=resent,
        held=held,
        running=running,
        cancels=tuple(command.command_id for command, outcome in settled if outcome.cancel_frame and not withheld),
        wake=tuple(command.command_id for command, outcome in settled if outcome.wakes_owner),
    )


def _within_credits(
    commands: list[CommandInFlight],
    facts: HelloFacts,
    running: Mapping[str, int],
    *,
    upgrade_only: bool,
    withheld: bool,
) -> tuple[tuple[OutgoingCommand, ...], tuple[HeldCommand, ...]]:
    """Split what is to be re-sent, in seq order, into what goes now and what is held back without a credit."""
    taken = Counter(running.values())
    free = {lane: granted - taken[lane] for lane, granted in facts.gateway.lane_credits.items()}
    resent: list[OutgoingCommand] = []
    held: list[HeldCommand] = []
    for command in commands:
        restricted = (upgrade_only and command.kind != UPGRADE_KIND) or (
            facts.gateway.signed_only and not command.signature
        )
        if withheld or restricted or free.get(command.lane, 0) <= 0:
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
        free[command.lane] -= 1
        resent.append(
            OutgoingCommand(
                command_id=command.command_id,
                kind=command.kind,
                lane=command.lane,
                seq=command.seq,
                attempt=command.attempt + 1,
                seen=None if command.state is CommandState.DISPATCHED else command.state,
                body=command.body,
                signature=command.signature,
                batch_approval=command.batch_approval,
                batch_proof=command.batch_proof,
            )
        )
    return tuple(resent), tuple(held)
