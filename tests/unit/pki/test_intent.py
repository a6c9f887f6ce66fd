"""A relay that holds a valid serving certificate still cannot make, alter or widen intent."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from bettercompute.errors import Refused
from bettercompute.pki import certificates, intent
from bettercompute.pki.certificates import DAY_MS, Authority
from bettercompute.pki.identity import NodeIdentity
from bettercompute.pki.intent import IntentSigner
from bettercompute.pki.trust import CommandRoot
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason

NOW_MS = 1_800_000_000_000


def root_and_signer(*, made_at_ms: int = NOW_MS, lifetime_ms: int = 30 * DAY_MS) -> tuple[Authority, IntentSigner]:
    root = certificates.make_command_root(serial=bytes(16), now_ms=made_at_ms)
    key = certificates.generate_key()
    leaf = certificates.make_worker_leaf(
        root, public_key=key.public_key(), serial=bytes(15) + b"1", now_ms=made_at_ms, lifetime_ms=lifetime_ms
    )
    return root, intent.make_signer(key=key, leaf=leaf, root=root.certificate, now_ms=made_at_ms)


ROOT, SIGNER = root_and_signer()
OTHER_ROOT, OTHER_SIGNER = root_and_signer()
ROOTS = (CommandRoot(certificate=ROOT.certificate),)


def command(
    signer: IntentSigner | None = SIGNER, *, kind: str = "node.reboot", at_ms: int = NOW_MS
) -> messages.Command:
    body = messages.CommandBody(command_id="c", node_id="n", kind=kind, issued_at_ms=at_ms).SerializeToString()
    made = messages.Command(body=body)
    if signer is not None:
        made.signature.MergeFromString(signer.sign_command(body))
    return made


def check(made: messages.Command, *, roots: tuple[CommandRoot, ...] = ROOTS, now_ms: int = NOW_MS) -> None:
    intent.check_command(made, messages.CommandBody.FromString(made.body), roots=roots, now_ms=now_ms)


def refusal(made: messages.Command, *, roots: tuple[CommandRoot, ...] = ROOTS, now_ms: int = NOW_MS) -> Refused:
    with pytest.raises(Refused) as refused:
        check(made, roots=roots, now_ms=now_ms)
    return refused.value


def test_what_a_worker_signed_is_believed_under_any_root_of_the_bundle():
    check(command())
    check(command(), roots=(CommandRoot(certificate=OTHER_ROOT.certificate), *ROOTS))
    check(command(None), roots=())


def test_what_no_worker_signed_is_refused():
    assert "not signed" in refusal(command(None)).message
    assert refusal(command(OTHER_SIGNER)).reason == Reason.BAD_PROOF
    altered = command()
    altered.body += messages.CommandBody(timeout_ms=9).SerializeToString()
    assert "altered" in refusal(altered).message
    stripped = command()
    del stripped.signature.certificate_chain[:]
    assert refusal(stripped).reason == Reason.BAD_PROOF


def test_a_signature_of_another_purpose_is_worth_nothing():
    made = command(None)
    made.signature.MergeFromString(SIGNER.sign_desired_state(made.body))
    assert refusal(made).reason == Reason.BAD_PROOF


def test_a_node_certificate_signs_no_intent():
    node_ca = certificates.make_node_ca(serial=bytes(16), now_ms=NOW_MS)
    key = certificates.generate_key()
    leaf = certificates.make_node_leaf(
        node_ca,
        public_key=key.public_key(),
        identity=NodeIdentity(trust_domain="bc.local", site="s", node_id="n", role="node"),
        serial=bytes(16),
        now_ms=NOW_MS,
    )
    forged = IntentSigner(key, (leaf.public_bytes(Encoding.DER),), root_sha256="0" * 64)
    assert refusal(command(forged)).reason == Reason.BAD_PROOF
    assert refusal(command(forged), roots=(CommandRoot(certificate=node_ca.certificate),)).reason


def test_a_root_may_be_narrowed_to_kinds():
    narrow = (replace(ROOTS[0], allowed_kinds=("inventory.refresh",)),)
    check(command(kind="inventory.refresh"), roots=narrow)
    refused = refusal(command(), roots=narrow)
    assert (refused.reason, "node.reboot" in refused.message) == (Reason.ACCESS_DENIED, True)
    check(command(), roots=(*narrow, replace(ROOTS[0], allowed_kinds=("node.reboot",))))


def test_a_root_may_be_narrowed_to_a_time():
    window = (replace(ROOTS[0], not_before_ms=NOW_MS, not_after_ms=NOW_MS + 10),)
    check(command(), roots=window)
    late = "a leaked key could date what it signs back: the end counts by the node's time"
    assert "outside the time" in refusal(command(), roots=window, now_ms=NOW_MS + 10).message, late
    spec = messages.DesiredStateBody(node_id="n", generation=1, issued_at_ms=NOW_MS)
    desired = messages.DesiredState(body=spec.SerializeToString())
    desired.signature.MergeFromString(SIGNER.sign_desired_state(desired.body))
    intent.check_desired_state(desired, spec, roots=window, now_ms=NOW_MS + 9)
    with pytest.raises(Refused, match="outside the time"):
        intent.check_desired_state(desired, spec, roots=window, now_ms=NOW_MS + 10)
    assert "outside the time" in refusal(command(at_ms=NOW_MS - 1), roots=window).message
    assert "outside the time" in refusal(command(at_ms=NOW_MS + 10), roots=window).message


def test_a_command_needs_a_chain_that_is_valid_now_and_a_spec_one_that_was_when_it_was_made():
    late_ms = NOW_MS + 31 * DAY_MS
    assert "expired" in refusal(command(), now_ms=late_ms).message
    spec = messages.DesiredStateBody(node_id="n", generation=1, issued_at_ms=NOW_MS)
    desired = messages.DesiredState(body=spec.SerializeToString())
    desired.signature.MergeFromString(SIGNER.sign_desired_state(desired.body))
    intent.check_desired_state(desired, spec, roots=ROOTS, now_ms=NOW_MS)
    spec.issued_at_ms = late_ms
    late = messages.DesiredState(body=spec.SerializeToString())
    late.signature.MergeFromString(SIGNER.sign_desired_state(late.body))
    with pytest.raises(Refused, match="expired"):
        intent.check_desired_state(late, spec, roots=ROOTS, now_ms=NOW_MS)


def test_a_root_of_few_kinds_signs_specs_only_where_it_says_so():
    spec = messages.DesiredStateBody(node_id="n", generation=1, issued_at_ms=NOW_MS)
    desired = messages.DesiredState(body=spec.SerializeToString())
    with pytest.raises(Refused, match="not signed"):
        intent.check_desired_state(desired, spec, roots=ROOTS, now_ms=NOW_MS)
    intent.check_desired_state(desired, spec, roots=(), now_ms=NOW_MS)
    desired.signature.MergeFromString(SIGNER.sign_desired_state(desired.body))
    with pytest.raises(Refused, match="may not sign desired-state"):
        intent.check_desired_state(
            desired, spec, roots=(replace(ROOTS[0], allowed_kinds=("node.reboot",)),), now_ms=NOW_MS
        )
    intent.check_desired_state(
        desired, spec, roots=(replace(ROOTS[0], allowed_kinds=(intent.DESIRED_STATE,)),), now_ms=NOW_MS
    )


def test_a_signer_that_no_node_would_believe_is_refused_at_start():
    leaf = certificates.load_certificate(SIGNER.chain_der[0])
    with pytest.raises(Refused, match="not of the worker key"):
        intent.make_signer(key=certificates.generate_key(), leaf=leaf, root=ROOT.certificate, now_ms=NOW_MS)
    with pytest.raises(Refused, match="cannot sign"):
        intent.make_signer(key=SIGNER.key, leaf=leaf, root=OTHER_ROOT.certificate, now_ms=NOW_MS)
    with pytest.raises(Refused, match="expired"):
        intent.make_signer(key=SIGNER.key, leaf=leaf, root=ROOT.certificate, now_ms=NOW_MS + 31 * DAY_MS)
