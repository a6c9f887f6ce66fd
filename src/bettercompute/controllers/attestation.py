"""The attestation controller: verifies what nodes have signed of commands' ends and of themselves.

Gateways store results as they come; whether the node said so is decided here, under the certificates that the control
plane issued. A forgery is kept and marked, told as an event and counted: the command has ended for everybody else, and
nobody may take its result for the node's word. What a node signs carries its certificate: one that a restored database
has forgotten goes on record by it. See docs/security.md, "Attested results"; decisions 0142 and 0176.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from google.protobuf.message import DecodeError
from prometheus_client import CollectorRegistry, Counter

from bettercompute import telemetry
from bettercompute.delivery.commands import CommandState
from bettercompute.errors import Refused
from bettercompute.pki import attestation as rules
from bettercompute.pki import certificates, rotation
from bettercompute.pki.attestation import Attestation, Judged
from bettercompute.pki.possession import Shown
from bettercompute.pki.rotation import Purpose
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import attested_report_input, command_update_input
from bettercompute.store import attestation, controller_runs, nodes, outbox, trust
from bettercompute.store import certificates as stored_certificates
from bettercompute.store.attestation import DueReport, DueUpdate, JudgedReport
from bettercompute.store.database import Database, Transaction
from bettercompute.world import World

log = structlog.get_logger("bettercompute.controllers.attestation")

NAME = "attestation"
# The poll behind the notification that the end of a command gives.
INTERVAL_MS = 5_000
BATCH = 200


class AttestationController:
    """Judges a page of commands and a page of reports at each run."""

    name = NAME
    interval_ms = INTERVAL_MS

    def __init__(
        self,
        database: Database,
        *,
        world: World,
        registry: CollectorRegistry | None = None,
        trust_domain: str | None = None,
    ) -> None:
        """Without `trust_domain` what a restore has forgotten stays forgotten until nodes renew."""
        self._database = database
        self._world = world
        self._trust_domain = trust_domain
        self._verdicts = Counter(
            telemetry.METRIC_ATTESTATIONS,
            "What nodes should have signed, by what it was and what was found.",
            ("what", "verdict"),
            registry=registry,
        )

    async def reconcile(self) -> bool:
        """Judge what is due; return whether there may be more."""
        updates = await attestation.due_updates(self._database, page_size=BATCH)
        if await self._recall(unknown_in_updates(updates)):
            updates = await attestation.due_updates(self._database, page_size=BATCH)
        if updates:
            await self._judge_updates(updates)
        reports = await attestation.due_reports(self._database, page_size=BATCH)
        if await self._recall(unknown_in_reports(reports)):
            reports = await attestation.due_reports(self._database, page_size=BATCH)
        if reports:
            await self._judge_reports(reports)
        return BATCH in (len(updates), len(reports))

    async def _recall(self, unknown: Sequence[Unknown]) -> bool:
        """Put certificates on record that a restore has forgotten, where their nodes have signed with them; return
        whether there were any.
        """
        if not unknown or self._trust_domain is None:
            return False
        authorities = rotation.trusted(await trust.keys(self._database), Purpose.NODE_CA)
        roots = [certificates.load_certificate(key.public_der) for key in authorities]
        now_ms, found = await controller_runs.now_ms(self._database), False
        for item in unknown:
            shown = rules.shown_by(
                item.signature,
                item.covered,
                node_id=item.node_id,
                roots=roots,
                trust_domain=self._trust_domain,
                now_ms=now_ms,
            )
            if shown is not None:
                found |= await self._put_on_record(shown)
        return found

    async def _put_on_record(self, shown: Shown) -> bool:
        async def work(transaction: Transaction) -> bool:
            node_id = shown.identity.node_id
            if not await nodes.lock_session(transaction, node_id=node_id):
                return False
            node = await nodes.get(transaction, node_id=node_id)
            if node is None or node.quarantined_at_ms is not None or node.revoked_at_ms is not None:
                return False
            if await stored_certificates.find(transaction, serial=shown.serial) is not None:
                return False
            await stored_certificates.put_on_record(transaction, shown, identity_generation=node.identity_generation)
            return True

        try:
            return await self._database.retrying(work)
        except Refused as refused:
            log.warning("a certificate that is not on record stays so", why=refused.message)
            return False

    async def _judge_updates(self, due: list[DueUpdate]) -> None:
        judged = [(item, judge_update(item)) for item in due]

        async def work(transaction: Transaction) -> frozenset[str]:
            return await attestation.record_updates(transaction, [(item.command_id, found) for item, found in judged])

        recorded = await self._database.retrying(work)
        told = []
        for item, found in judged:
            if item.command_id not in recorded:
                continue
            self._verdicts.labels("command-update", found.attestation.value).inc()
            if is_suspicious(found.attestation, state=item.state):
                told.append((item.node_id, {"commandId": item.command_id, "kind": item.kind, **_why(found)}))
        await self._tell(telemetry.EVENT_RESULT_NOT_ATTESTED, told)

    async def _judge_reports(self, due: list[DueReport]) -> None:
        judged = [judge_report(item) for item in due]

        async def work(transaction: Transaction) -> frozenset[str]:
            return await attestation.record_reports(transaction, judged)

        recorded = await self._database.retrying(work)
        told = []
        for item in judged:
            if item.due.node_id not in recorded:
                continue
            self._verdicts.labels("attested-report", item.judged.attestation.value).inc()
            # Told once while it lasts: every report of an older daemon is unsigned.
            if item.judged.attestation is Attestation.FORGED and item.due.attestation != Attestation.FORGED:
                told.append((item.due.node_id, _why(item.judged)))
        await self._tell(telemetry.EVENT_REPORT_NOT_ATTESTED, told)

    async def _tell(self, event_type: str, told: Iterable[tuple[str, dict[str, Any]]]) -> None:
        events = [
            outbox.NewEvent(
                id=self._world.ids.uuid7(), type=event_type, node_id=node_id, payload={"nodeId": node_id, **payload}
            )
            for node_id, payload in told
        ]
        if not events:
            return

        async def work(transaction: Transaction) -> None:
            await outbox.publish(transaction, events)

        await self._database.retrying(work)
        for event in events:
            log.warning("what a node should have signed is not its word", type=event_type, **event.payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """A signature by a key that is none of its node's on record."""

    node_id: str
    signature: messages.Signature
    covered: bytes


def unknown_in_updates(due: Iterable[DueUpdate]) -> list[Unknown]:
    """Return those commands' ends whose signer is not on record."""
    return [
        unknown
        for item in due
        if item.signature
        and (
            unknown := _unknown(
                item.node_id,
                item.signature,
                command_update_input(command_id=item.command_id, state=item.state, result=item.result),
                item.chains_pem,
            )
        )
    ]


def unknown_in_reports(due: Iterable[DueReport]) -> list[Unknown]:
    """Return those statements whose signer is not on record."""
    found = []
    for item in due:
        try:
            attested = messages.StatusReport.FromString(item.report).attested
        except DecodeError:
            continue
        signature = attested.signature.SerializeToString()
        if signature and (
            unknown := _unknown(item.node_id, signature, attested_report_input(attested.body), item.chains_pem)
        ):
            found.append(unknown)
    return found


def _unknown(node_id: str, signature: bytes, covered: bytes, chains_pem: Sequence[bytes]) -> Unknown | None:
    try:
        given = messages.Signature.FromString(signature)
    except DecodeError:
        return None
    if not given.certificate_chain or given.kid in map(certificates.spki_sha256, rules.public_keys(chains_pem)):
        return None
    return Unknown(node_id=node_id, signature=given, covered=covered)


def judge_update(due: DueUpdate) -> Judged:
    """Return the verdict over a command's end; what no node ever had needs no signature.

    That it was never sent is its gateways' word, and a success contradicts it.
    """
    if not due.sent and due.state != CommandState.SUCCEEDED:
        return Judged(Attestation.NONE)
    return rules.judge_update(
        command_id=due.command_id,
        state=due.state,
        result=due.result,
        signature=due.signature,
        keys=rules.public_keys(due.chains_pem),
    )


def is_suspicious(verdict: Attestation, *, state: int) -> bool:
    """Say whether somebody must hear of it: a daemon signs every success, and not every failure is a handler's."""
    return verdict is Attestation.FORGED or (verdict is Attestation.UNSIGNED and state == CommandState.SUCCEEDED)


def judge_report(due: DueReport) -> JudgedReport:
    """Return the verdict over a status report, with the statement where it verified."""
    try:
        report = messages.StatusReport.FromString(due.report)
    except DecodeError:
        return JudgedReport(due=due, judged=Judged(Attestation.FORGED, "the report does not decode"))
    judged = rules.judge_report(
        report,
        node_id=due.node_id,
        newest_ms=due.newest_ms,
        now_ms=due.now_ms,
        keys=rules.public_keys(due.chains_pem),
    )
    if judged.attestation is not Attestation.VERIFIED:
        return JudgedReport(due=due, judged=judged)
    body = report.attested.body
    return JudgedReport(due=due, judged=judged, body=body, at_ms=messages.AttestedReportBody.FromString(body).at_ms)


def _why(found: Judged) -> dict[str, Any]:
    return {"attestation": found.attestation.value, "reason": found.reason}
