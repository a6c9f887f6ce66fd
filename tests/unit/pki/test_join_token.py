"""The printed string survives copying, and its secret is good for one request only."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.errors import Refused
from bettercompute.pki import certificates, join_token, sealed
from bettercompute.pki.join_token import JoinToken
from bettercompute.protocol.statuses import Reason, Status

NOW_MS = 1_800_000_000_000
SIGNING = certificates.generate_key()
ENCRYPTION = certificates.generate_key()
TOKEN = JoinToken(
    secret=bytes(range(32)),
    gateway_urls=("https://gw.example.org:443", "https://[::1]:8443"),
    serving_ca_pins=("ab" * 32,),
    join_signing_key=SIGNING.public_key(),
    join_encryption_key=ENCRYPTION.public_key(),
)
TEXT = join_token.format_token(TOKEN)
CSR = certificates.make_csr(certificates.generate_key())

urls = st.from_regex(r"https://[a-z][a-z0-9]{1,60}(\.[a-z]{1,9})?(:[1-9][0-9]{0,3})?", fullmatch=True)


@given(st.binary(min_size=32, max_size=32), st.lists(urls, min_size=1, max_size=8), st.integers(1, 4))
def test_a_token_comes_back(secret, gateway_urls, pins):
    token = JoinToken(
        secret=secret,
        gateway_urls=tuple(gateway_urls),
        serving_ca_pins=tuple(f"{number:064x}" for number in range(pins)),
        join_signing_key=TOKEN.join_signing_key,
        join_encryption_key=TOKEN.join_encryption_key,
    )
    text = join_token.format_token(token)
    assert join_token.parse_token(text) == token
    assert join_token.parse_token(f"  {text}\n") == token
    assert text.startswith("bcj1_")


def test_a_secret_is_not_shown():
    for shown in (repr(TOKEN), str(TOKEN)):
        assert repr(TOKEN.secret)[2:-1] not in shown
        assert "secret" not in shown


def refused(text: str, why: str) -> None:
    with pytest.raises(Refused, match=why) as caught:
        join_token.parse_token(text)
    assert (caught.value.status, caught.value.reason) == (Status.INVALID_ARGUMENT, Reason.TOKEN_MALFORMED)
    assert "copy the whole string" in caught.value.message


@given(st.integers(0, len(TEXT) - 1))
def test_a_cut_token_is_told(length):
    refused(TEXT[:length], "the join token is malformed")


@given(st.integers(0, len(TEXT) - 1), st.sampled_from("Aa0_-.=é "))
def test_an_altered_token_is_told(position, character):
    text = TEXT[:position] + character + TEXT[position + 1 :]
    if text not in (TEXT, TEXT[:-1] + " "):
        refused(text, "the join token is malformed")


def by_hand(*fields: tuple[int, bytes], end: bytes = b"") -> str:
    body = b"".join(bytes([number, len(value)]) + value for number, value in fields) + end
    data = body + hashlib.sha256(b"bcj1_" + body).digest()[:4]
    return "bcj1_" + base64.urlsafe_b64encode(data).rstrip(b"=").decode()


SECRET = (1, bytes(32))
URL = (2, b"https://gw")
PIN = (3, bytes(32))
KEYS = ((4, join_token.point_bytes(SIGNING.public_key())), (5, join_token.point_bytes(ENCRYPTION.public_key())))


def test_a_token_by_hand_is_read():
    assert join_token.parse_token(by_hand(SECRET, URL, PIN, *KEYS)).gateway_urls == ("https://gw",)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ([], "missing"),
        ([URL, PIN, *KEYS], "missing"),
        ([SECRET, SECRET, URL, PIN, *KEYS], "repeated"),
        ([(1, bytes(31)), URL, PIN, *KEYS], "wrong length"),
        ([SECRET, PIN, *KEYS], "0 gateway URLs"),
        ([SECRET, *[URL] * 9, PIN, *KEYS], "9 gateway URLs"),
        ([SECRET, (2, b"https://\xff"), PIN, *KEYS], "missing, repeated"),
        ([SECRET, URL, *KEYS], "wrong length"),
        ([SECRET, URL, *[PIN] * 5, *KEYS], "wrong length"),
        ([SECRET, URL, (3, bytes(20)), *KEYS], "wrong length"),
        ([SECRET, URL, PIN, (4, b"\2" + b"\xff" * 32), KEYS[1]], "not a point"),
        ([SECRET, URL, PIN, (4, b"\0"), KEYS[1]], "not a point"),
        ([SECRET, URL, PIN, *KEYS, (7, b"")], "upgrade bcd"),
        ([SECRET, URL, PIN, *KEYS, (6, b"")], "attestor that it names is no name"),
        ([SECRET, URL, PIN, *KEYS, (6, b"A")], "attestor that it names is no name"),
        ([SECRET, URL, PIN, *KEYS, (6, b"a"), (6, b"a")], "a field is missing, repeated"),
    ],
)
def test_a_token_with_other_fields_is_refused(fields, why):
    refused(by_hand(*fields), why)


@pytest.mark.parametrize("end", [b"\1", b"\1\5abcd", b"\1\1"])
def test_a_field_that_is_cut_is_refused(end):
    refused(by_hand(SECRET, URL, PIN, *KEYS, end=end), "last field is cut")


@pytest.mark.parametrize(
    "url",
    [
        *("", "http://gw", "gw:443", "https://", "https://a b", "https://a\n", "https://" + "a" * 250),
        *("https://gw:0", "https://gw:99999", "https://::1:443", "https://[gw]:443", "https://gw/path"),
    ],
)
def test_a_bad_gateway_url_is_refused(url):
    with pytest.raises(Refused, match="write https://HOST:PORT") as caught:
        join_token.check_gateway_url(url)
    assert caught.value.status == Status.INVALID_ARGUMENT


def seal(**changes: object) -> str:
    arguments = {"csr_der": CSR, "role": "node", "now_ms": NOW_MS, **changes}
    return join_token.seal_proof(TOKEN.secret, join_encryption_key=TOKEN.join_encryption_key, **arguments)  # type: ignore[arg-type]  # by name


def open_proof(compact: str, *, csr_der: bytes = CSR, role: str = "node") -> join_token.JoinProof:
    return join_token.open_proof(ENCRYPTION, compact, csr_der=csr_der, role=role, now_ms=NOW_MS)


def test_a_proof_says_secret_request_and_role():
    proof = open_proof(seal())
    assert proof.secret == TOKEN.secret
    assert (proof.csr_sha256, proof.role, proof.sealed_at_ms) == (hashlib.sha256(CSR).hexdigest(), "node", NOW_MS)
    assert repr(TOKEN.secret)[2:-1] not in repr(proof)


def test_a_host_whose_clock_is_before_1970_can_seal():
    assert open_proof(seal(now_ms=-5)).sealed_at_ms == 0


def test_a_proof_is_for_one_request_and_role():
    with pytest.raises(Refused, match="sealed for another certificate request"):
        open_proof(seal(), csr_der=certificates.make_csr(certificates.generate_key()))
    with pytest.raises(Refused, match="sealed for role 'node', and the request asks for 'site'"):
        open_proof(seal(), role="site")


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({}, "lacks"),
        ({"secret": 5}, "lacks"),
        ({"csr_sha256": 5}, "lacks"),
        ({"role": 5}, "lacks"),
        ({"secret": "="}, "not base64url"),
        ({"secret": "AAAA"}, "has 3 bytes"),
        ({"csr_sha256": "é"}, "another certificate request"),
    ],
)
def test_a_proof_with_other_content_is_refused(claims, why):
    good = {"secret": sealed.base64url(TOKEN.secret), "csr_sha256": hashlib.sha256(CSR).hexdigest(), "role": "node"}
    compact = sealed.seal(
        TOKEN.join_encryption_key,
        sealed.JOIN_TOKEN,
        {**good, **claims} if claims else {},
        now_ms=NOW_MS,
        lifetime_ms=1000,
    )
    with pytest.raises(Refused, match=why) as caught:
        open_proof(compact)
    assert caught.value.reason == Reason.TOKEN_MALFORMED


def test_a_token_says_its_attestor_where_it_is_not_the_usual_one():
    assert join_token.parse_token(join_token.format_token(TOKEN)).attestor == "join-token"
    other = replace(TOKEN, attestor="provisioned")
    assert join_token.parse_token(join_token.format_token(other)) == other
    assert len(join_token.format_token(other)) > len(join_token.format_token(TOKEN))


def test_a_proof_may_be_for_one_challenge():
    compact = seal(challenge=b"c1")
    opened = join_token.open_proof(ENCRYPTION, compact, csr_der=CSR, role="node", now_ms=NOW_MS, challenge=b"c1")
    assert opened.secret == TOKEN.secret
    for other in (b"", b"c2"):
        with pytest.raises(Refused, match="sealed for another challenge"):
            join_token.open_proof(ENCRYPTION, compact, csr_der=CSR, role="node", now_ms=NOW_MS, challenge=other)
    with pytest.raises(Refused, match="sealed for another challenge"):
        join_token.open_proof(ENCRYPTION, seal(), csr_der=CSR, role="node", now_ms=NOW_MS, challenge=b"c1")
