"""What happens to gateways, and to the network between them and the machines."""

from __future__ import annotations

from dataclasses import replace

from bettercompute.delivery.lanes import Lane
from bettercompute.session import inputs
from tests.stories import wording
from tests.stories.directives.registry import directive, duration_ms, gateway_of, machine_of, protocol, stream_of
from tests.stories.gateway import Gateway
from tests.stories.script import Directive
from tests.stories.stage import Stage


@directive
def gateway(stage: Stage, given: Directive) -> None:
    """gateway NAME [rate=PER_SECOND] [streams=MAX] [credits=CONTROL,BULK] [protocol=MIN-MAX]: a new process."""
    [name] = given.arguments
    options = given.options
    opened = Gateway(name, stage)
    if "rate" in options:
        opened.admission = replace(opened.admission, rate_per_s=float(options["rate"]), tokens=float(options["rate"]))
    if "streams" in options:
        opened.streams_max = int(options["streams"])
    if "credits" in options:
        opened.credits_by_lane = dict(
            zip((int(lane) for lane in Lane), map(int, options["credits"].split(",")), strict=True)
        )
    if "protocol" in options:
        opened.protocol = protocol(options["protocol"])
    stage.gateways[name] = opened
    stage.tell(f"{name} serves" + "".join(f", {key} {value}" for key, value in options.items()))


@directive
def kill(stage: Stage, given: Directive) -> None:
    """kill MACHINE|GATEWAY: end the process by force; the kernel tells the other end."""
    [name] = given.arguments
    if name in stage.machines:
        stage.tell(f"{name}: the daemon is killed")
        stage.machines[name].stop(silently=False)
        return
    killed = stage.gateways[name]
    killed.alive = False
    stage.tell(f"{name} is killed")
    for stream in [one.stream for one in stage.machines.values()]:
        if stream is not None and stream.gateway is killed and not stream.silent:
            stream.machine.lose_connection()


@directive
def hang(stage: Stage, given: Directive) -> None:
    """hang GATEWAY: the process stands still (SIGSTOP); its kernel still answers for it."""
    gateway_of(stage, given).hung = True
    stage.tell(f"{given.arguments[0]} stands still")


@directive
def go_on(stage: Stage, given: Directive) -> None:
    """go-on GATEWAY: the process continues (SIGCONT)."""
    gateway_of(stage, given).hung = False
    stage.tell(f"{given.arguments[0]} goes on")
    gateway_of(stage, given).watch_lease()


@directive
def drain(stage: Stage, given: Directive) -> None:
    """drain GATEWAY OVER: ask every session to reconnect elsewhere, spread evenly over this time."""
    name, over = given.arguments
    drained = stage.gateways[name]
    drained.draining = True
    stage.tell(f"somebody drains {name} over {over}")
    live = list(drained.sessions.values())
    for place, session in enumerate(live, 1):
        drained.give(session, inputs.DrainRequested(duration_ms(over) * place // len(live)))


@directive
def database(stage: Stage, given: Directive) -> None:
    """database GATEWAY away|back: the gateway cannot reach its database, or can again."""
    name, how = given.arguments
    stage.gateways[name].database = how == "back"
    stage.tell(f"the database is {how} for {name}")


@directive
def flush(stage: Stage, given: Directive) -> None:
    """flush GATEWAY off|on: a fault of ours: last-seen times are not written."""
    name, how = given.arguments
    stage.gateways[name].flushes = how == "on"
    stage.tell(f"{name} {'writes' if how == 'on' else 'does not write'} last-seen times")


@directive
def server_time(stage: Stage, given: Directive) -> None:
    """server-time GATEWAY OFFSET: its Welcomes tell another time than the control plane's."""
    name, offset = given.arguments
    stage.gateways[name].clock_offset_ms = duration_ms(offset)
    told = wording.clock(stage.server_ms + stage.gateways[name].clock_offset_ms)
    stage.tell(f"{name} believes that it is {told}, the control plane's time is {wording.clock(stage.server_ms)}")


@directive
def cut(stage: Stage, given: Directive) -> None:
    """cut MACHINE: the connection is lost, both ends see it; what was on its way is gone."""
    stage.tell(f"the connection of {given.arguments[0]} is lost")
    machine_of(stage, given).lose_connection()


@directive
def hold(stage: Stage, given: Directive) -> None:
    """hold MACHINE up|down [hellos=N]: the network keeps what it or its gateway sends; also after its next N Hellos."""
    name, way = given.arguments
    stream = stream_of(stage.machines[name])
    stage.machines[name].held_hellos = int(given.options.get("hellos", "0"))
    stream.up_held, stream.down_held = stream.up_held or way == "up", stream.down_held or way == "down"
    stage.tell(f"the network keeps what is sent {'by' if way == 'up' else 'to'} {name}")


@directive
def release(stage: Stage, given: Directive) -> None:
    """release MACHINE [up|down]: what was kept arrives."""
    stream = stream_of(machine_of(stage, given))
    [way] = given.arguments[1:] or ["both"]
    stream.up_held, stream.down_held = stream.up_held and way == "down", stream.down_held and way == "up"
    what = {"up": "sent by", "down": "sent to", "both": "kept of"}[way]
    stage.tell(f"the network lets through what was {what} {given.arguments[0]}")


@directive
def silence(stage: Stage, given: Directive) -> None:
    """silence MACHINE: nothing passes on its stream any more, and nobody is told."""
    stream = stream_of(machine_of(stage, given))
    stream.lose()
    stream.silent = True
    stage.tell(f"the network loses all that {given.arguments[0]} and {stream.gateway.name} say")


@directive
def route(stage: Stage, given: Directive) -> None:
    """route MACHINE GATEWAY: its next dial goes there."""
    name, to = given.arguments
    stage.machines[name].next_gateway = stage.gateways[to]
    stage.tell(f"{name} will dial {to} next")
