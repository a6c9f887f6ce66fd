"""The discovery assertion: a site agent's signed word that it served a machine its boot script.

It names the machine's hardware address and the SHA-256 of the secret in that script; so the assertion may travel in
clear, and proves nothing without the secret. The signature carries the site agent's chain, and only an agent of role
`site` may assert, for its own site. See docs/security.md, "Attestors"; decisions 0149.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from bettercompute.errors import Refused
from bettercompute.pki import possession, signatures
from bettercompute.pki.identity import ROLE_SITE, NodeIdentity
from bettercompute.pki.possession import Shown
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import discovery_assertion_input
from bettercompute.protocol.frames import decode_message
from bettercompute.protocol.limits import MAX_JOIN_BYTES, SHA256_BYTES
from bettercompute.protocol.statuses import Reason, refuse

# A machine that has its script joins within minutes; a day later it is another boot.
LIFETIME_MS_MAX = 3_600_000
CLOCK_SKEW_MS = 60_000
_MAC_ADDRESS = re.compile(r"[0-9a-f]{2}(?::[0-9a-f]{2}){5}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovered:
    """An assertion that verifies: who says it, and of which machine."""

    shown: Shown
    """The site agent's certificate."""
    body: bytes
    mac_address: str
    uuid: str
    """Empty: the firmware did not tell it."""
    nonce_sha256: bytes
    not_after_ms: int

    @property
    def site_agent(self) -> NodeIdentity:
        """Return who says it."""
        return self.shown.identity


def sign_assertion(
    assertion: messages.site.DiscoveryAssertion, *, key: ec.EllipticCurvePrivateKey, chain_der: Sequence[bytes]
) -> bytes:
    """Sign an assertion by a site agent's key and return it serialized: the evidence of the attestor `discovery`."""
    body = assertion.SerializeToString(deterministic=True)
    signature = signatures.sign(key, discovery_assertion_input(body), chain_der=chain_der)
    return messages.site.SignedDiscoveryAssertion(body=body, signature=signature).SerializeToString(deterministic=True)


def verify_assertion(
    evidence: bytes, *, roots: Sequence[x509.Certificate], trust_domain: str, now_ms: int
) -> Discovered:
    """Verify an assertion under the node CA and return what it says; refuse and say what is wrong with it."""
    signed = decode_message(messages.site.SignedDiscoveryAssertion, evidence, limit=MAX_JOIN_BYTES)
    shown = possession.shown(
        list(signed.signature.certificate_chain), roots=roots, trust_domain=trust_domain, now_ms=now_ms
    )
    signatures.verify(signed.signature, shown.public_key, discovery_assertion_input(signed.body))
    agent = shown.identity
    if agent.role != ROLE_SITE:
        raise _refused(f"node {agent.node_id} signed it, whose role is {agent.role}: only a site agent may assert")
    said = decode_message(messages.site.DiscoveryAssertion, signed.body, limit=MAX_JOIN_BYTES)
    if (said.site_node_id, said.site) != (agent.node_id, agent.site):
        raise _refused(
            f"it speaks for {said.site_node_id[:64]!a} of site {said.site[:64]!a}, and {agent.node_id} of site "
            f"{agent.site} signed it"
        )
    _check_times(said, now_ms=now_ms)
    if _MAC_ADDRESS.fullmatch(said.mac_address) is None:
        raise _refused(f"{said.mac_address[:64]!a} is no hardware address: six pairs of lower-case hex, with colons")
    if len(said.nonce_sha256) != SHA256_BYTES:
        raise _refused(f"the digest of its nonce has {len(said.nonce_sha256)} bytes, a SHA-256 has {SHA256_BYTES}")
    return Discovered(
        shown=shown,
        body=signed.body,
        mac_address=said.mac_address,
        uuid=said.uuid.lower(),
        nonce_sha256=said.nonce_sha256,
        not_after_ms=said.not_after_ms,
    )


def _check_times(said: messages.site.DiscoveryAssertion, *, now_ms: int) -> None:
    if said.not_after_ms <= now_ms:
        raise _refused(f"it was good until {said.not_after_ms} ms and it is {now_ms} ms: boot the machine again")
    if said.issued_at_ms > now_ms + CLOCK_SKEW_MS:
        raise _refused(f"it was made {said.issued_at_ms - now_ms} ms from now: set the clock of the site agent")
    if said.not_after_ms - said.issued_at_ms > LIFETIME_MS_MAX:
        raise _refused(f"it is good for {said.not_after_ms - said.issued_at_ms} ms, {LIFETIME_MS_MAX} are the limit")


def _refused(why: str) -> Refused:
    return refuse(Reason.ATTESTATION, f"the discovery assertion is refused: {why}")
