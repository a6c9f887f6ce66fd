"""Attested results: what a node's own key says of a command's end and of the node, and whether it says so.

A gateway relays results and could write others. For attested kinds the node signs which command it was, how it ended
and the exact result; with its status it signs a statement of its own. The control plane verifies both under the
certificates that it issued to the node, never by what a gateway says. See docs/security.md, "Attested results";
decisions 0142.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.message import DecodeError

from bettercompute.errors import Refused
from bettercompute.pki import certificates, possession, signatures
from bettercompute.pki.possession import Shown
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import attested_report_input, command_update_input

AHEAD_MAX_MS = 2 * 3_600_000
"""A node's confirmed time is ahead by an hour at most where its host's clock is right, whatever its gateways say."""


class Attestation(StrEnum):
    """What is known of who said it."""

    NONE = "none"
    """Nobody needs to have signed it."""
    EXPECTED = "expected"
    """Not ended yet, or not verified yet."""
    VERIFIED = "verified"
    """The node's key signed exactly this."""
    UNSIGNED = "unsigned"
    """No signature came with it: whoever relayed it may have made it up."""
    FORGED = "forged"
    """A signature came, and it is not the node's over this."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict and why, in words where it is not VERIFIED."""

    attestation: Attestation
    reason: str = ""


def public_keys(chains_pem: Sequence[bytes]) -> tuple[ec.EllipticCurvePublicKey, ...]:
    """Return the keys of a node's certificates (PEM, leaf first); what cannot be read certifies nothing."""
    found: list[ec.EllipticCurvePublicKey] = []
    for chain in chains_pem:
        try:
            key = certificates.load_certificate(certificates.chain_from_pem(chain)[0]).public_key()
        except Refused:
            continue
        if isinstance(key, ec.EllipticCurvePublicKey):
            found.append(key)
    return tuple(found)


def judge_update(
    *, command_id: str, state: int, result: bytes, signature: bytes, keys: Sequence[ec.EllipticCurvePublicKey]
) -> Judged:
    """Return whether the end of a command, as it is stored, is what the node signed."""
    if not signature:
        return Judged(Attestation.UNSIGNED, "no signature of the node came with it")
    covered = command_update_input(command_id=command_id, state=state, result=result)
    return _judge(signature, covered, keys)


def judge_report(
    report: messages.StatusReport,
    *,
    node_id: str,
    newest_ms: int,
    now_ms: int,
    keys: Sequence[ec.EllipticCurvePublicKey],
) -> Judged:
    """Return whether a status report carries the node's statement, newer than the newest one that verified.

    One from the future is not taken for the newest, or nothing that the node says until then would count.
    """
    if not report.HasField("attested"):
        return Judged(Attestation.UNSIGNED, "no statement of the node came with it")
    judged = _judge(report.attested.signature.SerializeToString(), attested_report_input(report.attested.body), keys)
    if judged.attestation is not Attestation.VERIFIED:
        return judged
    try:
        body = messages.AttestedReportBody.FromString(report.attested.body)
    except DecodeError:
        return Judged(Attestation.FORGED, "the statement does not decode")
    if body.node_id != node_id:
        return Judged(Attestation.FORGED, f"the statement is node {body.node_id[:64]!a}'s")
    if body.at_ms < newest_ms:
        return Judged(Attestation.FORGED, f"the statement is of {body.at_ms} ms, one of {newest_ms} ms is known")
    if body.at_ms > now_ms + AHEAD_MAX_MS:
        return Judged(Attestation.FORGED, f"the statement is of {body.at_ms} ms, and it is {now_ms} ms")
    return judged


def shown_by(
    signature: messages.Signature,
    covered: bytes,
    *,
    node_id: str,
    roots: Sequence[x509.Certificate],
    trust_domain: str,
    now_ms: int,
) -> Shown | None:
    """Return the certificate of the node's that came with a signature and made it; None: it does not hold.

    It may be one that a restore of the database has forgotten: whether it counts, the record decides.
    """
    if not signature.certificate_chain:
        return None
    try:
        found = possession.shown(
            list(signature.certificate_chain), roots=roots, trust_domain=trust_domain, now_ms=now_ms
        )
        possession.prove(found, covered, signature)
    except Refused:
        return None
    return found if found.identity.node_id == node_id else None


def _judge(signature: bytes, covered: bytes, keys: Sequence[ec.EllipticCurvePublicKey]) -> Judged:
    try:
        signatures.verify_pinned(messages.Signature.FromString(signature), keys, covered)
    except DecodeError:
        return Judged(Attestation.FORGED, "the signature does not decode")
    except Refused as refused:
        return Judged(Attestation.FORGED, refused.message)
    return Judged(Attestation.VERIFIED)
