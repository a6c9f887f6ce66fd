"""The challenge that `provisioned` and `discovery` give: prove now that you hold the secret, not once in the past.

The first request is answered by a deferral with a challenge, the second brings the secret sealed for that challenge. So
what was recorded on the way is worth nothing later, and no host needs a clock. Nothing is stored when a challenge is
given; its use is, in the transaction of the Join, so that it counts once on every instance and over restarts. See
docs/security.md, "Attestors"; decisions 0148.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric import ec

from bettercompute.errors import Refused
from bettercompute.pki import join_challenge, join_token
from bettercompute.pki.join_challenge import JoinChallenge
from bettercompute.protocol import messages
from bettercompute.protocol.frames import decode_message
from bettercompute.protocol.limits import MAX_JOIN_BYTES
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.services.attestors.port import Deferral, Moment
from bettercompute.services.issuing import Request
from bettercompute.services.keys import KeySource
from bettercompute.store import replay
from bettercompute.store.database import Transaction
from bettercompute.world import World

REASON_CHALLENGE = "challenge"
REPLAY_PURPOSE = "join-challenge"


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedSecret:
    """A secret that came sealed for this request, and for a challenge if one was answered."""

    secret: bytes = field(repr=False)
    sealed_to: ec.EllipticCurvePublicKey
    answered: JoinChallenge | None


@dataclass(frozen=True, slots=True)
class Challenges:
    """Gives challenges for one attestor and reads their answers."""

    attestor: str
    keys: KeySource
    world: World

    def examine(self, request: messages.JoinRequest, csr: Request, *, role: str) -> SealedSecret:
        """Open the sealed secret and the answer to a challenge, if the request brings one."""
        secret, key = self._open(request.sealed_token, csr, role=role)
        if not request.challenge_answer:
            return SealedSecret(secret=secret, sealed_to=key.public_key(), answered=None)
        answer = decode_message(messages.SealedChallengeAnswer, request.challenge_answer, limit=MAX_JOIN_BYTES)
        answered = join_challenge.read_challenge(
            self.keys.read().join_encryption_keys, answer.challenge, attestor=self.attestor, csr_der=csr.csr_der
        )
        again, _ = self._open(answer.sealed_secret, csr, role=role, challenge=answer.challenge)
        if not hmac.compare_digest(again, secret):
            raise refuse(Reason.BAD_PROOF, "the challenge was answered with another secret than the request's")
        return SealedSecret(secret=secret, sealed_to=key.public_key(), answered=answered)

    def give(self, sealed: SealedSecret, csr: Request, *, now_ms: int) -> Deferral:
        """Return a new challenge for this request."""
        [key] = [key for key in self.keys.held().join_encryption_keys if key.public_key() == sealed.sealed_to]
        challenge = join_challenge.make_challenge(
            key,
            attestor=self.attestor,
            csr_der=csr.csr_der,
            nonce=self.world.ids.random_bytes(join_challenge.NONCE_BYTES),
            expires_at_ms=now_ms + join_challenge.LIFETIME_MS,
        )
        return Deferral(
            reason=REASON_CHALLENGE,
            message=f"attestor {self.attestor} asks for a proof that is made now",
            challenge=challenge,
        )

    async def use(self, transaction: Transaction, answered: JoinChallenge, moment: Moment) -> None:
        """Use a challenge up; refuse one that has expired or was used."""
        if answered.expires_at_ms <= moment.now_ms:
            late_ms = moment.now_ms - answered.expires_at_ms
            raise refuse(
                Reason.BAD_PROOF,
                f"the challenge expired {late_ms} ms ago, it is good for {join_challenge.LIFETIME_MS} ms: ask again",
            )
        if not await replay.consume(
            transaction, purpose=REPLAY_PURPOSE, jti=answered.nonce, expires_at_ms=answered.expires_at_ms
        ):
            raise refuse(Reason.BAD_PROOF, "the challenge was answered before, each is good for once: ask again")

    def _open(
        self, compact: str, csr: Request, *, role: str, challenge: bytes = b""
    ) -> tuple[bytes, ec.EllipticCurvePrivateKey]:
        """Open what is sealed to one of the join-encryption keys: while they are rotated there are two."""
        why: Refused | None = None
        for key in self.keys.read().join_encryption_keys:
            try:
                proof = join_token.open_proof(
                    key,
                    compact,
                    csr_der=csr.csr_der,
                    role=role,
                    now_ms=self.world.clock.now_ms(),
                    challenge=challenge,
                )
            except Refused as refused:
                why = why or refused
                continue
            return proof.secret, key
        assert why is not None, "there was a key to fail with"
        raise why
