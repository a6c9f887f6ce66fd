"""The quorum over destructive commands: approver sets, approvals of batches, and what passes without one.

Approvers are operators with keys of their own. A daemon holds one approver set, takes another only from the set that
it holds, and runs a destructive command only as a leaf of a batch that enough approvers signed, or within the few per
hour that the set lets pass unbatched. Neither the gateway nor the control plane can add to either. See
docs/security.md, "Approvers"; decisions 0120.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_der_public_key

from bettercompute.errors import Refused
from bettercompute.pki import certificates, signatures
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import (
    approver_set_content,
    approver_set_signing_input,
    batch_approval_input,
    part,
    sha256,
)
from bettercompute.protocol.kinds import CommandKind
from bettercompute.protocol.statuses import Reason, refuse

APPROVERS_MAX = 16  # every verifier checks each signature against each key: 16 people are a large set
EPOCH_STEP_MAX = 1_000  # one signed mistake must not use up the epochs for ever
BATCH_COMMANDS_MAX = 1 << 20
PATH_MAX = BATCH_COMMANDS_MAX.bit_length() - 1
HOUR_MS = 60 * 60 * 1000
UNBATCHED_PER_HOUR_MAX = 1_000

_LEAF, _NODE = b"\x00", b"\x01"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApproverSet:
    """Who may approve, how many must, for which tiers, and how many commands an hour pass without."""

    epoch: int
    keys: tuple[bytes, ...]
    """SubjectPublicKeyInfo in DER, sorted and distinct; none: there is no quorum."""
    threshold: int
    tiers: tuple[int, ...]
    """Numbers of DestructiveTier, sorted: also ones that this release has no name for."""
    unbatched_per_hour: int = 0

    @property
    def sha256(self) -> bytes:
        """What Hello and StatusReport tell of the set; empty without keys."""
        return sha256(self._content()) if self.keys else b""

    def signing_input(self, *, trust_domain: str) -> bytes:
        """What the approvers of the set before this one sign."""
        return approver_set_signing_input(epoch=self.epoch, content=self._content(), trust_domain=trust_domain)

    def _content(self) -> bytes:
        return approver_set_content(
            approver_keys=self.keys,
            approver_threshold=self.threshold,
            quorum_tiers=self.tiers,
            unbatched_destructive_per_hour=self.unbatched_per_hour,
        )


NO_APPROVERS = ApproverSet(epoch=0, keys=(), threshold=0, tiers=())
"""The set of an installation that never set approvers: nothing needs an approval, and anybody may found the first."""


def approver_set_of(bundle: messages.TrustBundle) -> ApproverSet:
    """Return the bundle's approver set; refuse one that no daemon could use, naming the field."""
    if not bundle.approver_keys:
        others = bundle.approver_threshold or bundle.quorum_tiers or bundle.unbatched_destructive_per_hour
        if others:
            raise _bad_set("a threshold, tiers or an hourly limit without approver keys")
        return ApproverSet(epoch=bundle.approver_set_epoch, keys=(), threshold=0, tiers=())
    return make_approver_set(
        bundle.approver_keys,
        epoch=bundle.approver_set_epoch,
        threshold=bundle.approver_threshold,
        tiers=bundle.quorum_tiers,
        unbatched_per_hour=bundle.unbatched_destructive_per_hour,
    )


def make_approver_set(
    keys: Iterable[bytes], *, epoch: int, threshold: int, tiers: Iterable[int], unbatched_per_hour: int = 0
) -> ApproverSet:
    """Return a set with at least one approver, in its canonical order; refuse one out of its bounds."""
    distinct = tuple(sorted(set(keys)))
    if not 1 <= len(distinct) <= APPROVERS_MAX:
        raise _bad_set(f"{len(distinct)} keys: a set has 1 to {APPROVERS_MAX}")
    for spki in distinct:
        approver_key(spki)
    if not 1 <= threshold <= len(distinct):
        raise _bad_set(f"a threshold of {threshold}: with {len(distinct)} approvers it is 1 to {len(distinct)}")
    if not 0 <= unbatched_per_hour <= UNBATCHED_PER_HOUR_MAX:
        raise _bad_set(f"{unbatched_per_hour} unbatched an hour: it is 0 to {UNBATCHED_PER_HOUR_MAX}")
    if epoch < 1:
        raise _bad_set("epoch 0 is that of an installation without approvers: the first set has epoch 1")
    return ApproverSet(
        epoch=epoch,
        keys=distinct,
        threshold=threshold,
        tiers=tuple(sorted(set(tiers))),
        unbatched_per_hour=unbatched_per_hour,
    )


def approver_key(spki: bytes) -> ec.EllipticCurvePublicKey:
    """Parse an approver's SubjectPublicKeyInfo (DER); refuse what is not on P-256."""
    try:
        key = load_der_public_key(spki)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise _bad_set("a key is no SubjectPublicKeyInfo in DER") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not certificates.is_p256(key):
        raise _bad_set("a key is not on P-256")
    return key


class SetChange(StrEnum):
    """What a daemon does with the approver set of a newer bundle; the rest of the bundle is taken in every case."""

    SAME = "same"
    TAKE = "take"
    NOT_SIGNED = "not-signed"
    EPOCH_BEHIND = "epoch-behind"
    EPOCH_TOO_FAR = "epoch-too-far"


def judge_set(
    held: ApproverSet, offered: ApproverSet, given: Sequence[messages.Signature], *, trust_domain: str
) -> SetChange:
    """Return what to do with an offered set: the threshold of the *held* keys must have signed it for a higher epoch,
    also where nothing but the epoch differs.
    """
    if offered == held:
        return SetChange.SAME
    if offered.epoch <= held.epoch:
        return SetChange.EPOCH_BEHIND
    if offered.epoch > held.epoch + EPOCH_STEP_MAX:
        return SetChange.EPOCH_TOO_FAR
    if (
        held.keys
        and approvers_who_signed(held, given, offered.signing_input(trust_domain=trust_domain)) < held.threshold
    ):
        return SetChange.NOT_SIGNED
    return SetChange.TAKE


def approvers_who_signed(approvers: ApproverSet, given: Sequence[messages.Signature], signing_input: bytes) -> int:
    """Count the different keys of the set that signed; what does not verify counts for nothing.

    A key counts once however often it signed: each has the twin (r, n - s) of its own signature to offer.
    """
    keys = {certificates.spki_sha256(key): key for key in map(approver_key, approvers.keys)}
    signed: set[str] = set()
    # More signatures than approvers can only be noise, and each costs a verification.
    for signature in given[: 2 * APPROVERS_MAX]:
        key = keys.get(signature.kid)
        if key is None or signature.kid in signed:
            continue
        try:
            signatures.verify(signature, key, signing_input)
        except Refused:
            continue
        signed.add(signature.kid)
    return len(signed)


# Batches: a Merkle tree in the form of RFC 6962, one leaf a command


def batch_leaf(*, command_id: str, node_id: str, kind: str, body: bytes) -> bytes:
    """Return the hash that stands for one command of a batch."""
    content = b"".join((part(command_id.encode()), part(node_id.encode()), part(kind.encode()), sha256(body)))
    return hashlib.sha256(_LEAF + content).digest()


def scope_root(leaves: Sequence[bytes]) -> bytes:
    """Return the root over the leaves of a batch, in its order."""
    return _levels(leaves)[-1][0]


def batch_proofs(leaves: Sequence[bytes]) -> list[messages.BatchProof]:
    """Return, for each leaf, the hashes beside its way to the root."""
    levels = _levels(leaves)
    return [
        messages.BatchProof(
            leaf_index=index,
            path=[
                level[beside]
                for height, level in enumerate(levels[:-1])
                if (beside := (index >> height) ^ 1) < len(level)
            ],
        )
        for index in range(len(leaves))
    ]


def _levels(leaves: Sequence[bytes]) -> list[list[bytes]]:
    """Return the tree from its leaves up. A node without a neighbour rises as it is, which yields RFC 6962's shape: the
    left part always has the largest power of two that fits.
    """
    if not 1 <= len(leaves) <= BATCH_COMMANDS_MAX:
        raise refuse(Reason.BAD_REQUEST, f"a batch of {len(leaves)} commands: it has 1 to {BATCH_COMMANDS_MAX}")
    levels = [list(leaves)]
    while len(levels[-1]) > 1:
        below = levels[-1]
        paired = [_parent(left, right) for left, right in zip(below[::2], below[1::2], strict=False)]
        levels.append([*paired, below[-1]] if len(below) % 2 else paired)
    return levels


def _parent(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(_NODE + left + right).digest()


def proves(leaf: bytes, proof: messages.BatchProof, *, root: bytes, size: int) -> bool:
    """Say whether `leaf` stands at the proof's place in the tree of that size and root (RFC 9162, 2.1.3.2)."""
    index, last = proof.leaf_index, size - 1
    if not 0 <= index <= last < BATCH_COMMANDS_MAX or len(proof.path) > PATH_MAX:
        return False
    reached = leaf
    for beside in proof.path:
        if last == 0:
            return False
        if index % 2 or index == last:
            reached = _parent(beside, reached)
            while index % 2 == 0 and index:
                index, last = index >> 1, last >> 1
        else:
            reached = _parent(reached, beside)
        index, last = index >> 1, last >> 1
    return last == 0 and reached == root


# What a daemon makes of a destructive command


@dataclass(frozen=True, slots=True)
class Unbatched:
    """The destructive commands that a node ran without an approval: when, by a clock that counts suspended time."""

    boot_id: str
    at_ms: tuple[int, ...] = ()

    def after_boot(self, boot_id: str) -> Unbatched:
        """Return what is left of it in a later boot, whose clock starts at 0: how long the machine was off is not
        known, so each counts from the boot on, for a whole hour.
        """
        return self if boot_id == self.boot_id else Unbatched(boot_id, (0,) * len(self.at_ms))

    def ran(self, *, now_ms: int) -> Unbatched:
        """Return it with one more; those of more than an hour ago are dropped."""
        return Unbatched(self.boot_id, (*self.recent(now_ms=now_ms), now_ms))

    def recent(self, *, now_ms: int) -> tuple[int, ...]:
        """Return those of the last hour."""
        return tuple(at_ms for at_ms in self.at_ms if at_ms > now_ms - HOUR_MS)


class Approval(StrEnum):
    """On what grounds a command may run."""

    NOT_NEEDED = "not-needed"
    BATCH = "batch"
    UNBATCHED = "unbatched"
    """One of the few an hour: the caller records it, durably, before the command starts."""


def judge_approval(
    command: messages.Command,
    body: messages.CommandBody,
    kind: CommandKind,
    *,
    approvers: ApproverSet,
    trust_domain: str,
    unbatched: Unbatched,
    server_time_ms: int,
    monotonic_ms: int,
) -> Approval:
    """Return on what grounds the command may run; a refusal says what is missing.

    `monotonic_ms` counts suspended time and belongs to `unbatched.boot_id`.
    """
    if not approvers.keys or not kind.destructive or int(kind.destructive_tier) not in approvers.tiers:
        return Approval.NOT_NEEDED
    if not command.HasField("batch_approval"):
        used = len(unbatched.recent(now_ms=monotonic_ms))
        if used < approvers.unbatched_per_hour:
            return Approval.UNBATCHED
        raise _not_approved(
            f"{kind.name} is destructive and comes without a batch approval; {used} of "
            f"{approvers.unbatched_per_hour} unbatched ones an hour are used: have {approvers.threshold} approvers "
            "sign the batch (`better-compute approve`)"
        )
    approval = command.batch_approval
    if server_time_ms >= approval.not_after_ms:
        raise _not_approved(f"the approval of batch {approval.batch_id!r} ended at {approval.not_after_ms} ms")
    leaf = batch_leaf(command_id=body.command_id, node_id=body.node_id, kind=body.kind, body=command.body)
    if not proves(leaf, command.batch_proof, root=approval.scope_root, size=approval.scope_size):
        raise _not_approved(f"the command is not one of those that batch {approval.batch_id!r} was approved for")
    signing_input = batch_approval_input(approval, trust_domain=trust_domain)
    signed = approvers_who_signed(approvers, approval.signatures, signing_input)
    if signed < approvers.threshold:
        raise _not_approved(
            f"batch {approval.batch_id!r} is signed by {signed} approvers of this node's set (epoch "
            f"{approvers.epoch}); it takes {approvers.threshold}"
        )
    return Approval.BATCH


def _not_approved(why: str) -> Refused:
    return refuse(Reason.ACCESS_DENIED, why)


def _bad_set(why: str) -> Refused:
    return refuse(Reason.BAD_REQUEST, f"the approver set is refused: {why}")
