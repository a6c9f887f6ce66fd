"""Challenges: read back as they were made, for one attestor and request, by one key; anything else is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.errors import Refused
from bettercompute.pki import certificates, join_challenge
from bettercompute.protocol.limits import MAX_TIME_MS
from bettercompute.protocol.statuses import Reason

KEY, OTHER = certificates.generate_key(), certificates.generate_key()
NONCES = st.binary(min_size=join_challenge.NONCE_BYTES, max_size=join_challenge.NONCE_BYTES)
CHALLENGE = join_challenge.make_challenge(
    KEY, attestor="provisioned", csr_der=b"csr", nonce=bytes(16), expires_at_ms=1_900_000_000_000
)


def read(
    challenge: bytes, *, attestor: str = "provisioned", csr_der: bytes = b"csr", keys=(KEY,)
) -> join_challenge.JoinChallenge:
    return join_challenge.read_challenge(keys, challenge, attestor=attestor, csr_der=csr_der)


def refused(challenge: bytes, **changes: object) -> None:
    with pytest.raises(Refused, match="ask for a new one") as caught:
        read(challenge, **changes)  # type: ignore[arg-type]  # by name
    assert caught.value.reason == Reason.BAD_PROOF


@given(st.text(), st.binary(), NONCES, st.integers(0, MAX_TIME_MS))
def test_a_challenge_is_read_back(attestor, csr_der, nonce, expires_at_ms):
    made = join_challenge.make_challenge(
        KEY, attestor=attestor, csr_der=csr_der, nonce=nonce, expires_at_ms=expires_at_ms
    )
    assert len(made) == join_challenge.CHALLENGE_BYTES
    found = read(made, attestor=attestor, csr_der=csr_der, keys=(OTHER, KEY))
    assert (found.nonce, found.expires_at_ms) == (nonce.hex(), expires_at_ms)


@given(st.integers(0, join_challenge.CHALLENGE_BYTES * 8 - 1))
def test_every_bit_of_it_counts(bit):
    altered = bytearray(CHALLENGE)
    altered[bit // 8] ^= 1 << bit % 8
    refused(bytes(altered))


@given(st.binary(max_size=200))
def test_strange_bytes_are_no_challenge(data):
    refused(data)


def test_it_is_for_one_attestor_request_and_key():
    assert read(CHALLENGE).expires_at_ms == 1_900_000_000_000
    refused(CHALLENGE, attestor="discovery")
    refused(CHALLENGE, csr_der=b"other")
    refused(CHALLENGE, keys=(OTHER,))
    refused(CHALLENGE, keys=())
