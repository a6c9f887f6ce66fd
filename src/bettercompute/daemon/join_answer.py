"""What a daemon believes of an answer to Join or Renew.

Only what a join-signing key that it pins has signed, for this very request: an identity, a wait, or a challenge. See
docs/security.md, "Joining"; decisions 0111 and 0145.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric import ec

from bettercompute.daemon.identity import Issued, PendingRequest
from bettercompute.errors import Refused
from bettercompute.pki import certificates, signatures, trust
from bettercompute.pki.identity import NodeIdentity, identity_of, role_of
from bettercompute.pki.join_token import check_gateway_url
from bettercompute.pki.trust import Trust
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import join_response_input
from bettercompute.protocol.frames import decode_message
from bettercompute.protocol.limits import (
    MAX_JOIN_BYTES,
    MAX_PUSHBACK_MS,
    MAX_SENTENCE_CHARS,
    MAX_TRUST_BUNDLE_BYTES,
)
from bettercompute.protocol.statuses import Reason, refuse

ANSWER_BYTES_MAX = MAX_TRUST_BUNDLE_BYTES + MAX_JOIN_BYTES  # a bundle, a chain and a few names
CHALLENGE_BYTES_MAX = 1024  # ours have 57; a later attestor's go back in a request of MAX_JOIN_BYTES
# "At once, again" without anything to answer would be a loop.
DEFERRAL_MIN_MS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred:
    """Not yet: ask again with the same request."""

    retry_after_ms: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenged:
    """Not yet: ask again with the same request and the answer to this."""

    challenge: bytes
    message: str


def verify_answer(
    answer: messages.JoinResponse | messages.RenewResponse,
    request: PendingRequest,
    *,
    role: str,
    pinned_keys: Sequence[ec.EllipticCurvePublicKey],
    held: Trust | None,
) -> Issued | Deferred | Challenged:
    """Return what the services said, if a pinned join-signing key signed it for this request; refuse anything else."""
    signatures.verify_pinned(answer.signature, pinned_keys, join_response_input(answer.body))
    body = decode_message(messages.JoinResponseBody, answer.body, limit=ANSWER_BYTES_MAX)
    if body.csr_sha256 != hashlib.sha256(request.csr_der).digest():
        raise _bad_answer("it answers another certificate request")
    if body.HasField("deferral"):
        return _deferred(body.deferral)
    node = _verified_node(body, request)
    if (node.role, role_of(body.role)) != (role, role):
        raise _bad_answer(f"it gives role {node.role}, and {role} was asked for")
    if not body.gateway_urls:
        raise _bad_answer("it names no gateway")
    return Issued(
        chain_der=tuple(body.certificate_chain),
        trust=_accepted_trust(body, pinned_keys=pinned_keys, held=held),
        identity_generation=body.identity_generation,
        gateway_urls=tuple(check_gateway_url(url) for url in body.gateway_urls),
        server_time_ms=body.server_time_ms,
    )


def _verified_node(body: messages.JoinResponseBody, request: PendingRequest) -> NodeIdentity:
    """Check that the certificate is for the key that asked, in time, and names what the answer names."""
    if not 1 <= len(body.certificate_chain) <= certificates.CHAIN_LENGTH_MAX:
        raise _bad_answer(f"its chain has {len(body.certificate_chain)} certificates")
    leaf, *above = [certificates.load_certificate(der) for der in body.certificate_chain]
    if leaf.public_key() != request.key.public_key():
        raise _bad_answer("its certificate is for another key")
    # By the answer's own time: this host may not have a clock yet.
    if not certificates.not_before_ms(leaf) <= body.server_time_ms <= certificates.not_after_ms(leaf):
        raise _bad_answer("its certificate is not valid at the server's time")
    certificates.verify_chain(
        body.certificate_chain[:-1] or body.certificate_chain,
        roots=above[-1:],
        use=certificates.Use.CLIENT,
        now_ms=body.server_time_ms,
    )
    node = identity_of(leaf)
    if (node.node_id, node.site, node.trust_domain) != (body.node_id, body.site, body.trust_domain):
        raise _bad_answer(f"its certificate is of {node.spiffe_id}, its body of another node")
    return node


def _accepted_trust(
    body: messages.JoinResponseBody, *, pinned_keys: Sequence[ec.EllipticCurvePublicKey], held: Trust | None
) -> Trust:
    """Return the answer's bundle, or the newer one that is held, if it is of the same installation."""
    offered = body.trust.SerializeToString(deterministic=True)
    if held is not None:
        try:
            trust.verify(held.signed, pinned_keys=pinned_keys)
        except Refused:
            held = None
    accepted = trust.accept(offered, held=held, trust_domain=body.trust_domain, pinned_keys=pinned_keys)
    if accepted is not None:
        return accepted
    assert held is not None, "without one held, every verified bundle is newer"
    return held


def _deferred(deferral: messages.JoinDeferral) -> Deferred | Challenged:
    message = (deferral.message or deferral.reason)[:MAX_SENTENCE_CHARS]
    if not deferral.challenge:
        wait_ms = max(deferral.retry_after_seconds * 1000, DEFERRAL_MIN_MS)
        return Deferred(retry_after_ms=min(wait_ms, MAX_PUSHBACK_MS), message=message)
    if len(deferral.challenge) > CHALLENGE_BYTES_MAX:
        raise _bad_answer(f"its challenge has {len(deferral.challenge)} bytes, and {CHALLENGE_BYTES_MAX} are the limit")
    return Challenged(challenge=deferral.challenge, message=message)


def _bad_answer(why: str) -> Refused:
    return refuse(Reason.BAD_PROOF, f"the answer to the join is refused: {why}")
