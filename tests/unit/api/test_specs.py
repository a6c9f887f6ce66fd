"""`/v1/nodes/{id}/spec` over a real database: setting, refusing, racing, and what is kept byte by byte."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bettercompute.protocol import messages
from bettercompute.protocol.limits import MIB
from bettercompute.store import sessions, specs

PATH = "/v1/nodes/n1/spec"
HOST = {"huge_pages": [{"size_bytes": 2**21, "count": 4}]}
pytestmark = pytest.mark.usefixtures("two_nodes")


async def put(clients, spec: dict[str, Any], **more: Any) -> Any:
    return await clients["operator"].put(PATH, json={"spec": spec, **more})


async def patch(clients, sections: dict[str, Any], **more: Any) -> Any:
    return await clients["operator"].patch(PATH, json={"sections": sections, **more})


async def stored(database) -> Any:
    return (await sessions.newer_specs(database, generations={"n1": 0}))["n1"]


async def test_a_spec_is_set_changed_and_shown(clients, database):
    empty = (await clients["viewer"].get(PATH)).json()
    assert (empty["generation"], empty["state"], empty["spec"]) == (0, "none", {})
    made = (await put(clients, {"daemon": {"log_level": "debug"}}, expected_generation=0, why="to see")).json()
    assert (made["generation"], made["before_generation"], made["changed"]) == (1, 0, ["daemon"])
    made = (await patch(clients, {"host": HOST})).json()
    assert (made["generation"], made["changed"]) == (2, ["host"])
    shown = (await clients["viewer"].get(PATH)).json()
    assert shown["spec"] == {
        "daemon": {"log_level": "debug"},
        "host": {"huge_pages": [{"size_bytes": "2097152", "count": "4"}]},
    }
    assert (shown["state"], shown["issued_by"], shown["signed"]) == ("pending", "a-operator", False)
    older = (await clients["viewer"].get(PATH, params={"generation": 1})).json()
    assert (older["state"], older["why"], older["spec"]) == ("replaced", "to see", {"daemon": {"log_level": "debug"}})
    await patch(clients, {"daemon": None})
    listed = (await clients["viewer"].get(f"{PATH}/history")).json()
    assert [(item["generation"], item["changed"]) for item in listed["items"]] == [
        (3, ["daemon"]),
        (2, ["host"]),
        (1, ["daemon"]),
    ]
    rest = (await clients["viewer"].get(f"{PATH}/history", params={"before": 3, "limit": 1})).json()
    assert ([item["generation"] for item in rest["items"]], rest["next"]) == ([2], 2)
    rows = await database.query(
        "SELECT actor, action, target, why, details->>'generation' AS g FROM audit_log ORDER BY id"
    )
    assert [(row["action"], row["target"], row["g"]) for row in rows] == [
        ("spec.set", "node/n1", str(number)) for number in (1, 2, 3)
    ]
    assert rows[0]["why"] == "to see"


async def test_a_misspelled_field_is_refused_and_nothing_is_set(clients):
    for answer in (
        await put(clients, {"daemon": {}}, expected_generatoin=0),
        await patch(clients, {"daemon": {}}, dryrun=True),
    ):
        assert answer.status_code == 422
        assert "expected_generatoin" in answer.text or "dryrun" in answer.text
    assert (await clients["viewer"].get(PATH)).json()["generation"] == 0


async def test_what_is_so_already_is_no_new_generation(clients):
    await put(clients, {"daemon": {"log_level": "debug"}})
    again = await put(clients, {"daemon": {"log_level": "debug"}}, expected_generation=0)
    assert (again.status_code, again.json()["generation"], again.json()["changed"]) == (200, 1, [])
    dry = (await put(clients, {"host": HOST}, dry_run=True)).json()
    assert (dry["generation"], dry["changed"]) == (1, ["daemon", "host"])
    assert (await clients["viewer"].get(PATH)).json()["generation"] == 1


async def test_of_two_who_set_at_once_one_wins_and_the_other_is_told(clients):
    await put(clients, {})
    answers = await asyncio.gather(
        *(put(clients, {"daemon": {"pinned_version": f"1.{number}"}}, expected_generation=1) for number in range(8))
    )
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 7
    [winner] = [answer.json() for answer in answers if answer.status_code == 200]
    assert winner["generation"] == 2
    refused = next(answer.json() for answer in answers if answer.status_code == 409)
    assert refused["reason"] == "conflict"
    assert refused["detail"].startswith("the spec of node n1 is at generation 2, not 1: somebody else has set it")
    assert (await clients["viewer"].get(PATH)).json()["spec"] == winner["spec"]


async def test_bytes_and_signatures_are_carried_verbatim(clients, database):
    await put(clients, {"daemon": {}})
    await patch(clients, {"daemon": {"log_level": "info"}})
    spec = await stored(database)
    whole = messages.DesiredStateBody.FromString(spec.body)
    assert (whole.node_id, whole.trust_domain, whole.generation) == ("n1", "bc.test", 2)
    part = messages.DesiredStateBody.FromString(spec.patch_body)
    assert (spec.patch_base_generation, part.patch.section, part.spec_sha256) == (1, "daemon", whole.spec_sha256)
    await database.query(
        "UPDATE node_specs SET patch_signature = 'sig-p' WHERE generation = 2",
    )
    await database.query("UPDATE nodes SET spec_signature = 'sig-f' WHERE node_id = 'n1'")
    signed = await stored(database)
    assert (signed.body, signed.signature) == (spec.body, b"sig-f")
    assert (signed.patch_body, signed.patch_signature) == (spec.patch_body, b"sig-p")


async def test_a_generation_is_above_what_the_daemon_knows(clients, database):
    await database.query("UPDATE nodes SET observed_generation = 9, applied_generation = 7 WHERE node_id = 'n1'")
    assert (await put(clients, {})).json()["generation"] == 10


async def test_only_the_newest_generations_are_kept(clients, database, monkeypatch):
    monkeypatch.setattr(specs, "KEPT", 3)
    for number in range(5):
        await put(clients, {"daemon": {"pinned_version": str(number)}})
    kept = (await clients["viewer"].get(f"{PATH}/history")).json()["items"]
    assert [item["generation"] for item in kept] == [5, 4, 3]
    gone = await clients["viewer"].get(PATH, params={"generation": 1})
    assert (gone.status_code, gone.json()["reason"]) == (404, "not-found")
    assert "`spec history n1` shows the ones there are" in gone.json()["detail"]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"dæmon": {}}, "spec: there is no section 'd\\xe6mon'; the sections are: access, daemon, devices"),
        ({"daemon": 7}, "spec: daemon is 7: it takes an object"),
        (
            {"daemon": {"loglevel": "x"}},
            "spec: daemon.loglevel: there is no such field; the fields of daemon are: log_level",
        ),
        ({"daemon": {"log_level": 7}}, "spec: daemon.log_level is 7: it takes text"),
        ({"daemon": {"log_level": "loud"}}, "spec: daemon.log_level is 'loud': it must be one of debug, info"),
        (
            {"daemon": {"inventory_interval_ms": -1}},
            "daemon.inventory_interval_ms is -1: it takes a whole number from 0",
        ),
        ({"host": {"huge_pages": {}}}, "spec: host.huge_pages is an object: it takes a list"),
        ({"host": {"huge_pages": [7]}}, "spec: host.huge_pages[0] is 7: it takes an object of size_bytes, count"),
        ({"host": {"huge_pages": [{"pages": 1}]}}, "spec: host.huge_pages[0].pages: there is no such field"),
        ({"host": {"huge_pages": [{"size_bytes": 3}]}}, "spec: host.huge_pages[0].size_bytes is 3: it must be a power"),
        (
            {"instances": {"instances": [{"state": "GOING"}]}},
            "instances.instances[0].state is 'GOING': it takes one of",
        ),
        (
            {"site": {"@type": "type.googleapis.com/google.protobuf.Any"}},
            "it must be type.googleapis.com/bettercompute.site",
        ),
        ({"access": {"ops": ["exec"]}}, "spec: access.ticket_jwks is '': it must hold the keys"),
    ],
    ids=range(13),
)
async def test_what_is_not_known_is_refused_with_its_place(clients, spec, said):
    refused = await put(clients, spec)
    assert (refused.status_code, refused.json()["reason"]) == (400, "bad-request")
    assert said in refused.json()["detail"]
    (name, value), *_ = spec.items()
    assert (await patch(clients, {name: value})).status_code == 400
    assert (await clients["viewer"].get(PATH)).json()["generation"] == 0


async def test_sections_of_later_work_are_stored(clients):
    site = {
        "@type": "type.googleapis.com/bettercompute.site.v1.SiteSpec",
        "boot_entries": [{"mac_address": "00:00:00:00:00:01", "not_after_ms": "7"}],
    }
    spec = {"site": site, "devices": {"assignments": [{"allocation_id": "a", "device_ids": ["GPU-1"]}]}}
    assert (await put(clients, spec)).json()["spec"] == spec


async def test_who_may_and_which_node(clients):
    assert (await clients["viewer"].put(PATH, json={"spec": {}})).status_code == 403
    assert (await clients["viewer"].patch(PATH, json={"sections": {}})).status_code == 403
    missing = await clients["operator"].put("/v1/nodes/nowhere/spec", json={"spec": {}})
    assert (missing.status_code, missing.json()["reason"]) == (404, "not-found")
    assert (await clients["viewer"].get("/v1/nodes/nowhere/spec/history")).status_code == 404
    large = await put(clients, {"access": {"ticket_issuer": "x" * (2 * MIB)}})
    assert large.status_code == 413


@pytest.mark.parametrize(
    ("observed", "applied", "convergence", "state"),
    [
        (1, 1, messages.SECTION_CONVERGENCE_CONVERGED, "applied"),
        (1, 0, messages.SECTION_CONVERGENCE_FAILED, "parked"),
        (1, 0, messages.SECTION_CONVERGENCE_UNSUPPORTED, "parked"),
        (1, 0, messages.SECTION_CONVERGENCE_CONVERGING, "converging"),
        (0, 0, messages.SECTION_CONVERGENCE_FAILED, "pending"),
        (2, 1, messages.SECTION_CONVERGENCE_CONVERGED, "pending"),  # it holds what a restored database knows nothing of
    ],
    ids=range(6),
)
async def test_how_it_stands(clients, database, observed, applied, convergence, state):
    await put(clients, {"daemon": {}})
    report = messages.StatusReport()
    report.sections.add(section="daemon", field_number=2, convergence=convergence, reason="why", generation=1)
    await database.query(
        "UPDATE nodes SET observed_generation = $1, applied_generation = $2 WHERE node_id = 'n1'", observed, applied
    )
    await database.query("INSERT INTO node_status (node_id, report) VALUES ('n1', $1)", report.SerializeToString())
    shown = (await clients["viewer"].get(PATH)).json()
    assert shown["state"] == state
    [section] = shown["sections"]
    assert (section["section"], section["reason"]) == ("daemon", "why")
    assert section["convergence"] in {"converged", "failed", "unsupported", "converging"}
