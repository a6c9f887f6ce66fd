"""What people, controllers and time do, and what the story wants to see."""

from __future__ import annotations

from dataclasses import replace

from bettercompute.delivery.desired_state import StoredSpec
from bettercompute.protocol import messages
from bettercompute.session import inputs
from tests.stories.directives.registry import directive, duration_ms, machine_of
from tests.stories.script import Directive, StoryError
from tests.stories.stage import Stage


@directive
def run(stage: Stage, given: Directive) -> None:
    """run DURATION: let time pass."""
    [duration] = given.arguments
    stage.run(duration_ms(duration))


@directive
def dice(stage: Stage, given: Directive) -> None:
    """dice daemon|gateway NUMBER ...: what daemons draw next from [0, 1) for waits, or gateways for refusals."""
    whose, *numbers = given.arguments
    stage.dice[whose].extend(float(number) for number in numbers)


@directive
def show(stage: Stage, given: Directive) -> None:
    """show node|commands|events [NODE ...], command ID ..., disk|time MACHINE ...: what is in rows, disk and memory."""
    what, *names = given.arguments
    for name in names or sorted(stage.control.nodes):
        match what:
            case "node":
                stage.transcript.show(*stage.control.nodes[name].shown())
            case "events":
                stage.transcript.show(*stage.control.nodes[name].events_shown())
            case "time":
                stage.transcript.show(stage.machines[name].time_shown())
            case "disk":
                stage.transcript.show(*stage.machines[name].disk.shown())
            case "command":
                stage.transcript.show(stage.control.commands[name].shown())
            case "commands":
                rows = [row for row in stage.control.commands.values() if row.node_id == name]
                stage.transcript.show(*(row.shown() for row in rows))
            case _:
                raise StoryError(f"line {given.line}: there is no {what!r} to show")


@directive
def enqueue(stage: Stage, given: Directive) -> None:
    """enqueue NODE KIND [not_after=DURATION] [version=TARGET]: insert a pending command."""
    node_id, kind = given.arguments
    options = {}
    if "not_after" in given.options:
        options["not_after_ms"] = duration_ms(given.options["not_after"])
    version = given.options.get("version", "")
    command_id = stage.control.enqueue(node_id, kind, now_ms=stage.server_ms, version=version, **options)
    stage.tell(f"somebody enqueues {command_id} {kind} for {node_id}")


@directive
def cancel(stage: Stage, given: Directive) -> None:
    """cancel COMMAND: ask for its cancellation."""
    [command_id] = given.arguments
    row = stage.control.cancel(command_id)
    if row is None:
        return
    for gateway_ in stage.gateways.values():
        live = gateway_.sessions.get(row.node_id)
        if live is not None and gateway_.works:
            gateway_.give(live, inputs.CancelRequested(command_id))


@directive
def publish_spec(stage: Stage, given: Directive) -> None:
    """publish-spec NODE GENERATION [patch_over=BASE]: a new generation; with a base, also as a patch over it."""
    node_id, number = given.arguments
    generation, base = int(number), given.options.get("patch_over")
    body = messages.DesiredStateBody(
        node_id=node_id, generation=generation, spec_sha256=bytes([generation] * 32), full=messages.NodeSpec()
    )
    spec = StoredSpec(generation=generation, body=body.SerializeToString())
    if base is not None:
        body.patch.CopyFrom(messages.SectionPatch(base_generation=int(base), section="daemon", field_number=2))
        spec = replace(spec, patch_base_generation=int(base), patch_body=body.SerializeToString())
    stage.control.nodes[node_id].spec = spec
    stage.tell(f"the spec of {node_id} is at generation {generation}")
    for gateway_ in stage.gateways.values():
        live = gateway_.sessions.get(node_id)
        if live is not None:
            gateway_.give(live, inputs.SpecPublished(spec))


@directive
def rejoin(stage: Stage, given: Directive) -> None:
    """rejoin MACHINE: a person joins it again with a new token: a new serial of a new identity generation."""
    rejoined = machine_of(stage, given)
    rejoined.serial = stage.control.join(rejoined.node_id).serial
    stage.tell(f"a person joins {rejoined.name} again with a new token: serial {rejoined.serial}")


@directive
def controller(stage: Stage, given: Directive) -> None:
    """controller starts|stops: the Liveness controller."""
    [how] = given.arguments
    if how == "starts":
        stage.watch = stage.last_watch
    else:
        assert stage.watch is not None, "it does not run"
        stage.last_watch, stage.watch = replace(stage.watch, monotonic_ms=None), None
    stage.tell(f"the Liveness controller {how}")


@directive
def back_up_database(stage: Stage, _: Directive) -> None:
    """back-up-database: keep a copy of all tables."""
    stage.control.back_up()
    stage.tell("somebody backs the database up")


@directive
def restore_database(stage: Stage, _: Directive) -> None:
    """restore-database: the tables are as they were at the last backup."""
    stage.control.restore()
    stage.ended.clear()
    stage.tell("the database is restored from its backup")
