"""What signatures cover (docs/protocol.md, "Signed envelopes").

    input = "bettercompute.v1/" || purpose || 0x00 || part_1 || ... || part_n,    part = uint32_be(len(bytes)) || bytes

The purpose separates domains: a signature made for one is worth nothing for another. Bodies are signed as the bytes
they travel as, so nobody re-encodes to verify. Each purpose has a builder that fixes its parts, their order and their
types. Ids are UTF-8; counts and states big-endian 32 bits; times milliseconds in big-endian 64 bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from enum import StrEnum

from bettercompute.protocol import messages
from bettercompute.protocol.frames import ProtocolError

PREFIX = b"bettercompute.v1/"


class Purpose(StrEnum):
    """What a signature is for."""

    COMMAND = "command"
    DESIRED_STATE = "desired-state"
    JOIN_RESPONSE = "join-response"
    TRUST_BUNDLE = "trust-bundle"
    ATTESTED_REPORT = "attested-report"
    COMMAND_UPDATE = "command-update"
    SECRET_REQUEST = "secret-request"  # noqa: S105 - a purpose, no secret
    WORKLOAD_TOKEN = "workload-token"  # noqa: S105 - as above
    RENEW_POP = "renew-pop"
    X509POP = "x509pop"
    DISCOVERY_ASSERTION = "discovery-assertion"
    BATCH_APPROVAL = "batch-approval"
    APPROVER_SET = "approver-set"


def signing_input(purpose: Purpose, *parts: bytes) -> bytes:
    """Return the bytes that a signature of this purpose covers. The builders below call it with the right parts."""
    return b"".join((PREFIX, purpose.encode("ascii"), b"\x00", *map(part, parts)))


def part(content: bytes) -> bytes:
    """Return one part: its length, then its bytes, so that parts cannot be cut in another way."""
    return uint32_be(len(content)) + content


def uint32_be(number: int) -> bytes:
    """Return a count or a state in 4 bytes.

    Raises:
        ProtocolError: the number, which may come from the peer, does not fit.
    """
    return _unsigned(number, size_bytes=4)


def uint64_be(number: int) -> bytes:
    """Return an epoch in 8 bytes.

    Raises:
        ProtocolError: the number, which may come from the peer, does not fit.
    """
    return _unsigned(number, size_bytes=8)


def timestamp(time_ms: int) -> bytes:
    """Return Unix milliseconds in 8 bytes.

    Raises:
        ProtocolError: the time, which may come from the peer, is before 1970.
    """
    return uint64_be(time_ms)


def _unsigned(number: int, *, size_bytes: int) -> bytes:
    try:
        return number.to_bytes(size_bytes, "big")
    except OverflowError as error:
        raise ProtocolError(f"{number} cannot be signed: it must be from 0 to {2 ** (8 * size_bytes) - 1}") from error


def sha256(content: bytes) -> bytes:
    """Return the SHA-256 that stands for long content in a part."""
    return hashlib.sha256(content).digest()


def command_input(body: bytes) -> bytes:
    """Cover Command.body; signed by a worker key."""
    return signing_input(Purpose.COMMAND, body)


def desired_state_input(body: bytes) -> bytes:
    """Cover DesiredState.body; signed by a worker key."""
    return signing_input(Purpose.DESIRED_STATE, body)


def join_response_input(body: bytes) -> bytes:
    """Cover JoinResponse.body or RenewResponse.body; signed by the join-signing key."""
    return signing_input(Purpose.JOIN_RESPONSE, body)


def trust_bundle_input(body: bytes) -> bytes:
    """Cover SignedTrustBundle.body; signed by the join-signing key."""
    return signing_input(Purpose.TRUST_BUNDLE, body)


def attested_report_input(body: bytes) -> bytes:
    """Cover AttestedReport.body; signed by the node key."""
    return signing_input(Purpose.ATTESTED_REPORT, body)


def discovery_assertion_input(body: bytes) -> bytes:
    """Cover SignedDiscoveryAssertion.body; signed by the site agent's node key."""
    return signing_input(Purpose.DISCOVERY_ASSERTION, body)


def command_update_input(*, command_id: str, state: int, result: bytes) -> bytes:
    """Cover a terminal CommandUpdate: which command, how it ended, and exactly this result; signed by the node key."""
    return signing_input(Purpose.COMMAND_UPDATE, command_id.encode(), uint32_be(state), sha256(result))


def secret_request_input(request: messages.SecretRequest) -> bytes:
    """Cover every field of a SecretRequest but the signature; signed by the node key."""
    return signing_input(
        Purpose.SECRET_REQUEST,
        request.request_id.encode(),
        request.ref.encode(),
        request.workflow_id.encode(),
        request.step_id.encode(),
        request.allocation_id.encode(),
        request.epk,
    )


def workload_token_input(request: messages.WorkloadTokenRequest) -> bytes:
    """Cover every field of a WorkloadTokenRequest but the signature; signed by the node key."""
    return signing_input(
        Purpose.WORKLOAD_TOKEN,
        request.request_id.encode(),
        request.instance_id.encode(),
        request.audience.encode(),
        request.epk,
    )


def renew_pop_input(*, csr: bytes, node_id: str, client_time_ms: int) -> bytes:
    """Cover a RenewRequest; signed by the current node key."""
    return signing_input(Purpose.RENEW_POP, sha256(csr), node_id.encode(), timestamp(client_time_ms))


def x509pop_input(*, csr: bytes, node_id: str, client_time_ms: int) -> bytes:
    """Cover a re-join with X509PopEvidence; signed by the key of a possibly expired certificate."""
    return signing_input(Purpose.X509POP, sha256(csr), node_id.encode(), timestamp(client_time_ms))


def batch_approval_input(approval: messages.BatchApproval, *, trust_domain: str) -> bytes:
    """Cover a BatchApproval; signed by approvers. The verifier's own configuration gives the trust domain."""
    return signing_input(
        Purpose.BATCH_APPROVAL,
        approval.batch_id.encode(),
        approval.scope_root,
        uint32_be(approval.scope_size),
        timestamp(approval.not_after_ms),
        trust_domain.encode(),
    )


def approver_set_content(
    *,
    approver_keys: Iterable[bytes],
    approver_threshold: int,
    quorum_tiers: Iterable[int],
    unbatched_destructive_per_hour: int,
) -> bytes:
    """Return the approver set as bytes: parts of the sorted keys, the threshold, the sorted tiers and the hourly limit.

    Keys are SubjectPublicKeyInfo in DER. The order in which a bundle lists keys and tiers does not matter.

    Raises:
        ProtocolError: a key so short that its part could be taken for a number's.
    """
    keys = sorted(set(approver_keys))
    for key in keys:
        if len(key) <= len(uint32_be(0)):
            raise ProtocolError(f"an approver key of {len(key)} bytes is no SubjectPublicKeyInfo")
    numbers = (approver_threshold, *sorted(set(quorum_tiers)), unbatched_destructive_per_hour)
    return b"".join(map(part, (*keys, *map(uint32_be, numbers))))


def approver_set_sha256(bundle: messages.TrustBundle) -> bytes:
    """Return the digest of a bundle's approver set, as Hello and StatusReport tell it; empty without approver keys."""
    if not bundle.approver_keys:
        return b""
    return sha256(_bundle_set_content(bundle))


def approver_set_input(bundle: messages.TrustBundle, *, trust_domain: str) -> bytes:
    """Cover the bundle's approver set at its epoch; signed by the approvers of the set before it."""
    content = _bundle_set_content(bundle)
    return approver_set_signing_input(epoch=bundle.approver_set_epoch, content=content, trust_domain=trust_domain)


def approver_set_signing_input(*, epoch: int, content: bytes, trust_domain: str) -> bytes:
    """Cover an approver set, given as `approver_set_content`, at its epoch."""
    return signing_input(Purpose.APPROVER_SET, uint64_be(epoch), sha256(content), trust_domain.encode())


def _bundle_set_content(bundle: messages.TrustBundle) -> bytes:
    return approver_set_content(
        approver_keys=bundle.approver_keys,
        approver_threshold=bundle.approver_threshold,
        quorum_tiers=bundle.quorum_tiers,
        unbatched_destructive_per_hour=bundle.unbatched_destructive_per_hour,
    )
