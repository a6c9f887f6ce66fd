"""One spelling per identity: the SPIFFE grammar byte for byte, and the statements beside it."""

from __future__ import annotations

import contextlib
import string
from typing import cast

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.errors import Refused
from bettercompute.pki import certificates, identity
from bettercompute.pki.identity import NodeIdentity, parse_uris
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason, Status

GOOD = "spiffe://bc.local/site/default/node/n1"
NOW_MS = 1_800_000_000_000

names = st.from_regex(r"[a-z0-9][a-z0-9-]{0,62}", fullmatch=True)
labels = st.from_regex(r"[a-z0-9](?:[a-z0-9_-]{0,10}[a-z0-9])?", fullmatch=True)
trust_domains = st.lists(labels, min_size=1, max_size=5).map(".".join)
identities = st.builds(
    NodeIdentity,
    trust_domain=trust_domains,
    site=names,
    node_id=names,
    role=st.sampled_from([None, *identity.ROLES]),
    tenant_controlled=st.booleans(),
    attestation_key_sha256=st.none() | st.binary(min_size=32, max_size=32).map(bytes.hex),
)


@given(identities)
def test_an_identity_comes_back_from_its_uris(one):
    assert parse_uris(one.uris) == one
    assert parse_uris(tuple(reversed(one.uris))) == one


@given(st.text(alphabet=string.printable + "\0é", max_size=80))
def test_only_what_could_have_been_written_is_read(text):
    uri = "spiffe://" + text
    with contextlib.suppress(Refused):
        assert parse_uris([uri]).spiffe_id == uri


@given(identities, st.integers(min_value=0), st.characters(codec="utf-8"))
def test_one_more_or_another_character_is_another_identity_or_none(one, position, character):
    uri = one.spiffe_id
    position %= len(uri) + 1
    for changed in (uri[:position] + character + uri[position:], uri[:position] + character + uri[position + 1 :]):
        try:
            read = parse_uris([changed])
        except Refused:
            continue
        assert read.spiffe_id == changed
        assert (read.spiffe_id == uri) == (changed == uri)


@pytest.mark.parametrize(
    "uri",
    [
        "spiffe://bc.local/site/default/node/n1\0",
        "spiffe://bc.local\0/site/default/node/n1",
        "spiffe://bc.local/site/default/node/n1\n",
        "spiffe://bc.local/site/default/node/..",
        "spiffe://bc.local/site/../node/n1",
        "spiffe://bc.local/site/default/../node/n1",
        "spiffe://bc.local//site/default/node/n1",
        "spiffe://bc.local/site/default//node/n1",
        "spiffe://bc.local/site/default/node/n1/",
        "spiffe://bc.local/site/default/node/",
        "spiffe://bc.local/site//node/n1",
        "spiffe:///site/default/node/n1",
        "spiffe://bc.local/site/default/node/n1?x=1",
        "spiffe://bc.local/site/default/node/n1#f",
        "spiffe://bc.local:443/site/default/node/n1",
        "spiffe://user@bc.local/site/default/node/n1",
        "spiffe://BC.local/site/default/node/n1",
        "SPIFFE://bc.local/site/default/node/n1",
        "spiffe://bc.local/Site/default/node/n1",
        "spiffe://bc.local/site/Default/node/n1",
        "spiffe://bc.local/site/-a/node/n1",
        "spiffe://bc.local/site/a_b/node/n1",
        "spiffe://bc.local/site/default/node/N1",
        "spiffe://bc.local/site/default/node/-n1",
        "spiffe://bc.local/site/default/node/n.1",
        "spiffe://bc.local/site/default/node/%6e1",
        "spiffe://bc.local/site/default/node/n\u0131",
        "spiffe://bc.local/site/default/node/" + "n" * 64,
        "spiffe://" + "a" * 256 + "/site/default/node/n1",
        "spiffe://.bc.local/site/default/node/n1",
        "spiffe://bc..local/site/default/node/n1",
        "spiffe://bc.local./site/default/node/n1",
        "spiffe://-bc.local/site/default/node/n1",
        "spiffe://bc.local/node/n1/site/default",
        "spiffe:bc.local/site/default/node/n1",
        " spiffe://bc.local/site/default/node/n1",
        "https://bc.local/site/default/node/n1",
    ],
)
def test_another_spelling_is_refused(uri):
    with pytest.raises(Refused, match="the certificate names no node") as caught:
        parse_uris([uri])
    assert caught.value.status == Status.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("uris", "why"),
    [
        ([], "0 SPIFFE URI names"),
        ([GOOD, GOOD], "2 SPIFFE URI names"),
        ([GOOD, "spiffe://other/site/a/node/b"], "2 SPIFFE URI names"),
        ([GOOD, "SPIFFE://other/site/a/node/b"], "2 SPIFFE URI names"),
        ([GOOD, "https://example.org/"], "neither an identity nor"),
        ([GOOD, "URN:BC:role:node"], "neither an identity nor"),
        ([GOOD, "urn:bc:role:king"], "states the role"),
        ([GOOD, "urn:bc:role:"], "states the role"),
        ([GOOD, "urn:bc:role:node", "urn:bc:role:node"], "2 times"),
        ([GOOD, "urn:bc:role:node", "urn:bc:role:site"], "2 times"),
        ([GOOD, "urn:bc:ak:" + "A" * 64], "lower-case hex"),
        ([GOOD, "urn:bc:ak:" + "a" * 63], "lower-case hex"),
        ([GOOD, *(f"urn:bc:x:{n}" for n in range(16))], "17 URI names"),
    ],
)
def test_more_or_other_names_are_refused(uris, why):
    with pytest.raises(Refused, match=why):
        parse_uris(uris)


def test_a_statement_of_a_later_release_is_ignored():
    assert parse_uris([GOOD, "urn:bc:future:thing"]) == parse_uris([GOOD])


@pytest.mark.parametrize("text", ["", "-a", "A", "a b", "a" * 64, "a\n", "a.b", "ä"])
@pytest.mark.parametrize("check", [identity.check_node_id, identity.check_site])
def test_a_bad_name_is_told_with_its_grammar(check, text):
    with pytest.raises(Refused, match="use lower-case letters, digits and '-'") as caught:
        check(text)
    assert (caught.value.status, caught.value.reason) == (Status.INVALID_ARGUMENT, Reason.INVALID_NAME)


def test_good_names_are_returned():
    assert identity.check_node_id("0-a") == "0-a"
    assert identity.check_site("a" * 63) == "a" * 63
    assert identity.check_trust_domain("bc.local") == "bc.local"
    assert identity.check_role("site") == "site"
    with pytest.raises(Refused, match="is not a trust domain"):
        identity.check_trust_domain("a..b")
    with pytest.raises(Refused, match="use one of node, site, ramdisk"):
        identity.check_role("king")


def test_roles_are_those_of_the_wire():
    for value in messages.AgentRole.values():
        text = identity.role_of(value)
        if value == messages.AGENT_ROLE_UNSPECIFIED:
            assert text is None
        else:
            assert text in identity.ROLES
            assert identity.agent_role(text) == value
    assert identity.role_of(cast("messages.AgentRole.ValueType", 77)) is None  # of a later release


def certificate_with(names: list[x509.GeneralName] | None) -> x509.Certificate:
    authority = certificates.make_node_ca(serial=bytes(16), now_ms=NOW_MS)
    key = certificates.generate_key()
    builder = x509.CertificateBuilder(
        subject_name=x509.Name([]),
        issuer_name=authority.certificate.subject,
        public_key=key.public_key(),
        serial_number=1,
        not_valid_before=authority.certificate.not_valid_before_utc,
        not_valid_after=authority.certificate.not_valid_after_utc,
    )
    if names is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(authority.key, hashes.SHA256())


def test_the_identity_of_a_certificate():
    assert identity.identity_of(certificate_with([x509.UniformResourceIdentifier(GOOD)])).node_id == "n1"


@pytest.mark.parametrize(
    "names",
    [
        None,
        [x509.DNSName("n1")],
        [x509.UniformResourceIdentifier(GOOD), x509.DNSName("n1")],
        [x509.UniformResourceIdentifier(GOOD), x509.RFC822Name("root@example.org")],
        [x509.UniformResourceIdentifier(GOOD + "\0")],
    ],
)
def test_a_certificate_with_other_names_names_no_node(names):
    with pytest.raises(Refused, match="the certificate names no node"):
        identity.identity_of(certificate_with(names))
