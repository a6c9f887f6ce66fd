"""What happens to machines, their disks and their daemons."""

from __future__ import annotations

from bettercompute.delivery.commands import CommandState
from bettercompute.protocol import messages
from bettercompute.session import inputs
from tests.stories import wording
from tests.stories.directives.registry import directive, duration_ms, machine_of, names, protocol, stream_of
from tests.stories.disk import Disk
from tests.stories.machine import Machine
from tests.stories.script import Directive
from tests.stories.stage import Stage


@directive
def machine(stage: Stage, given: Directive) -> None:
    """machine NAME ... [sections=A,B] [capabilities=A,B] [version=V] [protocol=MIN-MAX]: hosts that have joined.

    They are switched off.
    """
    for name in given.arguments:
        node = stage.control.join(name)
        journal_id = stage.next_name("j")
        disk = Disk(journal_id, mark_ms=stage.server_ms, confirmed_ms=stage.server_ms)
        made = stage.machines[name] = Machine(name, name, stage, serial=node.serial, disk=disk)
        made.sections = names(given.options.get("sections"))
        made.capabilities = names(given.options.get("capabilities"))
        made.version = given.options.get("version", made.version)
        if "protocol" in given.options:
            made.protocol = protocol(given.options["protocol"])
        stage.tell(f"{name} has joined: serial {node.serial}, journal {journal_id}")


@directive
def boot(stage: Stage, given: Directive) -> None:
    """boot MACHINE ...: power on under a new boot id, and start the daemon."""
    for name in given.arguments:
        stage.machines[name].boot_id = stage.next_name("b")
        stage.machines[name].start()
    stage.run(0)


@directive
def start(stage: Stage, given: Directive) -> None:
    """start MACHINE [version=V] [protocol=MIN-MAX]: start the daemon again under the same boot."""
    started = machine_of(stage, given)
    started.version = given.options.get("version", started.version)
    if "protocol" in given.options:
        started.protocol = protocol(given.options["protocol"])
    started.start()
    stage.run(0)


@directive
def power_off(stage: Stage, given: Directive) -> None:
    """power-off MACHINE: the machine is gone at once, and nobody is told."""
    stage.tell(f"{given.arguments[0]} loses power")
    machine_of(stage, given).stop(silently=True)


@directive
def reboot(stage: Stage, given: Directive) -> None:
    """reboot MACHINE: the system ends the daemon, and comes back under a new boot id."""
    rebooted = machine_of(stage, given)
    stage.tell(f"{rebooted.name} reboots")
    rebooted.stop(silently=False)
    stage.settle()
    rebooted.boot_id = stage.next_name("b")
    rebooted.start()
    stage.run(0)


@directive
def lose_disk(stage: Stage, given: Directive) -> None:
    """lose-disk MACHINE: the journal is gone, the next process begins another. Identity and time mark are elsewhere."""
    lost = machine_of(stage, given)
    assert lost.daemon is None, "end the daemon first"
    lost.disk = Disk(stage.next_name("j"), mark_ms=lost.disk.mark_ms, confirmed_ms=lost.disk.confirmed_ms)
    stage.tell(f"{lost.name} has lost its journal; the new one is {lost.disk.journal_id}")


@directive
def snapshot(stage: Stage, given: Directive) -> None:
    """snapshot MACHINE NAME: keep a copy of the disk."""
    kept = machine_of(stage, given)
    kept.snapshots[given.arguments[1]] = kept.disk.copied()
    stage.tell(f"somebody keeps a snapshot {given.arguments[1]} of the disk of {kept.name}")


@directive
def restore(stage: Stage, given: Directive) -> None:
    """restore MACHINE NAME: put a snapshot's disk in place; the machine must be off."""
    restored = machine_of(stage, given)
    assert restored.daemon is None, "end the daemon first"
    restored.disk = restored.snapshots[given.arguments[1]].copied()
    stage.tell(f"somebody restores the snapshot {given.arguments[1]} on {restored.name}")


@directive
def clone(stage: Stage, given: Directive) -> None:
    """clone MACHINE COPY [live=yes]: a second machine with the same disk; live: the same memory and boot id too."""
    original = machine_of(stage, given)
    name = given.arguments[1]
    live = given.options.get("live") == "yes"
    copy = stage.machines[name] = original.copied(name, live=live)
    what = "the running" if live else "the disk of"
    stage.tell(f"{name} is a copy of {what} {original.name}, at {copy.address}")
    if live:
        copy.lose_connection()


@directive
def event(stage: Stage, given: Directive) -> None:
    """event MACHINE [COUNT]: the daemon journals events."""
    for _ in range(int(given.arguments[1]) if len(given.arguments) > 1 else 1):
        machine_of(stage, given).add_event()


@directive
def drop_events(stage: Stage, given: Directive) -> None:
    """drop-events MACHINE SEQ: the journal loses its events up to this one; the machine must be off."""
    dropping = machine_of(stage, given)
    assert dropping.daemon is None, "end the daemon first"
    dropping.disk.drop_events(int(given.arguments[1]))
    stage.tell(f"{dropping.name} has lost its events up to {given.arguments[1]}")


@directive
def disk(stage: Stage, given: Directive) -> None:
    """disk MACHINE full|free|fills: no room for another command, room again; fills: nobody has noticed yet."""
    name, how = given.arguments
    stage.machines[name].disk.full = how != "free"
    stage.tell(f"the disk of {name} {'fills' if how == 'fills' else f'is {how}'}")
    if how != "fills":
        stage.machines[name].give(inputs.JournalRoom(how == "full"))


@directive
def finish(stage: Stage, given: Directive) -> None:
    """finish MACHINE COMMAND [state=failed] [reason=CODE]: a handler ends."""
    state = CommandState[given.options.get("state", "succeeded").upper()]
    machine_of(stage, given).finish(given.arguments[1], state, reason=given.options.get("reason", ""))


@directive
def spec_fails(stage: Stage, given: Directive) -> None:
    """spec-fails MACHINE yes|no: whether a section of every spec that comes from now on fails there."""
    _, fails = given.arguments
    machine_of(stage, given).parks = fails == "yes"


@directive
def wall_clock(stage: Stage, given: Directive) -> None:
    """wall-clock MACHINE OFFSET: set the host's own clock wrong."""
    name, offset = given.arguments
    stage.machines[name].wall_offset_ms = duration_ms(offset)
    stage.tell(f"the host's own clock of {name} shows {wording.clock(stage.machines[name].wall_ms)}")


@directive
def say_events(stage: Stage, given: Directive) -> None:
    """say-events MACHINE FIRST LAST: a broken daemon sends events past those that it owes."""
    broken = machine_of(stage, given)
    stream = stream_of(broken)
    seqs = range(int(given.arguments[1]), int(given.arguments[2]) + 1)
    batch = messages.EventBatch(
        journal_id=broken.disk.journal_id,
        events=[messages.Event(seq=seq, event_id=wording.event_id(900 + seq), type="story.event") for seq in seqs],
    )
    frame = messages.AgentFrame(events=batch)
    stage.tell(f"{broken.name} -> {stream.gateway.name}  {wording.agent_frame(frame)}")
    stream.send_up(frame)


@directive
def say_command(stage: Stage, given: Directive) -> None:
    """say-command MACHINE [COMMAND] [not_after=DURATION]: a command arrives that the control plane did not send now."""
    told = machine_of(stage, given)
    stream = stream_of(told)
    if "not_after" in given.options:
        name = stage.control.enqueue(
            told.node_id,
            "inventory.refresh",
            now_ms=stage.server_ms,
            not_after_ms=duration_ms(given.options["not_after"]),
        )
        row = stage.control.commands.pop(name)
        stage.tell(f"{name} may begin until {wording.clock(row.not_after_ms)}")
    else:
        row = stage.control.commands[given.arguments[1]]
    frame = messages.ServerFrame(command=messages.Command(body=row.body, attempt=max(1, row.attempt)))
    stage.tell(f"{stream.gateway.name} -> {told.name}  {wording.server_frame(frame)}")
    stream.send_down(frame)
