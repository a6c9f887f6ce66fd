"""What nodes have signed, verified on PostgreSQL under the certificates that were issued to them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from prometheus_client import CollectorRegistry

from bettercompute import telemetry
from bettercompute.controllers.attestation import AttestationController
from bettercompute.pki import certificates, signatures
from bettercompute.pki.identity import NodeIdentity
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import attested_report_input, command_update_input
from bettercompute.store.database import Database
from bettercompute.system import system_world
from tests.contract.gateway import seed

WORLD = system_world()
SUCCEEDED, FAILED, EXPIRED = 5, 6, 8
RESULT = messages.DiagNvmlResult().SerializeToString() + b"\xfa\x07\x01x"


@dataclass
class Bench:
    database: Database
    registry: CollectorRegistry
    controller: AttestationController
    keys: dict[str, ec.EllipticCurvePrivateKey]
    node_ca: certificates.Authority
    chains: dict[str, list[bytes]] = field(default_factory=dict)

    async def certify(self, node_id: str, *, serial: int, revoked: bool = False) -> ec.EllipticCurvePrivateKey:
        """Record a certificate as JoinService does."""
        key = certificates.generate_key()
        now_ms = WORLD.clock.now_ms()
        authority = self.node_ca
        leaf = certificates.make_node_leaf(
            authority,
            public_key=key.public_key(),
            identity=NodeIdentity(trust_domain="bc.local", site="default", node_id=node_id, role="node"),
            serial=bytes(15) + bytes([serial]),
            now_ms=now_ms,
        )
        chain = certificates.chain_to_pem((leaf.public_bytes(Encoding.DER),))
        self.chains[certificates.spki_sha256(key.public_key())] = [leaf.public_bytes(Encoding.DER)]
        await self.database.query(
            "INSERT INTO node_certs (serial, node_id, identity_generation, csr_sha256, chain, not_before, not_after,"
            " revoked_at, revocation_reason) VALUES ($1, $2, 1, sha256($1::text::bytea), $3,"
            " compute_now() - interval '1 hour', compute_now() + interval '1 day',"
            " CASE WHEN $4 THEN compute_now() - interval '2 minutes' END, CASE WHEN $4 THEN 'test' END)",
            certificates.serial_text(leaf),
            node_id,
            chain,
            revoked,
        )
        return key

    async def ended(
        self,
        command_id: str,
        *,
        signature: messages.Signature | None,
        state: int = SUCCEEDED,
        result: bytes = RESULT,
        sent: bool = True,
        attestation: str = "expected",
    ) -> None:
        """Store a command as a gateway left it."""
        await self.database.query(
            "INSERT INTO commands (id, node_id, kind, lane, body, created_by, not_after, timeout_ms, state, created_at,"
            " dispatched_at, finished_at, result, update_signature, attestation) VALUES ($1, 'node-a', 'diag.nvml', 1,"
            " 'b', 'test', compute_now() + interval '1 hour', 1, $2, compute_now() - interval '1 minute',"
            " CASE WHEN $3 THEN compute_now() END, compute_now(), $4, $5, $6)",
            command_id,
            state,
            sent,
            result,
            None if signature is None else signature.SerializeToString(),
            attestation,
        )

    async def report(self, report: messages.StatusReport, *, node_id: str = "node-a") -> None:
        """Store a status report as a gateway does."""
        await self.database.query(
            "INSERT INTO node_status (node_id, report) VALUES ($1, $2)"
            " ON CONFLICT (node_id) DO UPDATE SET report = excluded.report, received_at = clock_timestamp()",
            node_id,
            report.SerializeToString(),
        )

    async def verdicts(self) -> dict[str, str]:
        rows = await self.database.query("SELECT id, attestation FROM commands ORDER BY id")
        return {row["id"]: row["attestation"] for row in rows}

    async def status(self) -> tuple[str, str]:
        [row] = await self.database.query("SELECT attestation, attestation_reason FROM node_status")
        return row["attestation"], row["attestation_reason"]

    async def told(self) -> list[tuple[str, str | None]]:
        rows = await self.database.query("SELECT type, payload->>'commandId' AS command_id FROM outbox ORDER BY id")
        return [(row["type"], row["command_id"]) for row in rows]

    def counted(self, what: str, verdict: str) -> float | None:
        return self.registry.get_sample_value(
            f"{telemetry.METRIC_ATTESTATIONS}_total", {"what": what, "verdict": verdict}
        )


def signed(
    key: ec.EllipticCurvePrivateKey, command_id: str, state: int = SUCCEEDED, result: bytes = RESULT
) -> messages.Signature:
    return signatures.sign(key, command_update_input(command_id=command_id, state=state, result=result))


@pytest.fixture
async def bench(database: Database) -> Bench:
    await seed.add_node(database, "node-a")
    await seed.add_node(database, "node-b")
    registry = CollectorRegistry()
    node_ca = certificates.make_node_ca(serial=bytes(16), now_ms=WORLD.clock.now_ms())
    await database.query(
        "INSERT INTO trust_keys (purpose, key_sha256, public_der, stage, first_version, changed_by)"
        " VALUES ('node-ca', $1, $2, 'current', 0, 'test')",
        certificates.spki_sha256(node_ca.certificate),
        node_ca.certificate.public_bytes(Encoding.DER),
    )
    controller = AttestationController(database, world=WORLD, registry=registry, trust_domain="bc.local")
    made = Bench(database, registry, controller, {}, node_ca)
    made.keys = {
        "present": await made.certify("node-a", serial=1),
        "renewed": await made.certify("node-a", serial=2),
        "revoked": await made.certify("node-a", serial=3, revoked=True),
        "other": await made.certify("node-b", serial=4),
        "stranger": certificates.generate_key(),
    }
    return made


async def test_each_end_of_an_attested_command_is_judged_once(bench: Bench):
    keys = bench.keys
    twisted = signed(keys["present"], "l")
    twisted.value = twisted.value[::-1]
    expected = {
        "a": ("verified", signed(keys["present"], "a"), {}),
        "b": ("verified", signed(keys["renewed"], "b", FAILED), {"state": FAILED}),
        "c": ("forged", signed(keys["revoked"], "c"), {}),
        "d": ("forged", signed(keys["other"], "d"), {}),
        "e": ("forged", signed(keys["stranger"], "e"), {}),
        "f": ("forged", signed(keys["present"], "f", FAILED), {}),  # it failed, and the gateway says it did not
        "g": ("forged", signed(keys["present"], "g", result=b"other"), {}),
        "h": ("forged", signed(keys["present"], "a"), {}),  # of another command
        "i": ("unsigned", None, {}),
        "j": ("unsigned", None, {"state": FAILED, "result": b""}),
        "k": ("none", None, {"state": EXPIRED, "result": b"", "sent": False}),
        "l": ("forged", twisted, {}),
        "m": ("none", None, {"attestation": "none"}),
        "n": ("unsigned", None, {"sent": False}),  # a success that was never sent
    }
    for command_id, (_, signature, changes) in expected.items():
        await bench.ended(command_id, signature=signature, **changes)  # type: ignore[arg-type]  # test data
    assert await bench.controller.reconcile() is False
    assert await bench.verdicts() == {command_id: verdict for command_id, (verdict, *_) in expected.items()}
    suspicious = ["c", "d", "e", "f", "g", "h", "i", "l", "n"]
    assert await bench.told() == [(telemetry.EVENT_RESULT_NOT_ATTESTED, name) for name in suspicious]
    assert bench.counted("command-update", "forged") == 7
    assert bench.counted("command-update", "verified") == 2
    await bench.controller.reconcile()
    assert len(await bench.told()) == len(suspicious)


def statement(key: ec.EllipticCurvePrivateKey, *, at_ms: int, node_id: str = "node-a") -> messages.StatusReport:
    body = messages.AttestedReportBody(node_id=node_id, at_ms=at_ms, applied_generation=7).SerializeToString()
    signature = signatures.sign(key, attested_report_input(body))
    return messages.StatusReport(attested=messages.AttestedReport(body=body, signature=signature))


async def test_a_statement_counts_when_the_node_signed_it_and_no_newer_one_is_known(bench: Bench):
    key, now_ms = bench.keys["present"], WORLD.clock.now_ms()
    altered = statement(key, at_ms=now_ms)
    altered.attested.body += b"\x28\x09"
    steps = [
        (messages.StatusReport(), "unsigned", "no statement"),
        (statement(key, at_ms=now_ms), "verified", ""),
        (altered, "forged", "does not verify"),
        (statement(key, at_ms=now_ms - 1), "forged", "is known"),
        (statement(key, at_ms=now_ms + 1, node_id="node-b"), "forged", "node-b"),
        (statement(bench.keys["other"], at_ms=now_ms + 1), "forged", "not pinned"),
        (statement(key, at_ms=now_ms + 3 * 3_600_000), "forged", "and it is"),  # would be the newest for hours
        (statement(bench.keys["renewed"], at_ms=now_ms + 2), "verified", ""),
    ]
    for report, verdict, why in steps:
        await bench.report(report)
        await bench.controller.reconcile()
        found, reason = await bench.status()
        assert found == verdict
        assert why in reason
    [row] = await bench.database.query("SELECT to_ms(attested_at) AS at_ms, attested_body FROM node_status")
    assert row["at_ms"] == now_ms + 2
    assert row["attested_body"] == steps[-1][0].attested.body
    # Told once while it lasts, not with each report.
    assert await bench.told() == [(telemetry.EVENT_REPORT_NOT_ATTESTED, None)]
    assert bench.counted("attested-report", "forged") == 5


async def test_what_is_signed_by_a_certificate_that_a_restore_has_forgotten_puts_it_on_record(bench: Bench):
    key, revoked, now_ms = bench.keys["renewed"], bench.keys["revoked"], WORLD.clock.now_ms()
    for name in ("renewed", "other"):
        [leaf] = bench.chains[certificates.spki_sha256(bench.keys[name].public_key())]
        await bench.database.query(
            "DELETE FROM node_certs WHERE serial = $1", certificates.serial_text(certificates.load_certificate(leaf))
        )

    def carrying(signer: ec.EllipticCurvePrivateKey, signature: messages.Signature) -> messages.Signature:
        signature.certificate_chain[:] = bench.chains[certificates.spki_sha256(signer.public_key())]
        return signature

    await bench.ended("c-1", signature=carrying(key, signed(key, "c-1")))
    await bench.ended("c-2", signature=carrying(bench.keys["other"], signed(bench.keys["other"], "c-2")))
    await bench.ended("c-3", signature=carrying(key, signed(bench.keys["stranger"], "c-3")))
    await bench.ended("c-4", signature=carrying(revoked, signed(revoked, "c-4")))
    await bench.controller.reconcile()
    assert await bench.verdicts() == {"c-1": "verified", "c-2": "forged", "c-3": "forged", "c-4": "forged"}
    await bench.database.query("DELETE FROM node_certs WHERE node_id = 'node-a' AND revoked_at IS NULL")
    report = statement(key, at_ms=now_ms)
    carrying(key, report.attested.signature)
    await bench.report(report)
    await bench.controller.reconcile()
    assert await bench.status() == ("verified", "")
    [row] = await bench.database.query("SELECT count(*) AS n FROM node_certs WHERE node_id = 'node-b'")
    assert row["n"] == 0, "another's certificate vouches for nobody here"
