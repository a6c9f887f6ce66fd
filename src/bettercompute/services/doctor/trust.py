"""Checks of the certificates that others stand on, and of what connected nodes hold of the trust bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bettercompute.pki import certificates, trust
from bettercompute.pki.quorum import ApproverSet
from bettercompute.services.doctor.dates import judge_life
from bettercompute.services.doctor.finding import Finding, Surroundings, count_of, failed, ok, warning
from bettercompute.store import doctor
from bettercompute.store import trust as stored_trust
from bettercompute.store.doctor import Named

# A new bundle reaches a node at its next Welcome, which a renewal brings at the latest; nobody is behind before this.
SETTLES_MS = 600_000
ROTATE = "rotate it: docs/operations.md has the steps of each"


async def check_authorities(around: Surroundings) -> Finding:
    """Whether CAs, root and worker key are good for long enough."""
    now_ms = around.world.clock.now_ms()
    return judge_authorities(
        {
            name: (
                certificates.not_after_ms(one) - now_ms,
                certificates.not_after_ms(one) - certificates.not_before_ms(one),
            )
            for name, one in around.authorities().items()
        }
    )


def judge_authorities(lives: Mapping[str, tuple[int, int]]) -> Finding:
    """Judge each by what is left and its whole life, in ms; the worst is told."""
    findings = [
        judge_life(f"{name}", left_ms=left_ms, life_ms=life_ms, cure=ROTATE)
        for name, (left_ms, life_ms) in lives.items()
    ]
    return max(findings, key=lambda finding: finding.level, default=ok("this process holds no certificate of others"))


async def check_trust_version(around: Surroundings) -> Finding:
    """Whether connected nodes hold the newest trust bundle."""
    bundle = await stored_trust.current(around.database)
    if bundle is None:
        return failed("no trust bundle is published", cure="start the API: it publishes one")
    now_ms = (await doctor.server(around.database)).now_ms
    behind = await doctor.behind(around.database, version=bundle.version)
    return judge_trust_version(behind, version=bundle.version, published_ms_ago=now_ms - bundle.created_at_ms)


def judge_trust_version(behind: Sequence[Named], *, version: int, published_ms_ago: int) -> Finding:
    """Being behind is a matter of time: a bundle comes with the next session."""
    if not behind:
        return ok(f"every connected node holds trust bundle {version}")
    sentence = (
        f"{count_of(behind)} connected without trust bundle {version}, published {published_ms_ago // 60_000} min ago"
    )
    if published_ms_ago < SETTLES_MS:
        return ok(sentence)
    return warning(
        sentence,
        cure="they get it with their next session, at the latest when they renew; `gateway drain` brings it about; one "
        "that stays behind refuses it: see `nodes show` and `bcd status` there",
        nodes=behind,
    )


async def check_quorum_lag(around: Surroundings) -> Finding:
    """Whether connected nodes enforce the approver set that is published."""
    bundle = await stored_trust.current(around.database)
    if bundle is None:
        return ok("no trust bundle is published yet")
    approvers = trust.read_own(bundle.signed_bundle).content.approvers
    epoch, sha256 = (approvers.epoch, approvers.sha256) if approvers.keys else (None, None)
    others = await doctor.other_set(around.database, epoch=epoch, sha256=sha256)
    return judge_quorum_lag(others, approvers=approvers, version=bundle.version)


def judge_quorum_lag(others: Sequence[tuple[Named, int]], *, approvers: ApproverSet, version: int) -> Finding:
    """A node that holds the bundle and enforces another set has refused this one; the others have not got it yet."""
    name = f"approver set {approvers.epoch}" if approvers.keys else "the absence of approvers"
    if not others:
        return ok(f"every connected node enforces {name}")
    refusing = [node for node, held in others if held >= version]
    if refusing:
        return failed(
            f"{count_of(refusing)} connected with trust bundle {version} and another approver set than {name}",
            cure="they follow only a set that enough approvers of their own signed: publish it with the missing "
            "signatures (`pki approvers`), or re-join them",
            nodes=refusing,
        )
    behind = [node for node, _ in others]
    return warning(
        f"{count_of(behind)} connected that do not enforce {name} yet",
        cure="they take it with the trust bundle: see pki.trust-version",
        nodes=behind,
    )
