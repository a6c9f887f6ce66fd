"""One certificate, several machines: what counts, what is proof, and who is left in peace."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from bettercompute.session.duplicate_identity import BOOTS_KEPT, Claim, Judgement, has_forked, judge, was_live
from bettercompute.session.hello_plan import BootSeen, GatewayFacts, SessionRow
from tests.unit.session.world_in_memory import START_MS, empty_row, gateway_facts

MINUTE_MS = 60_000
GATEWAY: GatewayFacts = gateway_facts()


def nonce(number: int) -> bytes:
    return bytes([number]) * 16 if number else b""


@dataclass
class Identity:
    """The row of one identity, and Hellos one after another."""

    row: SessionRow = field(default_factory=empty_row)
    now_ms: int = START_MS

    def hello(
        self, boot: str, *, nonces: tuple[int, int] = (0, 0), after_ms: int = 5_000, quiet: bool = False
    ) -> Judgement:
        self.now_ms += after_ms
        if quiet:
            self.row = replace(self.row, gateway_id="", disconnected_at_ms=self.now_ms - 1)
        claim = Claim(boot_id=boot, hello_nonce=nonce(nonces[0]), previous_hello_nonce=nonce(nonces[1]))
        judged = judge(self.row, claim, GATEWAY, now_ms=self.now_ms)
        if judged.quarantine:
            self.row = replace(self.row, duplicate_hellos=0, duplicate_since_ms=None)
            return judged
        self.row = replace(
            self.row,
            gateway_id="gw",
            disconnected_at_ms=None,
            last_seen_ms=self.now_ms,
            boot_id=boot,
            hello_nonce=claim.hello_nonce,
            recent_boots=judged.recent_boots,
            duplicate_hellos=judged.alternations,
            duplicate_since_ms=judged.since_ms,
        )
        return judged


@pytest.mark.parametrize(
    ("row", "pair", "forked"),
    [
        (0, (1, 2), False),
        (1, (0, 2), False),
        (1, (2, 0), False),
        (1, (1, 2), False),
        (1, (2, 1), False),
        (1, (2, 3), True),
    ],
)
def test_a_nonce_that_is_neither_of_the_pair_is_a_fork(row: int, pair: tuple[int, int], *, forked: bool) -> None:
    claim = Claim(boot_id="b", hello_nonce=nonce(pair[0]), previous_hello_nonce=nonce(pair[1]))
    assert has_forked(nonce(row), claim) is forked
    assert not has_forked(nonce(row), replace(claim, epoch_behind=True))


@pytest.mark.parametrize(
    ("changes", "live"),
    [
        ({}, True),
        ({"gateway_id": ""}, False),
        ({"disconnected_at_ms": START_MS}, False),
        ({"last_seen_ms": None}, False),
        ({"last_seen_ms": START_MS - 44_999}, True),
        ({"last_seen_ms": START_MS - 45_000}, False),
        ({"last_seen_ms": START_MS - 45_000, "heartbeat_interval_ms": 20_000}, True),
    ],
)
def test_the_live_window_is_of_the_previous_session(changes: dict[str, object], *, live: bool) -> None:
    row = replace(empty_row(), gateway_id="gw", last_seen_ms=START_MS)
    assert was_live(replace(row, **changes), now_ms=START_MS) is live  # type: ignore[arg-type]  # test data


def test_two_clones_are_quarantined_at_the_fourth_alternation() -> None:
    identity = Identity()
    judged = [identity.hello(boot) for boot in "ABABAA"]
    assert [one.alternations for one in judged[:5]] == [0, 1, 2, 3, 4]
    assert [one.quarantine for one in judged[:5]] == [False, False, False, False, True]
    assert judged[5].alternations == 1, "the counter starts over with the quarantine"


def test_two_copies_of_a_live_snapshot_are_found_by_their_nonces() -> None:
    identity = Identity()
    identity.hello("A", nonces=(9, 8))
    pairs = {"first": (1, 9), "second": (2, 9)}
    judged = []
    for number in range(5):
        name = "first" if number % 2 == 0 else "second"
        judged.append(identity.hello("A", nonces=pairs[name]))
    assert [one.forked for one in judged] == [False, True, True, True, True]
    assert judged[-1].quarantine
    assert not any(one.boot_changed for one in judged)


def test_a_machine_in_a_crash_loop_is_honest() -> None:
    identity = Identity()
    judged = [identity.hello(f"boot-{number}") for number in range(12)]
    assert not any(one.quarantine for one in judged)
    assert judged[4].reboot_loop
    assert not judged[3].reboot_loop
    assert len(identity.row.recent_boots) == BOOTS_KEPT


def test_a_quiet_prior_session_is_superseded_without_counting() -> None:
    identity = Identity()
    identity.hello("A")
    for boot in "BABABA":
        judged = identity.hello(boot, quiet=True)
        assert not judged.duplicate
        assert judged.boot_changed
        assert judged.alternations == 0


def test_a_daemon_that_reconnects_a_hundred_times_is_no_clone() -> None:
    identity = Identity()
    for number in range(100):
        judged = identity.hello("A", nonces=(number % 200 + 2, number % 200 + 1), after_ms=10)
        assert not judged.duplicate
        assert not judged.forked


def test_the_window_forgets() -> None:
    identity = Identity()
    for boot in "ABAB":
        identity.hello(boot)
    assert identity.row.duplicate_hellos == 3
    identity.row = replace(identity.row, last_seen_ms=identity.now_ms + 11 * MINUTE_MS)
    judged = identity.hello("A", after_ms=11 * MINUTE_MS)
    assert judged.duplicate
    assert judged.alternations == 1


@pytest.mark.parametrize(("age_ms", "proof"), [(10 * MINUTE_MS, True), (10 * MINUTE_MS + 1, False)])
def test_a_boot_that_came_back_is_proof_only_within_the_window(age_ms: int, *, proof: bool) -> None:
    boots = (BootSeen(boot_id="A", seen_at_ms=START_MS - age_ms), BootSeen(boot_id="B", seen_at_ms=START_MS))
    row = replace(empty_row(), gateway_id="gw", last_seen_ms=START_MS, boot_id="B", recent_boots=boots)
    row = replace(row, duplicate_hellos=3, duplicate_since_ms=START_MS)
    claim = Claim(boot_id="A", hello_nonce=b"", previous_hello_nonce=b"")
    judged = judge(row, claim, GATEWAY, now_ms=START_MS)
    assert (judged.quarantine, judged.reboot_loop) == (proof, not proof)


def test_a_fork_in_the_window_is_proof_for_a_later_alternation() -> None:
    identity = Identity()
    identity.hello("A", nonces=(1, 9))
    assert identity.hello("A", nonces=(3, 2)).forked
    for boot in ("B", "C"):
        assert not identity.hello(boot).quarantine
    assert identity.hello("D").quarantine


def test_a_fork_alone_is_proof() -> None:
    row = replace(empty_row(), gateway_id="gw", last_seen_ms=START_MS, boot_id="A", hello_nonce=nonce(9))
    row = replace(row, duplicate_hellos=3, duplicate_since_ms=START_MS)
    claim = Claim(boot_id="B", hello_nonce=nonce(1), previous_hello_nonce=nonce(2))
    judged = judge(row, claim, GATEWAY, now_ms=START_MS)
    assert judged.quarantine
    assert not judged.reboot_loop


def test_a_hello_that_a_proxy_could_have_written_is_not_counted() -> None:
    row = replace(empty_row(), gateway_id="gw", last_seen_ms=START_MS, boot_id="A", duplicate_hellos=9)
    row = replace(row, duplicate_since_ms=START_MS, recent_boots=())
    claim = Claim(boot_id="B", hello_nonce=b"", previous_hello_nonce=b"")
    judged = judge(row, claim, replace(GATEWAY, hello_proven=False), now_ms=START_MS)
    assert not judged.duplicate
    assert not judged.quarantine


def test_the_first_hello_of_a_node_changes_nothing() -> None:
    judged = Identity().hello("A")
    assert not judged.boot_changed
    assert [seen.boot_id for seen in judged.recent_boots] == ["A"]
