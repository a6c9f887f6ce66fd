"""Who a node is, byte for byte.

A node certificate names its node in exactly one SPIFFE URI, `spiffe://<trust-domain>/site/<site>/node/<node-id>`. Every
other URI is a `urn:bc:` statement about the key, never an identity. The grammar is narrower than RFC 3986 on purpose:
one spelling per identity, so that comparing bytes is comparing identities, and nothing has to be normalised before it
is believed. See docs/security.md, "Identities"; decisions 0111.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from bettercompute.errors import Refused
from bettercompute.protocol import messages
from bettercompute.protocol.statuses import Reason, refuse

NAME_LENGTH_MAX = 63  # a DNS label, so that a node id can be a host name
TRUST_DOMAIN_LENGTH_MAX = 255  # the SPIFFE ID standard, 2.1
URI_LENGTH_MAX = 2048  # the SPIFFE ID standard, 2.3
URIS_MAX = 16  # one identity and a handful of statements; a certificate with more is not ours

DEFAULT_TRUST_DOMAIN = "bc.local"
DEFAULT_SITE = "default"

ROLE_NODE = "node"
ROLE_SITE = "site"
ROLE_RAMDISK = "ramdisk"
ROLES = (ROLE_NODE, ROLE_SITE, ROLE_RAMDISK)

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}", re.ASCII)
_TRUST_DOMAIN = re.compile(r"[a-z0-9](?:[a-z0-9_-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9_-]*[a-z0-9])?)*", re.ASCII)
_SPIFFE = re.compile(r"spiffe://([a-z0-9._-]+)/site/([a-z0-9-]+)/node/([a-z0-9-]+)", re.ASCII)
_SHA256_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)

_AGENT_ROLES: dict[str, messages.AgentRole.ValueType] = {
    ROLE_NODE: messages.AGENT_ROLE_NODE,
    ROLE_SITE: messages.AGENT_ROLE_SITE,
    ROLE_RAMDISK: messages.AGENT_ROLE_RAMDISK,
}
_ROLE_NAMES = {number: name for name, number in _AGENT_ROLES.items()}

UNREADABLE = (
    TypeError,
    ValueError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)
"""What `cryptography` raises for a certificate that a stranger made up, at loading or when a part is read."""

_SPIFFE_SCHEME = "spiffe:"
_STATEMENT = "urn:bc:"
_STATEMENT_ROLE = "urn:bc:role:"
_STATEMENT_TENANT_CONTROLLED = "urn:bc:tenant-controlled"
_STATEMENT_ATTESTATION_KEY = "urn:bc:ak:"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """What a node certificate says: whose key it is, and what is stated about that key."""

    trust_domain: str
    site: str
    node_id: str
    role: str | None = None
    tenant_controlled: bool = False
    attestation_key_sha256: str | None = None

    @property
    def spiffe_id(self) -> str:
        """Return the identity's one spelling."""
        return f"spiffe://{self.trust_domain}/site/{self.site}/node/{self.node_id}"

    @property
    def uris(self) -> tuple[str, ...]:
        """Return the URI names of its certificate: the identity, then the statements."""
        statements: list[str] = []
        if self.role is not None:
            statements.append(_STATEMENT_ROLE + self.role)
        if self.tenant_controlled:
            statements.append(_STATEMENT_TENANT_CONTROLLED)
        if self.attestation_key_sha256 is not None:
            statements.append(_STATEMENT_ATTESTATION_KEY + self.attestation_key_sha256)
        return (self.spiffe_id, *statements)


def is_name(text: str) -> bool:
    """Say whether `text` may be a node id or a site."""
    return _NAME.fullmatch(text) is not None


def is_trust_domain(text: str) -> bool:
    """Say whether `text` may be a trust domain: lower-case labels joined by single dots."""
    return len(text) <= TRUST_DOMAIN_LENGTH_MAX and _TRUST_DOMAIN.fullmatch(text) is not None


def check_node_id(text: str) -> str:
    """Return `text` when it may be a node id, else refuse it INVALID_ARGUMENT."""
    return _checked_name(text, what="node id")


def check_site(text: str) -> str:
    """Return `text` when it may be a site, else refuse it INVALID_ARGUMENT."""
    return _checked_name(text, what="site")


def check_trust_domain(text: str) -> str:
    """Return `text` when it may be a trust domain, else refuse it INVALID_ARGUMENT."""
    if is_trust_domain(text):
        return text
    raise refuse(
        Reason.INVALID_NAME,
        f"{_shown(text)} is not a trust domain: use lower-case letters, digits, '-' and '_' in labels joined by single "
        f"dots, at most {TRUST_DOMAIN_LENGTH_MAX} characters",
    )


def check_role(text: str) -> str:
    """Return `text` when it is a role of ours, else refuse it INVALID_ARGUMENT."""
    if text in ROLES:
        return text
    raise refuse(Reason.INVALID_NAME, f"{_shown(text)} is not a role: use one of {', '.join(ROLES)}")


def role_of(agent_role: messages.AgentRole.ValueType) -> str | None:
    """Return the name of a role on the wire, or None for one that is not told or not known here."""
    return _ROLE_NAMES.get(agent_role)


def agent_role(name: str) -> messages.AgentRole.ValueType:
    """Return the wire's form of a role that `check_role` lets pass."""
    return _AGENT_ROLES[name]


def parse_uris(uris: Sequence[str]) -> NodeIdentity:
    """Read the identity from a certificate's URI names; refuse UNAUTHENTICATED what is not exactly one, in one
    spelling.

    A `urn:bc:` statement of a later release is ignored; any other URI, and a statement made twice, is refused.
    """
    if len(uris) > URIS_MAX:
        raise _not_an_identity(f"it has {len(uris)} URI names, the limit is {URIS_MAX}")
    spiffe_ids = [uri for uri in uris if uri[: len(_SPIFFE_SCHEME)].lower() == _SPIFFE_SCHEME]
    if len(spiffe_ids) != 1:
        raise _not_an_identity(f"it has {len(spiffe_ids)} SPIFFE URI names, exactly one is needed")
    trust_domain, site, node_id = _parse_spiffe_id(spiffe_ids[0])
    statements = [uri for uri in uris if uri is not spiffe_ids[0]]
    for uri in statements:
        if not uri.startswith(_STATEMENT):
            raise _not_an_identity(f"its URI name {_shown(uri)} is neither an identity nor a {_STATEMENT} statement")
    role = _single_statement(statements, _STATEMENT_ROLE)
    if role is not None and role not in ROLES:
        raise _not_an_identity(f"it states the role {_shown(role)}, which is not one of {', '.join(ROLES)}")
    attestation_key = _single_statement(statements, _STATEMENT_ATTESTATION_KEY)
    if attestation_key is not None and _SHA256_HEX.fullmatch(attestation_key) is None:
        raise _not_an_identity(f"its attestation key {_shown(attestation_key)} is not a SHA-256 in lower-case hex")
    return NodeIdentity(
        trust_domain=trust_domain,
        site=site,
        node_id=node_id,
        role=role,
        tenant_controlled=_STATEMENT_TENANT_CONTROLLED in statements,
        attestation_key_sha256=attestation_key,
    )


def identity_of(certificate: x509.Certificate) -> NodeIdentity:
    """Read the identity of a certificate whose chain has been verified; any name that is not a URI is refused.

    Whose trust domain it is, is the caller's question: compare `trust_domain` with the configured one.
    """
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = [name.value for name in names if isinstance(name, x509.UniformResourceIdentifier)]
    except UNREADABLE as error:
        raise _not_an_identity("its subject alternative names are missing or unreadable") from error
    if len(uris) != len(list(names)):
        raise _not_an_identity(
            "it has names that are not URIs; a node certificate carries an identity and nothing else"
        )
    return parse_uris(uris)


def _parse_spiffe_id(uri: str) -> tuple[str, str, str]:
    match = _SPIFFE.fullmatch(uri) if len(uri) <= URI_LENGTH_MAX else None
    if match is None:
        raise _not_an_identity(
            f"{_shown(uri)} is not of the form spiffe://<trust-domain>/site/<site>/node/<node-id> in lower case"
        )
    trust_domain, site, node_id = match.groups()
    if not is_trust_domain(trust_domain):
        raise _not_an_identity(f"{_shown(trust_domain)} is not a trust domain")
    for what, name in (("site", site), ("node id", node_id)):
        if not is_name(name):
            raise _not_an_identity(f"{_shown(name)} is not a {what}")
    return trust_domain, site, node_id


def _single_statement(statements: Sequence[str], prefix: str) -> str | None:
    values = [uri.removeprefix(prefix) for uri in statements if uri.startswith(prefix)]
    if len(values) > 1:
        raise _not_an_identity(f"it states {prefix} {len(values)} times, once is the limit")
    return values[0] if values else None


def _checked_name(text: str, *, what: str) -> str:
    if is_name(text):
        return text
    raise refuse(
        Reason.INVALID_NAME,
        f"{_shown(text)} is not a {what}: use lower-case letters, digits and '-', beginning with a letter or digit, "
        f"at most {NAME_LENGTH_MAX} characters",
    )


def _not_an_identity(why: str) -> Refused:
    return refuse(Reason.BAD_CERTIFICATE, f"the certificate names no node: {why}")


def _shown(text: str) -> str:
    """Quote foreign text for a message, shortened and with its control characters escaped."""
    return ascii(text if len(text) <= 80 else text[:77] + "...")
