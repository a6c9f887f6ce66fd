"""No gateway, control plane or minority of approvers can widen what a node runs."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.errors import Refused
from bettercompute.pki import certificates, quorum, signatures
from bettercompute.pki.quorum import HOUR_MS, NO_APPROVERS, Approval, ApproverSet, SetChange, Unbatched
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import approver_set_input, approver_set_sha256, batch_approval_input
from bettercompute.protocol.kinds import KINDS

DOMAIN = "bc.local"
KEYS = [certificates.generate_key() for _ in range(4)]
STRANGER = certificates.generate_key()
NODE_TIER = int(messages.DESTRUCTIVE_TIER_NODE)
NOT_AFTER_MS = 1_900_000_000_000
NOW_MS = NOT_AFTER_MS - 1_000


def spki(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def approvers(*keys: ec.EllipticCurvePrivateKey, epoch: int = 1, threshold: int = 2, per_hour: int = 0) -> ApproverSet:
    return quorum.make_approver_set(
        map(spki, keys), epoch=epoch, threshold=threshold, tiers=[NODE_TIER], unbatched_per_hour=per_hour
    )


SET = approvers(*KEYS[:3])


def signed(offered: ApproverSet, *keys: ec.EllipticCurvePrivateKey) -> list[messages.Signature]:
    return [signatures.sign(key, offered.signing_input(trust_domain=DOMAIN)) for key in keys]


def twin(signature: messages.Signature) -> messages.Signature:
    order = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
    s = order - int.from_bytes(signature.value[32:], "big")
    return messages.Signature(value=signature.value[:32] + s.to_bytes(32, "big"), kid=signature.kid)


def judge(offered: ApproverSet, *keys: ec.EllipticCurvePrivateKey, held: ApproverSet = SET) -> SetChange:
    return quorum.judge_set(held, offered, signed(offered, *keys), trust_domain=DOMAIN)


def test_a_leaf_is_made_of_exactly_these():
    body = b"a body"
    content = b"".join(len(one).to_bytes(4, "big") + one for one in (b"c", b"n", b"k")) + hashlib.sha256(body).digest()
    expected = hashlib.sha256(b"\x00" + content).digest()
    assert quorum.batch_leaf(command_id="c", node_id="n", kind="k", body=body) == expected


# Sets


def test_the_held_sets_threshold_decides():
    offered = approvers(*KEYS, epoch=2, threshold=3)
    assert judge(offered, KEYS[0], KEYS[2]) is SetChange.TAKE
    assert judge(offered, KEYS[0]) is SetChange.NOT_SIGNED
    assert judge(offered, KEYS[3], KEYS[0]) is SetChange.NOT_SIGNED, "a newcomer cannot vote himself in"
    assert judge(offered) is SetChange.NOT_SIGNED


def test_one_approver_counts_once_however_often_he_signs():
    offered = approvers(*KEYS, epoch=2)
    once = signed(offered, KEYS[0])[0]
    assert quorum.judge_set(SET, offered, [once, once, twin(once)], trust_domain=DOMAIN) is SetChange.NOT_SIGNED


def test_a_signature_names_its_domain_its_epoch_and_its_set():
    offered = approvers(*KEYS, epoch=2)
    both = signed(offered, *KEYS[:2])
    assert quorum.judge_set(SET, offered, both, trust_domain="other") is SetChange.NOT_SIGNED
    for altered in (
        replace(offered, epoch=3),
        replace(offered, threshold=1),
        replace(offered, tiers=()),
        replace(offered, unbatched_per_hour=5),
    ):
        assert quorum.judge_set(SET, altered, both, trust_domain=DOMAIN) is SetChange.NOT_SIGNED


def test_the_same_set_at_a_higher_epoch_takes_signatures_too():
    offered = replace(SET, epoch=2)
    assert judge(offered) is SetChange.NOT_SIGNED
    assert judge(offered, *KEYS[:2]) is SetChange.TAKE


def test_epochs_rise_and_only_so_far():
    assert judge(SET) is SetChange.SAME
    assert judge(approvers(*KEYS), *KEYS[:2]) is SetChange.EPOCH_BEHIND
    assert judge(approvers(*KEYS, epoch=1_001), *KEYS[:2]) is SetChange.TAKE
    assert judge(approvers(*KEYS, epoch=1_002), *KEYS[:2]) is SetChange.EPOCH_TOO_FAR


def test_the_first_set_needs_nobody_and_the_end_of_a_set_needs_its_approvers():
    assert judge(SET, held=NO_APPROVERS) is SetChange.TAKE
    none = ApproverSet(epoch=2, keys=(), threshold=0, tiers=())
    assert judge(none) is SetChange.NOT_SIGNED
    assert judge(none, *KEYS[1:3]) is SetChange.TAKE


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"threshold": 0}, "threshold of 0"),
        ({"threshold": 4}, "threshold of 4"),
        ({"unbatched_per_hour": 1_001}, "1001 unbatched"),
        ({"epoch": 0}, "epoch 0"),
        ({"keys": []}, "0 keys"),
        ({"keys": [b"x" * 91]}, "SubjectPublicKeyInfo"),
        ({"keys": [bytes([n]) * 91 for n in range(17)]}, "17 keys"),
    ],
    ids=lambda value: value if isinstance(value, str) else "set",
)
def test_a_set_out_of_bounds_is_refused_by_name(change: dict[str, object], why: str):
    asked = {"keys": map(spki, KEYS[:3]), "epoch": 1, "threshold": 2, "tiers": [NODE_TIER], **change}
    with pytest.raises(Refused, match=why):
        quorum.make_approver_set(**asked)  # type: ignore[arg-type]  # one of them is out of bounds


def test_a_key_on_another_curve_is_refused():
    with pytest.raises(Refused, match="P-256"):
        quorum.approver_key(spki(ec.generate_private_key(ec.SECP384R1())))


def test_a_set_says_the_same_as_the_bundle_that_carries_it():
    bundle = messages.TrustBundle(
        approver_keys=reversed(SET.keys),
        approver_threshold=2,
        quorum_tiers=[messages.DESTRUCTIVE_TIER_NODE],
        approver_set_epoch=1,
    )
    assert quorum.approver_set_of(bundle) == SET
    assert SET.sha256 == approver_set_sha256(bundle)
    assert SET.signing_input(trust_domain=DOMAIN) == approver_set_input(bundle, trust_domain=DOMAIN)
    assert quorum.approver_set_of(messages.TrustBundle()) == NO_APPROVERS
    with pytest.raises(Refused, match="without approver keys"):
        quorum.approver_set_of(messages.TrustBundle(unbatched_destructive_per_hour=3))


# Trees


def rfc6962_root(leaves: list[bytes]) -> bytes:
    """The recursive definition of RFC 6962, 2.1, over leaf hashes."""
    if len(leaves) == 1:
        return leaves[0]
    left = 1 << (len(leaves) - 1).bit_length() - 1
    return hashlib.sha256(b"\x01" + rfc6962_root(leaves[:left]) + rfc6962_root(leaves[left:])).digest()


@given(st.integers(1, 200), st.data())
def test_each_leaf_of_a_batch_is_proven_and_nothing_else_is(size: int, data: st.DataObject):
    leaves = [hashlib.sha256(bytes([n])).digest() for n in range(size)]
    root = quorum.scope_root(leaves)
    assert root == rfc6962_root(leaves)
    proofs = quorum.batch_proofs(leaves)
    index = data.draw(st.integers(0, size - 1))
    proof = proofs[index]
    assert quorum.proves(leaves[index], proof, root=root, size=size)
    assert not quorum.proves(b"\x00" * 32, proof, root=root, size=size)
    other = messages.BatchProof(leaf_index=data.draw(st.integers(0, 2 * size)), path=proof.path)
    if other.leaf_index != index:
        assert not quorum.proves(leaves[index], other, root=root, size=size)
    longer = messages.BatchProof(leaf_index=index, path=[*proof.path, b"\x00" * 32])
    assert not quorum.proves(leaves[index], longer, root=root, size=size)
    if proof.path:
        shorter = messages.BatchProof(leaf_index=index, path=proof.path[:-1])
        assert not quorum.proves(leaves[index], shorter, root=root, size=size)


def test_an_inner_node_is_no_leaf_and_a_batch_has_bounds():
    leaves = [hashlib.sha256(bytes([n])).digest() for n in range(4)]
    inner = hashlib.sha256(b"\x01" + leaves[0] + leaves[1]).digest()
    right = hashlib.sha256(b"\x01" + leaves[2] + leaves[3]).digest()
    root = quorum.scope_root(leaves)
    assert not quorum.proves(inner, messages.BatchProof(leaf_index=0, path=[right]), root=root, size=4)
    assert not quorum.proves(leaves[0], messages.BatchProof(), root=leaves[0], size=0)
    with pytest.raises(Refused, match="batch of 0 commands"):
        quorum.scope_root([])


# Commands


def command(index: int = 0, *, size: int = 3, kind: str = "node.reboot", by: int = 2) -> messages.Command:
    bodies = [
        messages.CommandBody(command_id=f"c{n}", node_id=f"n{n}", kind=kind).SerializeToString() for n in range(size)
    ]
    leaves = [
        quorum.batch_leaf(command_id=f"c{n}", node_id=f"n{n}", kind=kind, body=body) for n, body in enumerate(bodies)
    ]
    approval = messages.BatchApproval(
        batch_id="b", scope_root=quorum.scope_root(leaves), scope_size=size, not_after_ms=NOT_AFTER_MS
    )
    signing_input = batch_approval_input(approval, trust_domain=DOMAIN)
    approval.signatures.extend(signatures.sign(key, signing_input) for key in KEYS[:by])
    return messages.Command(body=bodies[index], batch_approval=approval, batch_proof=quorum.batch_proofs(leaves)[index])


def approve(
    one: messages.Command,
    *,
    held: ApproverSet = SET,
    unbatched: Unbatched = Unbatched("boot"),  # noqa: B008 - frozen
    server_time_ms: int = NOW_MS,
    domain: str = DOMAIN,
) -> Approval:
    body = messages.CommandBody.FromString(one.body)
    return quorum.judge_approval(
        one,
        body,
        KINDS[body.kind],
        approvers=held,
        trust_domain=domain,
        unbatched=unbatched,
        server_time_ms=server_time_ms,
        monotonic_ms=2 * HOUR_MS,
    )


def test_a_leaf_of_an_approved_batch_runs():
    assert [approve(command(n)) for n in range(3)] == [Approval.BATCH] * 3
    assert approve(command(0, size=1)) is Approval.BATCH


def test_without_a_set_or_outside_its_tiers_nothing_needs_an_approval():
    bare = messages.Command(body=messages.CommandBody(kind="node.reboot").SerializeToString())
    assert approve(bare, held=NO_APPROVERS) is Approval.NOT_NEEDED
    assert approve(bare, held=replace(SET, tiers=(int(messages.DESTRUCTIVE_TIER_DISK),))) is Approval.NOT_NEEDED
    with pytest.raises(Refused, match="without a batch approval"):
        approve(bare, held=replace(SET, tiers=(0, NODE_TIER)))
    harmless = messages.Command(body=messages.CommandBody(kind="inventory.refresh").SerializeToString())
    assert approve(harmless) is Approval.NOT_NEEDED


def test_what_was_not_approved_is_refused():
    with pytest.raises(Refused, match="signed by 1 approvers"):
        approve(command(by=1))
    with pytest.raises(Refused, match="ended at"):
        approve(command(), server_time_ms=NOT_AFTER_MS)
    with pytest.raises(Refused, match="signed by 0 approvers"):
        approve(command(), domain="other")
    with pytest.raises(Refused, match="signed by 0 approvers"):
        approve(command(), held=approvers(KEYS[3], STRANGER))
    altered = command()
    altered.body = messages.CommandBody(
        command_id="c0", node_id="n0", kind="node.reboot", not_after_ms=9
    ).SerializeToString()
    with pytest.raises(Refused, match="not one of those"):
        approve(altered)
    widened = command()
    widened.batch_approval.scope_size = 4
    with pytest.raises(Refused, match=r"not one of those|signed by 0"):
        approve(widened)


def test_a_few_an_hour_pass_unbatched_and_a_reboot_gives_none_back():
    bare = messages.Command(body=messages.CommandBody(kind="node.reboot").SerializeToString())
    with pytest.raises(Refused, match="0 of 0 unbatched"):
        approve(bare)
    held = approvers(*KEYS[:3], per_hour=2)
    used = Unbatched("boot", (2 * HOUR_MS - 1,))
    assert approve(bare, held=held, unbatched=used) is Approval.UNBATCHED
    twice = used.ran(now_ms=2 * HOUR_MS)
    with pytest.raises(Refused, match="2 of 2 unbatched"):
        approve(bare, held=held, unbatched=twice)
    assert approve(bare, held=held, unbatched=Unbatched("boot", (HOUR_MS, HOUR_MS - 1))) is Approval.UNBATCHED
    rebooted = twice.after_boot("next")
    assert len(rebooted.recent(now_ms=HOUR_MS - 1)) == 2
    assert not rebooted.recent(now_ms=HOUR_MS)
    assert twice.after_boot("boot") is twice
