"""What else a gateway relays, each field of it altered: desired states, bundles, answers to Join and Renew, approvals.

Nothing that was altered, stripped, swapped with another node's, or is older than what is held, is taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.daemon.desired import DesiredState, SpecOwner
from bettercompute.daemon.identity import IdentityStore, Issued, PendingRequest, Purpose
from bettercompute.daemon.join_answer import verify_answer
from bettercompute.daemon.journal_records import Write
from bettercompute.delivery.desired_state import Verdict
from bettercompute.delivery.spec_generations import Circumstances, compose
from bettercompute.errors import Refused
from bettercompute.pki import certificates, quorum, signatures, trust
from bettercompute.pki.identity import NodeIdentity
from bettercompute.pki.quorum import Unbatched
from bettercompute.pki.trust import CommandRoot, Trust, TrustContent
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import batch_approval_input, join_response_input, trust_bundle_input
from bettercompute.protocol.kinds import KINDS
from tests.security.hostile import (
    FOREIGN_SIGNER,
    NARROW_SIGNER,
    ROOT,
    ROOTS,
    SIGNER,
    TRUST_DOMAIN,
    altered,
    body_of,
    signed,
)
from tests.unit.session.world_in_memory import NODE_ID, START_MS

JOIN_SIGNING = ec.derive_private_key(7, ec.SECP256R1())
STRANGER = ec.derive_private_key(8, ec.SECP256R1())


# Desired states


class Node:
    """The production keeper of a desired state, with nothing to bring about."""

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.held = DesiredState(
            SpecOwner(node_id=NODE_ID, trust_domain=TRUST_DOMAIN, floor_generation=0),
            kept=b"",
            write=self._write,
            raise_floor=self._raise_floor,
            sections={},
        )

    async def _write(self, write: Write) -> None:
        self.writes.append(write)

    async def _raise_floor(self, _: int) -> None: ...

    async def refuses(self, desired: messages.DesiredState) -> Verdict:
        before, writes = self.held.held, len(self.writes)
        self.held.forget_refusal()
        await self.held.take(desired, roots=ROOTS)
        assert (self.held.held, len(self.writes)) == (before, writes)
        assert self.held.refused is not None
        return self.held.refused[0]


def desired(generation: int, **changes: object) -> messages.DesiredState:
    spec = messages.NodeSpec(daemon=messages.DaemonSection(log_level="debug", status_interval_ms=1_000))
    made = compose(
        spec,
        before=None,
        of=Circumstances(node_id=NODE_ID, trust_domain=TRUST_DOMAIN, generation=generation, issued_at_ms=START_MS),
        signer=SIGNER,
    )
    body = messages.DesiredStateBody.FromString(made.body)
    for name, value in changes.items():
        setattr(body, name, value)
    data = body.SerializeToString()
    state = messages.DesiredState(body=data)
    state.signature.MergeFromString(SIGNER.sign_desired_state(data))
    return state


SPEC = desired(3)
SPEC_ALTERATIONS = list(altered(messages.DesiredStateBody.FromString(SPEC.body)))


@pytest.mark.parametrize("alteration", SPEC_ALTERATIONS, ids=lambda alteration: alteration.name)
async def test_an_altered_spec_is_refused(alteration) -> None:
    frame = messages.DesiredState(body=alteration.data, signature=SPEC.signature)
    assert await Node().refuses(frame) is Verdict.BAD_SIGNATURE


async def test_a_spec_by_nobody_or_for_somebody_else_is_refused():
    node = Node()
    unsigned = messages.DesiredState(body=SPEC.body)
    as_command = messages.DesiredState(body=SPEC.body)
    as_command.signature.MergeFromString(SIGNER.sign_command(SPEC.body))
    by_others = []
    for signer in (FOREIGN_SIGNER, NARROW_SIGNER):
        by_others.append(messages.DesiredState(body=SPEC.body))
        by_others[-1].signature.MergeFromString(signer.sign_desired_state(SPEC.body))
    for frame in (unsigned, as_command, *by_others):
        assert await node.refuses(frame) is Verdict.BAD_SIGNATURE
    assert await node.refuses(messages.DesiredState(body=b"\xff")) is Verdict.UNREADABLE
    assert await node.refuses(desired(3, node_id="node-2")) is Verdict.WRONG_NODE
    assert await node.refuses(desired(3, trust_domain="other.local")) is Verdict.WRONG_TRUST_DOMAIN
    assert await node.refuses(desired(0)) is Verdict.BAD_GENERATION
    assert await node.refuses(desired(2**64 - 1)) is Verdict.BAD_GENERATION


async def test_an_older_spec_is_not_brought_back():
    node = Node()
    await node.held.take(SPEC, roots=ROOTS)
    assert node.held.held.observed_generation == 3
    before = node.held.held
    for generation in (1, 2, 3):
        await node.held.take(desired(generation), roots=ROOTS)
        assert node.held.held == before
    assert len(node.writes) == 1
    node.held.applied_generation = 3
    assert await node.refuses(desired(2)) is Verdict.GENERATION_BEHIND


# Trust bundles


def content(**changes: object) -> TrustContent:
    fields: dict[str, object] = {
        "trust_domain": TRUST_DOMAIN,
        "command_roots": (CommandRoot(certificate=ROOT.certificate, allowed_kinds=("gpu.reset",), not_before_ms=5),),
        "join_signing_keys": (JOIN_SIGNING.public_key(),),
        "join_encryption_keys": (STRANGER.public_key(),),
        "serving_ca_pins": ("ab" * 32, "cd" * 32),
    }
    return TrustContent(**{**fields, **changes})  # type: ignore[arg-type]  # test data


def bundle(version: int, *, key: ec.EllipticCurvePrivateKey = JOIN_SIGNING, **changes: object) -> bytes:
    made = content(join_signing_keys=(key.public_key(),), **changes)
    return trust.sign(made, version=version, key=key, now_ms=START_MS).signed


HELD = trust.verify(bundle(5), pinned_keys=[JOIN_SIGNING.public_key()])


def accepted(signed_bundle: bytes) -> Trust | None:
    return trust.accept(signed_bundle, held=HELD, trust_domain=TRUST_DOMAIN, pinned_keys=HELD.content.join_signing_keys)


NEWER = messages.SignedTrustBundle.FromString(bundle(6))
BUNDLE_ALTERATIONS = list(altered(messages.TrustBundle.FromString(NEWER.body)))


@pytest.mark.parametrize("alteration", BUNDLE_ALTERATIONS, ids=lambda alteration: alteration.name)
def test_an_altered_bundle_is_refused(alteration) -> None:
    forged = messages.SignedTrustBundle(body=alteration.data, signature=NEWER.signature)
    with pytest.raises(Refused):
        accepted(forged.SerializeToString())


def test_a_bundle_is_taken_only_from_whom_the_held_one_pins_and_only_when_newer():
    taken = accepted(bundle(6))
    assert taken is not None
    assert taken.version == 6
    for version in (1, 4, 5):
        assert accepted(bundle(version)) is None
        assert accepted(bundle(version, command_roots=())) is None
    forged = {
        "unsigned": messages.SignedTrustBundle(body=NEWER.body).SerializeToString(),
        "by another key that it lists itself": bundle(6, key=STRANGER),
        "by a worker": _worker_signed(),
        "of another installation": bundle(6, trust_domain="other.local"),
        "of another purpose": messages.SignedTrustBundle(
            body=NEWER.body, signature=signatures.sign(JOIN_SIGNING, join_response_input(NEWER.body))
        ).SerializeToString(),
        "nothing": b"",
        "too large": bundle(6) + bytes(300_000),
    }
    for name, data in forged.items():
        _refused(name, partial(accepted, data))


def _worker_signed() -> bytes:
    made = messages.SignedTrustBundle(body=NEWER.body)
    made.signature.CopyFrom(signatures.sign(SIGNER.key, trust_bundle_input(NEWER.body), chain_der=SIGNER.chain_der))
    return made.SerializeToString()


@given(st.binary(max_size=60), st.integers(0, len(NEWER.SerializeToString())))
def test_any_bytes_are_the_signed_bundle_or_none(piece: bytes, at: int) -> None:
    data = NEWER.SerializeToString()
    try:
        taken = accepted(data[:at] + piece + data[at:])
    except Refused:
        return
    assert taken is not None
    assert messages.SignedTrustBundle.FromString(taken.signed).body == NEWER.body


# Answers to Join and Renew

NODE_CA = certificates.make_node_ca(serial=bytes(16), now_ms=START_MS)


@pytest.fixture(scope="module")
def request_of_node(tmp_path_factory) -> PendingRequest:
    return IdentityStore(tmp_path_factory.mktemp("node")).pending(Purpose.RENEW, label="1")


def answer_body(request: PendingRequest, *, version: int = 6) -> messages.JoinResponseBody:
    leaf = certificates.make_node_leaf(
        NODE_CA,
        public_key=request.key.public_key(),
        identity=NodeIdentity(trust_domain=TRUST_DOMAIN, site="default", node_id=NODE_ID, role="node"),
        serial=bytes(15) + b"\1",
        now_ms=START_MS,
    )
    return messages.JoinResponseBody(
        node_id=NODE_ID,
        site="default",
        trust_domain=TRUST_DOMAIN,
        certificate_chain=[leaf.public_bytes(Encoding.DER), NODE_CA.certificate.public_bytes(Encoding.DER)],
        trust=messages.SignedTrustBundle.FromString(bundle(version)),
        gateway_urls=["https://gw-1", "https://gw-2"],
        server_time_ms=START_MS,
        csr_sha256=hashlib.sha256(request.csr_der).digest(),
        identity_generation=1,
        role=messages.AGENT_ROLE_NODE,
    )


def answer(body: messages.JoinResponseBody, key: ec.EllipticCurvePrivateKey = JOIN_SIGNING) -> messages.RenewResponse:
    data = body.SerializeToString()
    return messages.RenewResponse(body=data, signature=signatures.sign(key, join_response_input(data)))


def judged(given_answer: messages.RenewResponse, request: PendingRequest) -> Issued:
    issued = verify_answer(given_answer, request, role="node", pinned_keys=HELD.content.join_signing_keys, held=HELD)
    assert isinstance(issued, Issued)
    return issued


def test_every_altered_answer_is_refused(request_of_node: PendingRequest):
    body = answer_body(request_of_node)
    true = answer(body)
    assert judged(true, request_of_node).trust.version == 6
    found = list(altered(body))
    assert {field.name for field in body.DESCRIPTOR.fields} - {"deferral"} <= {
        alteration.name.split()[0].split(".")[0] for alteration in found
    }
    for alteration in found:
        forged = messages.RenewResponse(body=alteration.data, signature=true.signature)
        _refused(alteration.name, partial(judged, forged, request_of_node))


def test_an_answer_of_another_node_time_or_key_is_refused(request_of_node: PendingRequest, tmp_path: Path):
    other = IdentityStore(tmp_path).pending(Purpose.RENEW, label="1")
    body = answer_body(request_of_node)
    swapped = answer(answer_body(other))
    elsewhere = answer_body(request_of_node)
    elsewhere.trust.ParseFromString(bundle(7, trust_domain="other.local"))
    unsigned = messages.RenewResponse(body=body.SerializeToString())
    for forged in (swapped, answer(body, STRANGER), unsigned, answer(elsewhere)):
        with pytest.raises(Refused):
            judged(forged, request_of_node)


def test_an_old_answer_brings_no_older_trust_back(request_of_node: PendingRequest):
    """The answer to this very request, kept by a relay while newer bundles came."""
    assert judged(answer(answer_body(request_of_node, version=2)), request_of_node).trust == HELD


# Approvals

APPROVERS = [ec.derive_private_key(number, ec.SECP256R1()) for number in (11, 12, 13)]
SET = quorum.make_approver_set(
    [key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) for key in APPROVERS],
    epoch=1,
    threshold=2,
    tiers=[messages.DESTRUCTIVE_TIER_NODE],
)
BATCH = [body_of(f"c-{number}").SerializeToString() for number in range(5)]
LEAVES = [
    quorum.batch_leaf(command_id=f"c-{number}", node_id=NODE_ID, kind="gpu.reset", body=body)
    for number, body in enumerate(BATCH)
]
PROOFS = quorum.batch_proofs(LEAVES)
APPROVAL = messages.BatchApproval(
    batch_id="b", scope_root=quorum.scope_root(LEAVES), scope_size=len(BATCH), not_after_ms=START_MS + 60_000
)
APPROVAL.signatures.extend(
    signatures.sign(key, batch_approval_input(APPROVAL, trust_domain=TRUST_DOMAIN)) for key in APPROVERS[:2]
)


def approved(index: int, approval: messages.BatchApproval, proof: messages.BatchProof) -> quorum.Approval:
    command = signed(BATCH[index])
    command.batch_approval.CopyFrom(approval)
    command.batch_proof.CopyFrom(proof)
    return quorum.judge_approval(
        command,
        messages.CommandBody.FromString(BATCH[index]),
        KINDS["gpu.reset"],
        approvers=SET,
        trust_domain=TRUST_DOMAIN,
        unbatched=Unbatched("boot-1"),
        server_time_ms=START_MS,
        monotonic_ms=0,
    )


@pytest.mark.parametrize("index", range(5))
def test_an_approval_is_good_for_each_command_of_its_batch_and_in_no_other_form(index: int) -> None:
    assert approved(index, APPROVAL, PROOFS[index]) is quorum.Approval.BATCH
    for alteration in altered(PROOFS[index]):
        _refused(alteration.name, partial(approved, index, APPROVAL, _proof(alteration.data)))
    for other in set(range(5)) - {index}:
        _refused(f"the proof of {other}", partial(approved, index, APPROVAL, PROOFS[other]))


def _proof(data: bytes) -> messages.BatchProof:
    return messages.BatchProof.FromString(data)


def test_an_altered_approval_approves_nothing():
    one = messages.BatchApproval()
    one.CopyFrom(APPROVAL)
    del one.signatures[1:]
    one.signatures.extend(one.signatures[:] * 4)
    _refused("one approver five times", lambda: approved(0, one, PROOFS[0]))
    for alteration in altered(APPROVAL):
        forged = messages.BatchApproval.FromString(alteration.data)
        if alteration.name in ("signatures doubled", "signatures reversed"):
            continue  # still two people
        _refused(alteration.name, partial(approved, 0, forged, PROOFS[0]))


def _refused(name: str, attempt: Callable[[], object]) -> None:
    try:
        attempt()
    except Refused:
        return
    pytest.fail(f"{name}: not refused")
