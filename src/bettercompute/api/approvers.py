"""`/v1/approvers`: who may approve destructive batches, and how that set changes.

Approvers' keys never come here, only what they signed. The first set is taken as it is proposed; every later one takes
the signatures of the threshold of the set in force. See docs/security.md, "Approvers"; decisions 0131.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

from cryptography.hazmat.primitives.asymmetric import ec
from fastapi import APIRouter, Depends
from google.protobuf.message import DecodeError
from pydantic import BaseModel, Field

from bettercompute.api.auth import Principal, Role, require
from bettercompute.api.context import ApiContext, Context
from bettercompute.api.shapes import rfc3339
from bettercompute.api.storable import Body, Text
from bettercompute.errors import Refused
from bettercompute.pki import certificates, quorum, signatures
from bettercompute.pki.quorum import APPROVERS_MAX, UNBATCHED_PER_HOUR_MAX, ApproverSet
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import approvers as stored
from bettercompute.store import trust as stored_trust
from bettercompute.store.approvers import StoredSet
from bettercompute.store.database import Transaction

SIGNATURE_CHARACTERS_MAX = 1024

Base64 = Annotated[str, Field(max_length=SIGNATURE_CHARACTERS_MAX)]

router = APIRouter(prefix="/v1/approvers", tags=["approvers"])


class ApproverShape(BaseModel):
    """One approver: the name that people use, and the key."""

    name: Text = ""
    public_key: Base64
    """SubjectPublicKeyInfo in DER, base64."""
    kid: str = ""
    """The SHA-256 of it, in hex; told, never asked."""


class SetShape(BaseModel):
    """An approver set with those who signed it."""

    epoch: int
    state: str
    approvers: list[ApproverShape]
    threshold: int
    tiers: list[int]
    unbatched_per_hour: int
    sha256: str
    signed_by: list[str]
    """Key ids of those whose signatures it carries."""
    signatures_missing: int
    """Of the set in force, before this one replaces it."""
    proposed_by: str
    proposed_at: str | None
    why: str


class ApproversShape(BaseModel):
    """The set in force, the one that is proposed, and the ones before, newest first."""

    trust_domain: str
    current: SetShape | None
    proposed: SetShape | None
    replaced: list[SetShape]


class ProposeRequest(Body):
    """The whole new set. Without approvers: the quorum is given up."""

    approvers: Annotated[list[ApproverShape], Field(max_length=APPROVERS_MAX)]
    threshold: Annotated[int, Field(ge=0, le=APPROVERS_MAX)]
    tiers: Annotated[list[Annotated[int, Field(ge=1, le=100)]], Field(max_length=16)]
    unbatched_per_hour: Annotated[int, Field(ge=0, le=UNBATCHED_PER_HOUR_MAX)] = 0
    why: Text = ""


class SignRequest(Body):
    """A serialized Signature over the set, purpose `approver-set`, in base64."""

    epoch: Annotated[int, Field(ge=1)]
    signature: Base64


@router.get("")
async def get_approvers(context: Context, _: Annotated[Principal, Depends(require(Role.VIEWER))]) -> ApproversShape:
    """Return the approver sets."""
    return await _shown(context)


@router.post("/proposal", status_code=201)
async def propose(
    request: ProposeRequest, context: Context, caller: Annotated[Principal, Depends(require(Role.ADMIN))]
) -> ApproversShape:
    """Propose a set. Where none is in force it is at once; else the approvers in force have to sign it."""
    keys = {_bytes(approver.public_key): approver.name for approver in request.approvers}
    async with context.database.transaction() as transaction:
        await stored_trust.lock(transaction)
        if await stored.proposed(transaction) is not None:
            raise refuse(Reason.CONFLICT, "a set is proposed already: have it signed, or withdraw it")
        held = await stored.current(transaction)
        epoch = await stored.next_epoch(transaction)
        approvers = _new_set(request, keys=list(keys), epoch=epoch)
        if held is None and not approvers.keys:
            raise refuse(Reason.CONFLICT, "there is no approver set to give up")
        names = {certificates.spki_sha256(quorum.approver_key(spki)): name for spki, name in keys.items() if name}
        await stored.propose(transaction, approvers, names=names, proposed_by=caller.name, why=request.why)
        if held is None or not held.approvers.keys:
            await _put_in_force(context, transaction, epoch=epoch)
        await context.record(
            transaction,
            actor=caller.name,
            action="approvers.propose",
            target=f"approvers/{epoch}",
            why=request.why,
            details={"approvers": sorted(names.values()), "threshold": approvers.threshold},
        )
    return await _shown(context)


@router.post("/signatures", status_code=201)
async def sign(
    request: SignRequest, context: Context, caller: Annotated[Principal, Depends(require(Role.OPERATOR))]
) -> ApproversShape:
    """Add an approver's signature; with enough of those in force the proposed set replaces theirs.

    The set in force takes signatures, too, of approvers of sets before it: a node that was away while the set changed
    twice takes the present one by the word of those whom it knows.
    """
    async with context.database.transaction() as transaction:
        await stored_trust.lock(transaction)
        signature = read_signature(request.signature)
        sets = await stored.sets(transaction)
        target = next((one for one in sets if one.approvers.epoch == request.epoch), None)
        if target is None or target.state not in {stored.PROPOSED, stored.CURRENT}:
            raise refuse(Reason.NOT_FOUND, f"no set of epoch {request.epoch} is proposed or in force")
        others = [one for one in sets if one.approvers.epoch < request.epoch]
        if target.state == stored.PROPOSED:
            others = [one for one in others if one.state == stored.CURRENT]
        _check_signature(signature, target, by=others, trust_domain=context.trust_domain)
        encoded = signature.SerializeToString(deterministic=True)
        await stored.sign(transaction, epoch=request.epoch, signature=encoded)
        if target.state == stored.CURRENT:
            await context.trust.publish(transaction)
        else:
            given = [*map(messages.Signature.FromString, target.signatures), signature]
            held = others[0].approvers
            signing_input = target.approvers.signing_input(trust_domain=context.trust_domain)
            if quorum.approvers_who_signed(held, given, signing_input) >= held.threshold:
                await _put_in_force(context, transaction, epoch=request.epoch)
        await context.record(
            transaction,
            actor=caller.name,
            action="approvers.sign",
            target=f"approvers/{request.epoch}",
            details={"kid": signature.kid},
        )
    return await _shown(context)


@router.delete("/proposal")
async def withdraw(context: Context, caller: Annotated[Principal, Depends(require(Role.ADMIN))]) -> ApproversShape:
    """Give up the proposal."""
    async with context.database.transaction() as transaction:
        await stored_trust.lock(transaction)
        found = await stored.proposed(transaction)
        if found is None:
            raise refuse(Reason.NOT_FOUND, "no approver set is proposed")
        epoch = found.approvers.epoch
        await stored.withdraw(transaction, epoch=epoch)
        await context.record(transaction, actor=caller.name, action="approvers.withdraw", target=f"approvers/{epoch}")
    return await _shown(context)


async def _put_in_force(context: ApiContext, transaction: Transaction, *, epoch: int) -> None:
    await stored.put_in_force(transaction, epoch=epoch)
    await context.trust.publish(transaction)


def _new_set(request: ProposeRequest, *, keys: list[bytes], epoch: int) -> ApproverSet:
    if keys:
        return quorum.make_approver_set(
            keys,
            epoch=epoch,
            threshold=request.threshold,
            tiers=request.tiers,
            unbatched_per_hour=request.unbatched_per_hour,
        )
    if request.threshold or request.tiers or request.unbatched_per_hour:
        raise refuse(Reason.BAD_REQUEST, "a threshold, tiers or an hourly limit without approvers mean nothing")
    return ApproverSet(epoch=epoch, keys=(), threshold=0, tiers=())


def _check_signature(
    signature: messages.Signature, target: StoredSet, *, by: list[StoredSet], trust_domain: str
) -> None:
    """Refuse a signature that is not of an approver of one of the sets `by`, or that is there already."""
    if any(messages.Signature.FromString(given).kid == signature.kid for given in target.signatures):
        raise refuse(Reason.CONFLICT, "this approver has signed it already")
    if len(target.signatures) >= APPROVERS_MAX:
        raise refuse(Reason.CONFLICT, f"a set carries at most {APPROVERS_MAX} signatures")
    for one in by:
        for spki in one.approvers.keys:
            key = quorum.approver_key(spki)
            if certificates.spki_sha256(key) == signature.kid:
                signing_input = target.approvers.signing_input(trust_domain=trust_domain)
                return verified(signature, key=key, signing_input=signing_input)
    raise refuse(Reason.ACCESS_DENIED, "this key is not of an approver whose word counts for this set")


def read_signature(text: str) -> messages.Signature:
    """Return the Signature in a base64 text; refuse BAD_REQUEST what is none. Of a chain nothing is kept."""
    try:
        found = messages.Signature.FromString(_bytes(text))
    except DecodeError as error:
        raise refuse(Reason.BAD_REQUEST, "the signature does not decode") from error
    return messages.Signature(value=found.value, kid=found.kid)


def verified(signature: messages.Signature, *, key: ec.EllipticCurvePublicKey, signing_input: bytes) -> None:
    """Refuse ACCESS_DENIED a signature that does not verify: whoever sent it has signed something else."""
    try:
        signatures.verify(signature, key, signing_input)
    except Refused as refused:
        raise refuse(Reason.ACCESS_DENIED, refused.message) from refused


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise refuse(Reason.BAD_REQUEST, "this is not base64") from error


async def _shown(context: ApiContext) -> ApproversShape:
    sets = await stored.sets(context.database)
    current = next((one for one in sets if one.state == stored.CURRENT), None)
    proposed = next((one for one in sets if one.state == stored.PROPOSED), None)
    domain = context.trust_domain
    return ApproversShape(
        trust_domain=domain,
        current=None if current is None else _shape(current, missing=0),
        proposed=None if proposed is None else _shape(proposed, missing=_missing(proposed, current, domain)),
        replaced=[_shape(one, missing=0) for one in sets if one.state not in {stored.CURRENT, stored.PROPOSED}],
    )


def _missing(proposed: StoredSet, current: StoredSet | None, trust_domain: str) -> int:
    if current is None:
        return 0
    given = [messages.Signature.FromString(signature) for signature in proposed.signatures]
    signing_input = proposed.approvers.signing_input(trust_domain=trust_domain)
    return current.approvers.threshold - quorum.approvers_who_signed(current.approvers, given, signing_input)


def _shape(one: StoredSet, *, missing: int) -> SetShape:
    approvers = one.approvers
    kids = {spki: certificates.spki_sha256(quorum.approver_key(spki)) for spki in approvers.keys}
    return SetShape(
        epoch=approvers.epoch,
        state=one.state,
        approvers=[
            ApproverShape(name=one.names.get(kid, ""), public_key=base64.b64encode(spki).decode(), kid=kid)
            for spki, kid in kids.items()
        ],
        threshold=approvers.threshold,
        tiers=list(approvers.tiers),
        unbatched_per_hour=approvers.unbatched_per_hour,
        sha256=approvers.sha256.hex(),
        signed_by=[messages.Signature.FromString(signature).kid for signature in one.signatures],
        signatures_missing=max(0, missing),
        proposed_by=one.proposed_by,
        proposed_at=rfc3339(one.proposed_at_ms),
        why=one.why,
    )
