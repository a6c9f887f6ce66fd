"""What meets bytes of strangers: one target each. It takes any bytes, and only `Refused` may come out of it.

Every target begins with seeds that pass, so that what is mutated gets past the first check. `test_fuzz` runs each a
little; `make fuzz` runs them under atheris, which sees which branch an input took.
"""

from __future__ import annotations

import functools
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from bettercompute.daemon import config as daemon_config
from bettercompute.daemon import control
from bettercompute.daemon.journal import DATABASE_NAME, JournalDatabase
from bettercompute.daemon.journal_records import AppendEvents, EventEntry, JournalLimits, PutDocument
from bettercompute.delivery import selectors
from bettercompute.errors import Refused
from bettercompute.pki import (
    certificates,
    discovery,
    identity,
    identity_file,
    join_challenge,
    join_token,
    sealed,
    signatures,
    trust,
)
from bettercompute.pki.identity import NodeIdentity
from bettercompute.pki.trust import TrustContent
from bettercompute.protocol import messages
from bettercompute.protocol.envelopes import x509pop_input
from bettercompute.protocol.frames import decode_message, encode_message
from bettercompute.protocol.kinds import KINDS, pack_payload, unpack_payload
from bettercompute.protocol.statuses import decode_grpc_message, parse_attempt, parse_pushback, parse_server_time
from bettercompute.protocol.validation import validate_for_store
from bettercompute.server import config as server_config
from bettercompute.services.attestors.challenges import Challenges
from bettercompute.services.attestors.x509pop import X509PopAttestor
from bettercompute.services.installation import Installation
from bettercompute.services.issuing import Issuer, Request
from bettercompute.services.keys import ServiceKeys
from bettercompute.system import system_world
from bettercompute.testing.postgres import MEMORY
from bettercompute.transport import tls
from bettercompute.transport.grpc_call import MessageReader
from bettercompute.transport.h2_client import H2Client
from bettercompute.transport.h2_server import H2Server
from bettercompute.transport.limits import DEFAULT_LIMITS

NOW_MS = 1_800_000_000_000
KEY = ec.derive_private_key(0xC0FFEE, ec.SECP256R1())
LINES = Path(__file__).parents[1] / "vectors" / "lines"


@dataclass(frozen=True, slots=True)
class Target:
    """`run` takes bytes; `seeds` are inputs that it accepts."""

    run: Callable[[bytes], object]
    seeds: Callable[[], Sequence[bytes]]
    slow: bool = False
    """It touches a disk: a run of the tests can afford few of it."""


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def agent_frame(data: bytes) -> None:
    """What a gateway does with a frame before any rule sees it; what passes survives a relay byte for meaning."""
    frame = decode_message(messages.AgentFrame, data)
    validate_for_store(frame)
    assert decode_message(messages.AgentFrame, encode_message(frame)) == frame


def server_frame(data: bytes) -> None:
    frame = decode_message(messages.ServerFrame, data)
    if frame.HasField("command"):
        body = decode_message(messages.CommandBody, frame.command.body)
        if body.kind in KINDS:
            unpack_payload(KINDS[body.kind], body)


def grpc_prefix(data: bytes) -> None:
    """Messages are the same however the bytes were cut."""
    whole, pieces = (MessageReader(limit=1 << 16) for _ in range(2))
    read: list[list[bytes]] = []
    ended: list[str] = []
    for reader, size in ((whole, max(1, len(data))), (pieces, 3)):
        found: list[bytes] = []
        try:
            for start in range(0, len(data), size):
                found += reader.feed(data[start : start + size])
            reader.finish()
            ended.append("")
        except Refused as refused:
            ended.append(str(refused.reason))
        read.append(found)
    assert read[0] == read[1][: len(read[0])]
    assert bool(ended[0]) == bool(ended[1])


def h2_server(data: bytes) -> None:
    server = H2Server(limits=DEFAULT_LIMITS, now_ms=0)
    for start in range(0, len(data), 512):
        server.receive(data[start : start + 512], now_ms=start)
        server.output(1 << 16)


def h2_client(data: bytes) -> None:
    client = H2Client(limits=DEFAULT_LIMITS, now_ms=0, authority="gw")
    client.output(1 << 16)
    for start in range(0, len(data), 512):
        client.receive(data[start : start + 512], now_ms=start)
        client.output(1 << 16)


def headers(data: bytes) -> None:
    text = _text(data)
    decode_grpc_message(text)
    for parse in (parse_pushback, parse_attempt, parse_server_time):
        found = parse(text)
        assert found is None or found >= 0


def jwe(data: bytes) -> None:
    sealed.unseal(KEY, sealed.JOIN_TOKEN, _text(data), now_ms=NOW_MS)


def token(data: bytes) -> None:
    """The body of a token: with its right checksum, which no mutation would hit."""
    checked = data + join_token._checksum(data)
    join_token.parse_token(join_token.PREFIX + sealed.base64url(checked))


def certificate(data: bytes) -> None:
    leaf = certificates.verify_chain([data], roots=[_node_ca().certificate], use=certificates.Use.CLIENT, now_ms=NOW_MS)
    identity.identity_of(leaf)


def chain_of_unknown_server(data: bytes) -> None:
    """What a probe sees of a server before anything of it is verified."""
    assert tls.find_pinned((data,), pin=bytes(32)) is None


def request(data: bytes) -> None:
    certificates.check_csr(data)


def spiffe(data: bytes) -> None:
    found = identity.parse_uris(_text(data).split("\n"))
    assert identity.parse_uris(found.uris) == found


def bundle(data: bytes) -> None:
    trust.read_own(data)


def signature(data: bytes) -> None:
    signatures.verify_raw(KEY.public_key(), data, b"what was signed")


def identity_record(data: bytes) -> None:
    identity_file.parse(data, path="identity.json")


def toml(data: bytes) -> None:
    try:
        values = tomllib.loads(_text(data))
    except tomllib.TOMLDecodeError:
        return
    daemon_config.parse(values, path=Path("config.toml"))


def server_toml(data: bytes) -> None:
    try:
        values = tomllib.loads(_text(data))
    except tomllib.TOMLDecodeError:
        return
    server_config.validate(values, where="config.toml")


def journal_file(data: bytes) -> None:
    """A journal of which the disk has made something else: it is opened, or set aside and begun anew."""
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        for name, content in (*_journal().items(), (DATABASE_NAME, data)):
            (Path(folder) / name).write_bytes(content)
        journal = _opened(Path(folder))
        journal.apply([PutDocument("after", b"it goes on")])
        journal.close()


def selector(data: bytes) -> None:
    selectors.parse(_text(data))


def x509pop_evidence(data: bytes) -> None:
    """What JoinService reads of a node that says its certificate has expired."""
    asked = messages.JoinRequest(evidence=data)
    X509PopAttestor(_issuer()).examine(asked, Request(csr_der=b"csr", public_key=KEY.public_key()), role="node")


def discovery_assertion(data: bytes) -> None:
    found = discovery.verify_assertion(data, roots=[_node_ca().certificate], trust_domain="bc.local", now_ms=NOW_MS)
    assert found.site_agent.role == "site"


def challenge_answer(data: bytes) -> None:
    """What comes back for a challenge, beside a secret that is sealed as it should be."""
    sealed_token = join_token.seal_proof(
        bytes(32), join_encryption_key=KEY.public_key(), csr_der=b"csr", role="node", now_ms=NOW_MS
    )
    challenges = Challenges("provisioned", _issuer().source, system_world())
    asked = messages.JoinRequest(sealed_token=sealed_token, challenge_answer=data)
    challenges.examine(asked, Request(csr_der=b"csr", public_key=KEY.public_key()), role="node")


def control_request(data: bytes) -> None:
    control.parse_request(data)


def _memory() -> Path | None:
    return MEMORY if MEMORY.is_dir() else None


def _opened(folder: Path) -> JournalDatabase:
    limits = JournalLimits(max_bytes=1 << 20, reserve_bytes=1 << 18, ballast_bytes=1 << 12, wal_bytes=1 << 16)
    journal = JournalDatabase(folder, limits=limits)
    journal.open(new_journal_id=lambda: "journal-1", new_birth=lambda: bytes(16), stamp="1")
    return journal


@functools.cache
def _journal() -> dict[str, bytes]:
    """A journal's files as a daemon leaves them that was ended in order."""
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        journal = _opened(Path(folder))
        entry = EventEntry(seq=1, event_id="e1", event=messages.Event(type="t").SerializeToString(), recovered=False)
        journal.apply([AppendEvents((entry,)), PutDocument("desired-state", b"body")])
        journal.close()
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@functools.cache
def _issuer() -> Issuer:
    keys = ServiceKeys(
        node_cas=(_node_ca(),),
        join_signing_keys=(KEY,),
        join_encryption_keys=(KEY,),
        serving_cas=(_node_ca().certificate,),
        command_roots=(_node_ca().certificate,),
    )
    return Issuer(keys, Installation(trust_domain="bc.local", gateway_urls=("https://gw:443",)), system_world())


def _x509pops() -> list[bytes]:
    signed = x509pop_input(csr=b"csr", node_id="n1", client_time_ms=NOW_MS)
    evidence = messages.X509PopEvidence(
        certificate_chain=_leaves(), client_time_ms=NOW_MS, proof=signatures.sign(KEY, signed)
    )
    return [evidence.SerializeToString()]


def _assertions() -> list[bytes]:
    agent = certificates.make_node_leaf(
        _node_ca(),
        public_key=KEY.public_key(),
        identity=NodeIdentity(trust_domain="bc.local", site="oslo", node_id="s1", role="site"),
        serial=bytes(16),
        now_ms=NOW_MS,
    )
    assertion = messages.site.DiscoveryAssertion(
        site_node_id="s1",
        site="oslo",
        mac_address="00:00:5e:00:53:01",
        nonce_sha256=bytes(32),
        issued_at_ms=NOW_MS,
        not_after_ms=NOW_MS + 1,
    )
    return [discovery.sign_assertion(assertion, key=KEY, chain_der=[agent.public_bytes(Encoding.DER)])]


def _challenge_answers() -> list[bytes]:
    challenge = join_challenge.make_challenge(
        KEY, attestor="provisioned", csr_der=b"csr", nonce=bytes(16), expires_at_ms=NOW_MS
    )
    sealed_secret = join_token.seal_proof(
        bytes(32),
        join_encryption_key=KEY.public_key(),
        csr_der=b"csr",
        role="node",
        now_ms=NOW_MS,
        challenge=challenge,
    )
    return [messages.SealedChallengeAnswer(challenge=challenge, sealed_secret=sealed_secret).SerializeToString()]


@functools.cache
def _node_ca() -> certificates.Authority:
    return certificates.make_node_ca(serial=bytes(16), now_ms=NOW_MS)


def _frames() -> list[bytes]:
    return [bytes.fromhex(row) for path in sorted(LINES.iterdir()) for row in path.read_text("ascii").split()]


def _commands() -> list[bytes]:
    bodies = [
        messages.CommandBody(command_id="c", node_id="n", kind=kind.name, payload=pack_payload(kind.payload()))
        for kind in KINDS.values()
    ]
    return [
        messages.ServerFrame(command=messages.Command(body=body.SerializeToString())).SerializeToString()
        for body in bodies
    ]


def _prefixed() -> list[bytes]:
    return [b"".join(b"\0" + len(frame).to_bytes(4, "big") + frame for frame in _frames())]


def _client_bytes() -> list[bytes]:
    client = H2Client(limits=DEFAULT_LIMITS, now_ms=0, authority="gw")
    opened = client.output(1 << 16)
    return [opened, opened + bytes.fromhex("0000080600000000000102030405060708")]


def _server_bytes() -> list[bytes]:
    server = H2Server(limits=DEFAULT_LIMITS, now_ms=0)
    server.receive(_client_bytes()[0], now_ms=0)
    return [server.output(1 << 16)]


def _leaves() -> list[bytes]:
    leaf = certificates.make_node_leaf(
        _node_ca(),
        public_key=KEY.public_key(),
        identity=NodeIdentity(trust_domain="bc.local", site="default", node_id="n1", role="node"),
        serial=bytes(16),
        now_ms=NOW_MS,
    )
    return [leaf.public_bytes(Encoding.DER)]


def _bundles() -> list[bytes]:
    content = TrustContent(
        trust_domain="bc.local",
        command_roots=(),
        join_signing_keys=(KEY.public_key(),),
        join_encryption_keys=(KEY.public_key(),),
        serving_ca_pins=("ab" * 32,),
    )
    return [trust.sign(content, version=1, key=KEY, now_ms=NOW_MS).signed]


def _records() -> list[bytes]:
    record = identity_file.IdentityRecord(
        certificate_serial="ab",
        node_id="n1",
        site="default",
        trust_domain="bc.local",
        role="node",
        identity_generation=1,
        gateway_urls=("https://gw:443",),
    )
    return [identity_file.encode(record)]


def _sealed() -> list[bytes]:
    return [sealed.seal(KEY.public_key(), sealed.JOIN_TOKEN, {"secret": "s"}, now_ms=NOW_MS, lifetime_ms=1000).encode()]


def _token_bodies() -> list[bytes]:
    printed = join_token.format_token(
        join_token.JoinToken(
            secret=bytes(join_token.SECRET_BYTES),
            gateway_urls=("https://gw:443",),
            serving_ca_pins=("ab" * 32,),
            join_signing_key=KEY.public_key(),
            join_encryption_key=KEY.public_key(),
        )
    )
    return [sealed.base64url_decode(printed.removeprefix(join_token.PREFIX))[: -join_token._CHECKSUM_BYTES]]


def _uris() -> list[bytes]:
    found = NodeIdentity(trust_domain="bc.local", site="default", node_id="n1", role="node")
    return ["\n".join(found.uris).encode()]


TARGETS = {
    "agent_frame": Target(agent_frame, _frames),
    "server_frame": Target(server_frame, _commands),
    "grpc_prefix": Target(grpc_prefix, _prefixed),
    "h2_server": Target(h2_server, _client_bytes),
    "h2_client": Target(h2_client, _server_bytes),
    "headers": Target(headers, lambda: [b"1500", b"caf%C3%A9 %ZZ"]),
    "jwe": Target(jwe, _sealed),
    "token": Target(token, _token_bodies),
    "certificate": Target(certificate, _leaves),
    "chain_of_unknown_server": Target(chain_of_unknown_server, _leaves),
    "request": Target(request, lambda: [certificates.make_csr(KEY)]),
    "spiffe": Target(spiffe, _uris),
    "x509pop_evidence": Target(x509pop_evidence, _x509pops),
    "discovery_assertion": Target(discovery_assertion, _assertions),
    "challenge_answer": Target(challenge_answer, _challenge_answers),
    "control_request": Target(
        control_request,
        lambda: [b'{"rejoin": {"token": "t", "role": "node", "node_id": "", "attestor": "", "evidence_hex": "00"}}'],
    ),
    "bundle": Target(bundle, _bundles),
    "signature": Target(signature, lambda: [signatures.sign_raw(KEY, b"what was signed")]),
    "identity_record": Target(identity_record, _records),
    "toml": Target(toml, lambda: [b'gateway_url = ["https://gw:443"]\n[log]\nlevel = "info"\n']),
    "server_toml": Target(server_toml, lambda: [b'[gateway]\nname = "gw"\n']),
    "journal_file": Target(journal_file, lambda: [_journal()[DATABASE_NAME]], slow=True),
    "selector": Target(selector, lambda: [b"gpu=h100,site!=x"]),
}
