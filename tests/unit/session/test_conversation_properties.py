"""Random histories of one node: whatever is cut, lost or restarted, credits are exact and every command ends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bettercompute.delivery.commands import TERMINAL, CommandState
from bettercompute.protocol.kinds import KINDS
from bettercompute.session import inputs
from bettercompute.session.daemon_side import Phase
from tests.unit.session.world_in_memory import World

KINDS_TRIED = ("inventory.refresh", "gpu.reset", "node.reboot", "logs.collect", "diag.nvml")

STEPS = st.one_of(
    st.tuples(st.just("enqueue"), st.sampled_from(KINDS_TRIED)),
    st.tuples(st.just("enqueue"), st.just("inventory.refresh")),
    st.tuples(
        st.sampled_from(
            [
                *("up", "up", "up", "down", "down", "down", "commit", "put_back", "dispatch", "dispatch"),
                *("cut", "dial", "connect", "settle", "restart", "reboot", "lose_journal", "tick", "event"),
            ]
        ),
        st.none(),
    ),
    st.tuples(st.sampled_from(["finish", "cancel"]), st.integers(0, 30)),
)


def act(world: World, name: str, value: object) -> None:
    """Do one thing, when it can be done."""
    offline = world.daemon.phase is Phase.OFFLINE and not world.stream_open
    if name == "enqueue":
        world.enqueue(str(value))
    elif name == "up" and world.up:
        world.move_up()
    elif name == "down" and world.down:
        world.move_down()
    elif name == "commit" and world.uncommitted:
        world.commit()
    elif name == "put_back" and world.put_backs:
        world.put_back()
    elif name == "dispatch":
        world.dispatch()
    elif name == "cut":
        world.cut()
    elif name == "dial" and offline:
        world.dial()
    elif name == "connect" and offline:
        world.connect()
    elif name == "settle":
        world.settle()
    elif name == "restart":
        world.restart_daemon()
    elif name == "reboot":
        world.restart_daemon(reboot=True)
    elif name == "lose_journal":
        world.restart_daemon(lose_journal=True)
    elif name == "tick":
        world.tick(passed_ms=10_000)
    elif name == "event":
        world.add_event()
    elif name == "finish" and world.handlers and isinstance(value, int):
        world.finish(sorted(world.handlers)[value % len(world.handlers)])
    elif name == "cancel" and world.rows and isinstance(value, int):
        world.cancel(sorted(world.rows)[value % len(world.rows)])


def check(world: World, *, exact: bool, most_by_lane: dict[int, int] | None = None) -> None:
    """What holds after every step."""
    for command_id, runs in world.runs.items():
        row = world.rows[command_id]
        assert runs == 1 or KINDS[row.kind].retry_safe, f"{row.kind} ran {runs} times"
    if not exact:
        return
    for lane, most in (most_by_lane or world.credits_by_lane).items():
        running = [one for one in world.handlers if world.rows[one].lane == lane]
        assert len(running) <= most, "credits are never exceeded"
    assert not world.put_backs, "exact credits never meet BUSY"
    gateway = world.gateway
    if gateway is not None and world.daemon.phase is Phase.LIVE and not world.up and not world.down:
        for lane, counted in gateway.lanes.items():
            assert counted.available == world.daemon.lanes[lane].free, "both ends count the same"


def bring_to_an_end(world: World) -> None:
    """After the faults: connect, let everything end, and look at what is left."""
    world.journal.full = False
    for _ in range(40):
        if world.daemon.phase is not Phase.LIVE or world.gateway is None:
            world.cut()
            world.connect()
        world.settle()
        for command_id in sorted(world.handlers):
            if world.rows[command_id].kind == "node.reboot":
                world.restart_daemon(reboot=True)
                break
            world.finish(command_id)
        for _ in range(6):
            world.tick(passed_ms=5_000)
            world.settle()
        if all(row.state in TERMINAL for row in world.rows.values()) and world.daemon.phase is Phase.LIVE:
            break
    stuck = {name: row for name, row in world.rows.items() if row.state not in TERMINAL}
    assert not stuck, f"every command ends: {stuck}"
    assert all(entry.acked for entry in world.journal.entries.values() if entry.done)
    assert world.journal.acked_event_seq == world.journal.last_event_seq


@given(st.lists(STEPS, min_size=15, max_size=80))
@settings(max_examples=120)
def test_credits_are_exact_and_every_command_ends(steps: list[tuple[str, object]]) -> None:
    world = World(credits_by_lane={1: 2, 2: 1})
    for name, value in steps:
        act(world, name, value)
        check(world, exact=True)
    bring_to_an_end(world)
    check(world, exact=True)


@given(st.lists(st.one_of(STEPS, st.just(("full", None)), st.just(("room", None))), min_size=10, max_size=60))
@settings(max_examples=120)
def test_a_journal_that_fills_up_loses_nothing(steps: list[tuple[str, object]]) -> None:
    world = World()
    for name, value in steps:
        if name in ("full", "room"):
            fill(world, full=name == "full")
        else:
            act(world, name, value)
        check(world, exact=False)
    fill(world, full=False)
    bring_to_an_end(world)


@given(
    st.lists(STEPS, min_size=8, max_size=40),
    st.integers(1, 8),
    st.integers(1, 8),
    st.lists(STEPS, min_size=8, max_size=40),
)
@settings(max_examples=120)
def test_credits_may_shrink_and_grow_at_a_welcome(
    before: list[tuple[str, object]], first: int, then: int, after: list[tuple[str, object]]
) -> None:
    world = World(credits_by_lane={1: first, 2: first})
    for name, value in before:
        act(world, name, value)
    world.cut()
    world.credits_by_lane = {1: then, 2: then}
    for name, value in after:
        act(world, name, value)
        check(world, exact=True, most_by_lane={1: max(first, then), 2: max(first, then)})
    bring_to_an_end(world)


def fill(world: World, *, full: bool) -> None:
    """The journal is full, or has room again, and its shell says so."""
    world.journal.full = full
    world.tell_daemon(inputs.JournalRoom(full))


@pytest.mark.long
@given(st.lists(STEPS, min_size=50, max_size=200))
@settings(max_examples=3_000)
def test_long_histories(steps: list[tuple[str, object]]) -> None:
    world = World(credits_by_lane={1: 2, 2: 1})
    for name, value in steps:
        act(world, name, value)
        check(world, exact=True)
    bring_to_an_end(world)


def test_the_end_of_the_histories_is_not_vacuous() -> None:
    world = World()
    for kind in KINDS_TRIED:
        world.enqueue(kind)
    bring_to_an_end(world)
    assert {row.state for row in world.rows.values()} == {CommandState.SUCCEEDED}
