"""The doctor: what each check makes of its facts, and that its questions find what they are to find."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

from bettercompute.errors import Refused, Unavailable
from bettercompute.pki.quorum import NO_APPROVERS, ApproverSet
from bettercompute.services.doctor import database as database_checks
from bettercompute.services.doctor import dates, fleet, gateways, host, service, trust
from bettercompute.services.doctor.finding import Check, Disk, Finding, Level, Surroundings, ok
from bettercompute.services.doctor.service import CHECKS, DoctorService
from bettercompute.store import doctor, migrations
from bettercompute.store.database import Database
from bettercompute.store.doctor import NAMED_MAX, GatewayHealth, Named
from bettercompute.store.migrations import Applied, Migration, Phase, Status
from bettercompute.store.sessions import SessionKey
from bettercompute.system import system_world
from tests.contract.gateway import seed
from tests.contract.gateway.seed import LEASE

DAY_MS = 86_400_000
# Away for a week, and for a minute too long: an expired certificate brings a node back for 72 hours.
TROUBLES = """
UPDATE nodes SET state = 'unreachable' WHERE node_id IN ('gone', 'back', 'clone', 'revoked');
UPDATE node_certs SET not_before = '2001-01-01', not_after = compute_now() - interval '7 days' WHERE node_id = 'gone';
UPDATE node_certs SET not_after = compute_now() - interval '1 minute' WHERE node_id = 'back';
UPDATE node_certs SET issued_at = compute_now() - interval '21 hours', not_after = compute_now() + interval '3 hours'
  WHERE node_id = 'due';
UPDATE nodes SET quarantined_at = compute_now(), quarantine_reason = 'two' WHERE node_id = 'clone';
UPDATE nodes SET revoked_at = compute_now(), revoked_by = 'o', revoked_reason = '' WHERE node_id = 'revoked';
UPDATE node_certs SET revoked_at = compute_now(), revocation_reason = 'x' WHERE node_id IN ('clone', 'revoked');
INSERT INTO node_conditions (node_id, type, source, status, reason) VALUES
  ('fine', 'ClockUnconfirmed', 'daemon', 'true', 'ahead'), ('due', 'JournalFull', 'daemon', 'false', '');
INSERT INTO outbox (id, type, node_id, payload)
  SELECT 'e' || i, 'node.disconnected', 'fine', '{}' FROM generate_series(1, 5) i;
UPDATE node_sessions SET trust_version = 2, approver_set_epoch = 1, approver_set_sha256 = 'x' WHERE node_id = 'fine';
"""
WORLD = system_world()
OK, WARNING, FAILED = Level.OK, Level.WARNING, Level.FAILED

APPLIED = Applied(1, "main_job", Phase.EXPAND, "sum")
GATEWAY = GatewayHealth(
    name="gw-1",
    expired_for_ms=-10_000,
    draining=False,
    age_ms=60_000,
    clock_offset_ms=3,
    revocations_age_ms=4_000,
    serving_left_ms=80 * DAY_MS,
)
SET = ApproverSet(epoch=2, keys=(b"key",), threshold=1, tiers=())
NODES = [Named(node_id="n1"), Named(node_id="n2", about="why")]


def schema(**parts: tuple[object, ...]) -> Status:
    return replace(Status(applied=(APPLIED,), pending=(), changed=(), newer=()), **parts)  # type: ignore[arg-type] # as named


def waiting(phase: Phase) -> tuple[Migration, ...]:
    return (Migration(2, "later", phase, ""),)


@pytest.mark.parametrize(
    ("finding", "level", "says"),
    [
        (database_checks.judge_migrations(schema()), OK, "all 1 migrations"),
        (database_checks.judge_migrations(schema(changed=(APPLIED,))), FAILED, "migration 0001 was changed"),
        (database_checks.judge_migrations(schema(pending=waiting(Phase.EXPAND))), FAILED, "1 migrations are missing"),
        (database_checks.judge_migrations(schema(pending=waiting(Phase.CONTRACT))), WARNING, "1 contract migrations"),
        (database_checks.judge_migrations(schema(newer=(APPLIED,))), WARNING, "a newer release"),
        (database_checks.judge_clock(1_999), OK, "1999 ms ahead of"),
        (database_checks.judge_clock(-2_001), WARNING, "2001 ms behind"),
        (database_checks.judge_clock(-30_001), FAILED, "30001 ms behind"),
        (database_checks.judge_notify_queue(0.0), OK, "0% full"),
        (database_checks.judge_notify_queue(0.3), WARNING, "30% full"),
        (database_checks.judge_notify_queue(0.8), FAILED, "80% full"),
        (database_checks.judge_outbox(0), OK, "as they come"),
        (database_checks.judge_outbox(31_000), WARNING, "since 31 s"),
        (database_checks.judge_outbox(301_000), FAILED, "since 301 s"),
        (database_checks.judge_controllers(None, holder=""), FAILED, "no worker has ever run"),
        (database_checks.judge_controllers(5_000, holder="w1"), OK, "w1 last looked at the fleet 5 s ago"),
        (database_checks.judge_controllers(31_000, holder="w1"), WARNING, "31 s ago"),
        (database_checks.judge_controllers(121_000, holder="w1"), FAILED, "121 s ago"),
        (host.judge_disk(Disk(path="/x", total_bytes=100 << 30, free_bytes=50 << 30)), OK, "50.0 GiB free, 50%"),
        (host.judge_disk(Disk(path="/x", total_bytes=8 << 30, free_bytes=2 << 30)), OK, "25%"),
        (host.judge_disk(Disk(path="/x", total_bytes=100 << 30, free_bytes=9 << 30)), WARNING, "9%"),
        (host.judge_disk(Disk(path="/x", total_bytes=1 << 30, free_bytes=1 << 28)), FAILED, "0.2 GiB"),
        (gateways.judge_leases([GATEWAY]), OK, "1 holds a lease"),
        (gateways.judge_leases([]), FAILED, "no gateway holds a lease"),
        (gateways.judge_leases([replace(GATEWAY, draining=True)]), FAILED, "every gateway drains"),
        (gateways.judge_leases([GATEWAY, replace(GATEWAY, name="gw-2", expired_for_ms=1)]), WARNING, "gw-2 let the"),
        (gateways.judge_clocks([GATEWAY, replace(GATEWAY, name="gw-2", clock_offset_ms=-5_001)]), WARNING, "of gw-2"),
        (gateways.judge_clocks([replace(GATEWAY, clock_offset_ms=60_001)]), FAILED, "60001 ms"),
        (gateways.judge_clocks([replace(GATEWAY, clock_offset_ms=None)]), OK, "no gateway has said"),
        (gateways.judge_revocation_feed([GATEWAY]), OK, "4000 ms"),
        (gateways.judge_revocation_feed([replace(GATEWAY, revocations_age_ms=15_001)]), WARNING, "15001 ms"),
        (gateways.judge_revocation_feed([replace(GATEWAY, revocations_age_ms=60_001)]), FAILED, "60001 ms"),
        (gateways.judge_certificates([GATEWAY]), OK, "of gw-1 is good for another 80 days"),
        (gateways.judge_certificates([replace(GATEWAY, serving_left_ms=10 * DAY_MS)]), WARNING, "10 days"),
        (gateways.judge_certificates([replace(GATEWAY, serving_left_ms=2 * DAY_MS)]), FAILED, "2 days"),
        (gateways.judge_certificates([replace(GATEWAY, serving_left_ms=None)]), OK, "no gateway has said"),
        (dates.judge_life("it", left_ms=0, life_ms=DAY_MS, cure="renew"), FAILED, "it has expired"),
        (dates.judge_life("it", left_ms=3_600_000, life_ms=DAY_MS, cure="renew"), WARNING, "60 min"),
        (dates.judge_life("it", left_ms=91 * DAY_MS, life_ms=3650 * DAY_MS, cure="renew"), OK, "91 days"),
        (dates.judge_life("it", left_ms=89 * DAY_MS, life_ms=3650 * DAY_MS, cure="renew"), WARNING, "89 days"),
        (dates.judge_life("it", left_ms=13 * DAY_MS, life_ms=3650 * DAY_MS, cure="renew"), FAILED, "13 days"),
        (trust.judge_authorities({}), OK, "no certificate"),
        (trust.judge_authorities({"a": (300 * DAY_MS, 365 * DAY_MS), "b": (0, DAY_MS)}), FAILED, "b has expired"),
        (trust.judge_trust_version([], version=3, published_ms_ago=0), OK, "trust bundle 3"),
        (trust.judge_trust_version(NODES, version=3, published_ms_ago=599_999), OK, "2 nodes connected without"),
        (trust.judge_trust_version(NODES, version=3, published_ms_ago=600_000), WARNING, "10 min ago"),
        (trust.judge_quorum_lag([], approvers=NO_APPROVERS, version=3), OK, "the absence of approvers"),
        (trust.judge_quorum_lag([(NODES[0], 2)], approvers=SET, version=3), WARNING, "approver set 2 yet"),
        (trust.judge_quorum_lag([(NODES[0], 2), (NODES[1], 3)], approvers=SET, version=3), FAILED, "1 node connected"),
        (fleet.judge_certificates([]), OK, "in time"),
        (fleet.judge_certificates(NODES), FAILED, "2 nodes connected in the last sixth"),
        (fleet.judge_rejoin([]), OK, "by itself"),
        (fleet.judge_rejoin(NODES), WARNING, "certificates have all ended"),
        (fleet.judge_quarantined([]), OK, "no identity"),
        (fleet.judge_quarantined(NODES), FAILED, "2 nodes in quarantine"),
        (fleet.judge_clocks([]), OK, "no node has a clock"),
        (fleet.judge_clocks(NODES), WARNING, "more than an hour"),
        (fleet.judge_unsettled([]), OK, "within 10 min"),
        (fleet.judge_unsettled(NODES), WARNING, "lost at least 5 sessions"),
        (fleet.judge_disks([]), OK, "has room"),
        (fleet.judge_disks(NODES), FAILED, "without room"),
        (fleet.judge_refusals([]), OK, "no node refuses"),
        (fleet.judge_refusals(NODES * NAMED_MAX), FAILED, f"more than {NAMED_MAX} nodes"),
    ],
)  # fmt: skip
def test_what_is_made_of_the_facts(finding: Finding, level: Level, says: str) -> None:
    assert (finding.level, says in finding.sentence) == (level, True), finding
    assert bool(finding.cure) == (level is not OK), "what is not green has a cure"
    assert len(finding.nodes) <= NAMED_MAX


def test_names_are_told_once() -> None:
    names = [check.name for check in CHECKS]
    assert len(set(names)) == len(names)
    assert {"pki.quorum-lag", "pki.trust-version"} <= set(names)


@pytest.fixture
def around(database: Database, dsn: str) -> Surroundings:
    return Surroundings(
        database=database,
        dsn=dsn,
        world=WORLD,
        authorities=dict,
        disk=lambda: Disk(path="/x", total_bytes=100, free_bytes=50 << 30),
    )


async def levels(around: Surroundings) -> Mapping[str, Level]:
    return {one.name: one.finding.level for one in await DoctorService(around).examine()}


async def test_an_installation_that_never_ran(around: Surroundings) -> None:
    """Every question is answered, and what is missing is missing."""
    bad = {name: level for name, level in (await levels(around)).items() if level is not OK}
    assert bad == {"worker.controllers": FAILED, "gateways.leases": FAILED, "pki.trust-version": FAILED}


async def test_a_check_that_cannot_be_made_is_a_finding_and_hides_no_other(
    around: Surroundings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(_: Surroundings) -> Finding:
        await asyncio.Event().wait()
        raise AssertionError

    async def away(_: Surroundings) -> Finding:
        raise Unavailable("the database is away")

    async def broken(_: Surroundings) -> Finding:
        raise ZeroDivisionError("ours")

    async def good(_: Surroundings) -> Finding:
        return ok("good")

    monkeypatch.setattr(service, "CHECK_S", 0.01)
    checks = [Check(run.__name__, run) for run in (hangs, away, broken, good)]
    found = await DoctorService(around, checks=checks).examine()
    assert [(one.name, one.finding.level) for one in found] == [
        ("hangs", FAILED), ("away", FAILED), ("broken", FAILED), ("good", OK)
    ]  # fmt: skip
    assert "the database is away" in found[1].finding.sentence
    assert [one.name for one in await DoctorService(around, checks=checks).examine(["good"])] == ["good"]
    with pytest.raises(Refused, match="no check better; there are hangs, away"):
        await DoctorService(around, checks=checks).examine(["better"])


async def test_nodes_are_found_by_what_is_wrong_with_them(database: Database, around: Surroundings) -> None:
    await seed.add_lease(database)
    for number, node_id in enumerate(("gone", "back", "due", "fine", "clone", "revoked")):
        await seed.add_node(database, node_id, serial=f"a{number}")
    for node_id in ("due", "fine"):
        key = SessionKey(node_id=node_id, session_id="s", epoch=1)
        await seed.connect_node(database, key)
    async with database.transaction() as transaction:
        await transaction.script(TROUBLES)
    assert await doctor.locked_out(database, comes_back_ms=72 * 3_600_000) == [Named(node_id="gone")]
    [due] = await doctor.expiring(database, within_ms=fleet.EXPIRING_WITHIN_MS)
    assert due.node_id == "due"
    assert await doctor.quarantined(database) == [Named(node_id="clone", about="two")]
    assert await doctor.conditions(database, types=["ClockUnconfirmed", "JournalFull"]) == [
        Named(node_id="fine", about="ClockUnconfirmed (ahead)")
    ]
    assert await doctor.unsettled(database, within_ms=600_000, ends_min=5, event_type="node.disconnected") == [
        Named(node_id="fine", about="5 sessions ended")
    ]
    assert await doctor.behind(database, version=2) == [Named(node_id="due")]
    assert await doctor.other_set(database, epoch=1, sha256=b"x") == [(Named(node_id="due"), 0)]
    assert await doctor.other_set(database, epoch=None, sha256=None) == [(Named(node_id="fine"), 2)]
    [gateway] = await doctor.gateways(database)
    assert (gateway.name, gateway.live, gateway.clock_offset_ms) == (LEASE.gateway_id, True, None)
    found = await levels(around)
    assert (found["nodes.rejoin"], found["nodes.unsettled"], found["gateways.leases"]) == (WARNING, WARNING, OK)


async def test_the_schema_is_compared_with_the_files(around: Surroundings) -> None:
    finding = await database_checks.check_migrations(around)
    assert finding == ok(f"all {len(migrations.read())} migrations are applied")
