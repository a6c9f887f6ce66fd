"""Signed intent: the commands and desired states that a worker key signs, and what a node holds against one.

The signature covers the stored body byte for byte, so whoever relays it can withhold it and nothing else. A worker key
chains to a command-signing root of the trust bundle; each root may be narrowed to some kinds and to some time. A bundle
without roots means that signing is off. See docs/security.md, "Signed intent"; decisions 0121.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from bettercompute.errors import Refused
from bettercompute.pki import certificates, signatures
from bettercompute.pki.trust import CommandRoot
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import command_input, desired_state_input
from bettercompute.protocol.statuses import Reason, refuse

DESIRED_STATE = "desired-state"
"""What a root that is narrowed to some kinds lists when it may sign specs too."""


@dataclass(frozen=True, slots=True)
class IntentSigner:
    """A worker's key with the certificates that lead to its command-signing root."""

    key: ec.EllipticCurvePrivateKey = field(repr=False)
    chain_der: tuple[bytes, ...]
    root_sha256: str
    """Of the public key of the command-signing root, in hex: what is signed is kept with it."""

    def sign_command(self, body: bytes) -> bytes:
        """Return a serialized Signature over a CommandBody as it is stored."""
        return self._sign(command_input(body))

    def sign_desired_state(self, body: bytes) -> bytes:
        """Return a serialized Signature over a DesiredStateBody as it is stored."""
        return self._sign(desired_state_input(body))

    def _sign(self, signing_input: bytes) -> bytes:
        return signatures.sign(self.key, signing_input, chain_der=self.chain_der).SerializeToString(deterministic=True)


def make_signer(
    *, key: ec.EllipticCurvePrivateKey, leaf: x509.Certificate, root: x509.Certificate, now_ms: int
) -> IntentSigner:
    """Return the signer of a worker key; refuse INVALID_CONFIG one that no node would believe."""
    chain_der = (leaf.public_bytes(Encoding.DER),)
    if leaf.public_key() != key.public_key():
        raise refuse(Reason.INVALID_CONFIG, "the worker certificate is not of the worker key: make both anew together")
    try:
        certificates.verify_chain(chain_der, roots=[root], use=certificates.Use.INTENT, now_ms=now_ms)
    except Refused as refused:
        raise refuse(Reason.INVALID_CONFIG, f"the worker key cannot sign: {refused.message}") from refused
    return IntentSigner(key, chain_der, certificates.spki_sha256(root))


def check_command(
    command: messages.Command, body: messages.CommandBody, *, roots: Sequence[CommandRoot], now_ms: int
) -> None:
    """Refuse a command that no root of the bundle vouches for: BAD_PROOF, or ACCESS_DENIED for the kind alone.

    The signature must have been made in the root's time, and its chain be valid at `now_ms`: a command is delivered
    within days of its making. When it was made is its signer's own word, so a root's end counts by `now_ms`, too.
    """
    if roots:
        _check(
            command.signature if command.HasField("signature") else None,
            command_input(command.body),
            roots=roots,
            subject=body.kind,
            made_at_ms=body.issued_at_ms,
            valid_at_ms=now_ms,
            now_ms=now_ms,
        )


def check_desired_state(
    desired: messages.DesiredState, body: messages.DesiredStateBody, *, roots: Sequence[CommandRoot], now_ms: int
) -> None:
    """Refuse a desired state that no root of the bundle vouches for.

    Its chain must have been valid when it was made, for a spec stands for years and a worker certificate does not. A
    key that leaked is ended by its root's `not_after_ms`, which counts by `now_ms`, or by its leaving the bundle.
    """
    if roots:
        _check(
            desired.signature if desired.HasField("signature") else None,
            desired_state_input(desired.body),
            roots=roots,
            subject=DESIRED_STATE,
            made_at_ms=body.issued_at_ms,
            valid_at_ms=body.issued_at_ms,
            now_ms=now_ms,
        )


def _check(
    signature: messages.Signature | None,
    signing_input: bytes,
    *,
    roots: Sequence[CommandRoot],
    subject: str,
    made_at_ms: int,
    valid_at_ms: int,
    now_ms: int,
) -> None:
    if signature is None:
        raise refuse(Reason.BAD_PROOF, "it is not signed, and this node takes only signed intent")
    vouching: list[CommandRoot] = []
    why: Refused | None = None
    for root in roots:
        try:
            signatures.verify_chained(
                signature,
                signing_input,
                roots=[root.certificate],
                use=certificates.Use.INTENT,
                now_ms=valid_at_ms,
            )
        except Refused as refused:
            why = refused
        else:
            vouching.append(root)
    if not vouching:
        assert why is not None, "there was a root to fail under"
        raise refuse(Reason.BAD_PROOF, why.message) from why
    latest_ms = max(made_at_ms, now_ms)
    in_time = [root for root in vouching if root.not_before_ms <= made_at_ms and _ends_ms(root) > latest_ms]
    if not in_time:
        raise refuse(
            Reason.BAD_PROOF,
            f"it was signed at {made_at_ms} ms and came at {now_ms} ms, outside the time in which its root may sign",
        )
    if not any(not root.allowed_kinds or subject in root.allowed_kinds for root in in_time):
        raise refuse(Reason.ACCESS_DENIED, f"the root that signed it may not sign {subject}")


def _ends_ms(root: CommandRoot) -> float:
    return root.not_after_ms or float("inf")
