"""Both ends of a session against each other, in memory."""

from __future__ import annotations

from copy import deepcopy

import pytest

from bettercompute.delivery.commands import CommandState
from bettercompute.protocol import messages
from bettercompute.session import inputs
from tests.unit.session.world_in_memory import World


def states(world: World) -> dict[str, str]:
    return {command_id: row.state.name for command_id, row in world.rows.items()}


def test_a_command_runs_and_its_result_is_acked() -> None:
    world = World()
    command_id = world.enqueue()
    world.connect()
    assert states(world) == {command_id: "RUNNING"}
    world.finish(command_id)
    world.settle()
    assert states(world) == {command_id: "SUCCEEDED"}
    assert world.journal.entries[command_id].acked
    assert world.runs == {command_id: 1}


def test_credits_bound_what_is_in_flight_and_order_is_kept() -> None:
    world = World()
    ids = [world.enqueue() for _ in range(12)]
    world.connect()
    assert sorted(world.handlers) == sorted(ids[:8])
    world.finish(ids[0])
    world.settle()
    assert ids[8] in world.handlers
    assert world.rows[ids[9]].state is CommandState.PENDING


def test_a_result_made_while_disconnected_rides_in_the_next_hello_and_is_acked() -> None:
    world = World()
    command_id = world.enqueue()
    world.connect()
    world.cut()
    world.finish(command_id)
    world.connect()
    assert states(world) == {command_id: "SUCCEEDED"}
    assert world.last_plan is not None
    assert [fact.command_id for fact in world.last_plan.results] == [command_id]
    assert world.journal.entries[command_id].acked


def test_a_result_made_between_hello_and_welcome_follows_welcome() -> None:
    world = World()
    command_id = world.enqueue()
    world.connect()
    world.cut()
    world.dial()
    world.finish(command_id)
    world.settle()
    assert states(world) == {command_id: "SUCCEEDED"}
    assert world.journal.entries[command_id].acked


def test_a_lost_command_frame_is_sent_again_once() -> None:
    world = World()
    world.connect()
    command_id = world.enqueue()
    assert world.dispatch()
    world.cut()
    world.connect()
    assert states(world) == {command_id: "RUNNING"}
    assert world.rows[command_id].attempt == 2
    assert world.runs == {command_id: 1}


def test_a_restarted_daemon_runs_retry_safe_work_again_and_fails_other_work() -> None:
    world = World()
    safe, unsafe = world.enqueue("inventory.refresh"), world.enqueue("gpu.reset")
    world.connect()
    world.restart_daemon()
    world.connect()
    assert states(world) == {safe: "RUNNING", unsafe: "FAILED"}
    assert world.rows[unsafe].reason == "interrupted"
    assert world.runs == {safe: 2, unsafe: 1}


def test_a_reboot_is_proven_by_the_next_boot() -> None:
    world = World()
    command_id = world.enqueue("node.reboot")
    world.connect()
    world.restart_daemon(reboot=True)
    world.connect()
    assert states(world) == {command_id: "SUCCEEDED"}
    assert world.runs == {command_id: 1}


def test_a_reboot_with_a_lost_journal_is_proven_by_the_gateway() -> None:
    world = World()
    command_id = world.enqueue("node.reboot")
    world.connect()
    world.restart_daemon(reboot=True, lose_journal=True)
    world.connect()
    assert states(world) == {command_id: "SUCCEEDED"}
    assert world.runs == {command_id: 1}


def test_a_lost_journal_fails_what_is_not_safe_to_run_twice() -> None:
    world = World()
    safe, unsafe = world.enqueue("inventory.refresh"), world.enqueue("gpu.reset")
    world.connect()
    world.restart_daemon(lose_journal=True)
    world.connect()
    assert states(world) == {safe: "RUNNING", unsafe: "FAILED"}
    assert world.rows[unsafe].reason == "journal-lost"
    assert world.runs[unsafe] == 1


def test_a_full_journal_answers_busy_and_the_command_is_pending_again() -> None:
    world = World()
    world.connect()
    world.journal.full = True
    command_id = world.enqueue()
    assert world.dispatch()
    while world.up or world.down:
        if world.down:
            world.move_down()
        else:
            world.move_up()
    assert len(world.put_backs) == 1
    assert world.put_backs[0].back_off_ms == 1_000
    world.put_back()
    assert states(world) == {command_id: "PENDING"}
    assert world.gateway is not None
    assert world.gateway.lanes[messages.LANE_CONTROL].available == 8
    world.settle()
    assert states(world) == {command_id: "PENDING"}
    world.journal.full = False
    world.tell_daemon(inputs.JournalRoom(full=False))
    world.tick(passed_ms=1_000)
    world.settle()
    assert states(world) == {command_id: "RUNNING"}


@pytest.mark.parametrize("when", ["running", "unsent", "before-delivery"])
def test_a_cancel_ends_a_command_wherever_it_is(when: str) -> None:
    world = World()
    world.connect()
    command_id = world.enqueue()
    if when == "running":
        world.settle()
    elif when == "before-delivery":
        world.dispatch()
    world.cancel(command_id)
    world.settle()
    assert states(world) == {command_id: "CANCELLED"}
    assert not world.handlers


def test_a_cancel_that_is_lost_is_told_at_the_next_hello() -> None:
    world = World()
    world.connect()
    command_id = world.enqueue()
    world.settle()
    world.cancel(command_id)
    world.cut()
    assert states(world) == {command_id: "RUNNING"}
    world.connect()
    assert states(world) == {command_id: "CANCELLED"}


def test_events_arrive_once_and_in_order_over_cuts() -> None:
    world = World()
    for _ in range(3):
        world.add_event()
    world.connect()
    world.add_event()
    world.move_up()
    world.cut()
    world.add_event()
    world.connect()
    assert sorted(event.seq for event in world.stored_events.values()) == [1, 2, 3, 4, 5]
    assert world.journal.acked_event_seq == 5
    assert not world.journal.events


def test_a_restored_disk_takes_a_new_journal_and_loses_no_event() -> None:
    world = World()
    world.connect()
    world.cut()
    world.connect()
    world.add_event()
    world.settle()
    backup = (world.journal.hello_nonce, world.journal.previous_hello_nonce)
    world.cut()
    world.connect()
    world.cut()
    world.connect()
    world.add_event()
    world.settle()
    world.cut()
    # The disk of three Hellos ago comes back, and something happens while it is offline.
    world.journal.hello_nonce, world.journal.previous_hello_nonce = backup
    world.journal.last_event_seq = world.journal.acked_event_seq = 1
    world.journal.events.clear()
    world.restart_daemon()
    world.add_event()
    world.connect()
    assert world.trace[-1] == "new-journal"
    assert world.journal.journal_id == "j-2"
    world.connect()
    assert world.gateway is not None
    assert len(world.stored_events) == 3
    assert world.daemon.phase == "live"


def test_a_restored_disk_shows_also_when_the_daemon_has_only_ever_restarted() -> None:
    world = World()
    world.connect()
    world.restart_daemon()
    world.connect()
    backup = deepcopy(world.journal)
    for _ in range(2):
        world.restart_daemon()
        world.connect()
    world.cut()
    world.journal = backup
    world.restart_daemon()
    world.connect()
    assert world.trace[-1] == "new-journal"


def test_a_restarted_daemon_continues_its_own_nonces() -> None:
    world = World()
    for _ in range(4):
        world.connect()
        world.restart_daemon()
        world.dial()
        world.move_up()
        world.restart_daemon()  # this Welcome was never applied
    world.connect()
    assert world.journal.journal_id == "j-1"
    assert world.last_plan is not None
    assert not world.last_plan.new_journal


def test_a_welcome_that_is_lost_after_a_rollback_leaves_no_old_journal_in_use() -> None:
    world = World()
    world.connect()
    world.cut()
    world.connect()
    world.cut()
    world.journal.hello_nonce, world.journal.previous_hello_nonce = b"x" * 16, b"y" * 16
    world.restart_daemon()
    world.dial()
    world.move_up()
    world.cut()
    world.connect()
    assert world.journal.journal_id == "j-2"


def test_silence_ends_the_session_at_both_ends() -> None:
    world = World()
    world.connect()
    world.up.clear()
    world.now_ms += 30_001
    gateway = world.gateway
    assert gateway is not None
    world.tell_gateway(inputs.Tick())
    assert world.closed[-1].reason == "heartbeat-timeout"
    assert world.waiting is not None
    world.connect()
    world.stream_open = True
    world.tick(passed_ms=60_000, heard=False)
    assert world.trace[-1] == "server-silent"


def test_an_expired_command_is_refused_and_fails() -> None:
    world = World()
    world.connect()
    command_id = world.enqueue(not_after_ms=5_000)
    world.dispatch()
    world.now_ms += 6_000
    world.settle()
    assert states(world) == {command_id: "FAILED"}
    assert world.rows[command_id].reason == "rejected-expired"
    assert not world.runs


def test_heartbeats_flow_and_keep_the_session_alive() -> None:
    world = World()
    world.connect()
    for _ in range(20):
        world.tick()
        world.settle()
    assert world.gateway is not None
    assert not world.closed
