"""Bad input, from outside: what a foreign client is told, in a status or a TLS alert, and what a refused `bcd` says."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import h2.events
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from h2.config import H2Configuration
from h2.connection import H2Connection

from bettercompute.cli import bcd
from bettercompute.cli.client import ApiClient
from bettercompute.pki import certificates, keyfiles, trust
from bettercompute.pki.certificates import Authority
from bettercompute.pki.identity import NodeIdentity
from bettercompute.protocol import messages
from bettercompute.system import system_world
from tests.e2e.conftest import BCD, READY_S, WAIT_S, Stack, until

# A stack and daemons start here, beside whatever else the machine does.
pytestmark = pytest.mark.timeout(300)

SERVICE = "/bettercompute.agent.v1.AgentGateway"
SESSION, JOIN = f"{SERVICE}/Session", f"{SERVICE}/Join"
HOUR_MS = 3_600_000
REFUSED, NEEDS_REJOIN = 2, 4
WORLD = system_world()


def provision(client: ApiClient, node_id: str, folder: Path) -> Path:
    """Do what `nodes provision` does, without a process; a node that there is loses its identity."""
    key = certificates.generate_key()
    csr = x509.load_der_x509_csr(certificates.make_csr(key)).public_bytes(Encoding.PEM).decode()
    answer = client.post(f"/v1/nodes/{node_id}/provision", {"csr_pem": csr, "role": "node", "replace": True})
    folder.mkdir(parents=True)
    (folder / "node.key").write_bytes(keyfiles.key_to_pem(key))
    (folder / "node.pem").write_text(answer["chain_pem"])
    (folder / "serving-ca.pem").write_text(answer["serving_ca_pem"])
    (folder / "trust-bundle.bin").write_bytes(base64.b64decode(answer["trust_bundle_base64"]))
    (folder / "identity.json").write_text(json.dumps(answer["identity"]))
    return folder


@dataclass(frozen=True)
class Target:
    """The session's stack, and one node of it that never gets as far as a session."""

    stack: Stack
    node_id: str
    identity: Path

    @property
    def address(self) -> tuple[str, int]:
        gateway = urlsplit(self.stack.ready["gateway"])
        assert gateway.hostname is not None
        assert gateway.port is not None
        return gateway.hostname, gateway.port

    def authority(self, name: str) -> Authority:
        return keyfiles.KeyFolder(Path(self.stack.ready["state_dir"]) / "pki").authority(name)

    def hello(self, **changes: object) -> bytes:
        values: dict[str, object] = {
            "node_id": self.node_id,
            "role": messages.AGENT_ROLE_NODE,
            "boot_id": "boot-1",
            "journal_id": "journal-1",
            "proto_min": 1,
            "proto_max": 1,
        }
        hello = messages.Hello(**(values | changes))  # type: ignore[arg-type] # a test names what it means
        return messages.AgentFrame(hello=hello).SerializeToString()


@pytest.fixture(scope="module")
def target(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Target:
    node_id = f"bad-input-{os.getpid()}"
    return Target(stack, node_id, provision(stack.client, node_id, tmp_path_factory.mktemp("target") / "identity"))


# A foreign gRPC client.


@dataclass(frozen=True)
class Answer:
    """How a call was refused."""

    code: grpc.StatusCode
    reason: str
    message: str


def refusal(target: Target, *requests: bytes, path: str = SESSION, certificate: bool = True) -> Answer:
    """Call through grpcio, which sends the requests and half-closes."""
    identity = target.identity
    credentials = grpc.ssl_channel_credentials(
        root_certificates=(identity / "serving-ca.pem").read_bytes(),
        private_key=(identity / "node.key").read_bytes() if certificate else None,
        certificate_chain=(identity / "node.pem").read_bytes() if certificate else None,
    )
    with grpc.secure_channel("{}:{}".format(*target.address), credentials) as channel:
        method: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
        call = method(iter(requests), timeout=WAIT_S)
        with pytest.raises(grpc.RpcError):
            next(call)
        trailers = dict(call.trailing_metadata())
        return Answer(call.code(), str(trailers.get("x-bc-reason")), call.details())


def test_the_first_frame_is_not_hello(target: Target) -> None:
    answer = refusal(target, messages.AgentFrame(heartbeat=messages.Heartbeat()).SerializeToString())
    assert (answer.code, answer.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "not-hello")
    assert answer.message == "the first frame is 'heartbeat': it must be hello"


def test_another_nodes_id(target: Target) -> None:
    answer = refusal(target, target.hello(node_id="somebody-else"))
    assert (answer.code, answer.reason) == (grpc.StatusCode.PERMISSION_DENIED, "node-mismatch")
    assert "'somebody-else'" in answer.message
    assert repr(target.node_id) in answer.message


def test_a_role_that_is_not_the_certificates(target: Target) -> None:
    answer = refusal(target, target.hello(role=messages.AGENT_ROLE_SITE))
    assert (answer.code, answer.reason) == (grpc.StatusCode.PERMISSION_DENIED, "role-mismatch")
    assert "site" in answer.message
    assert "node" in answer.message


@pytest.mark.parametrize("missing", ["boot_id", "journal_id"])
def test_a_hello_without(target: Target, missing: str) -> None:
    answer = refusal(target, target.hello(**{missing: ""}))
    assert (answer.code, answer.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "bad-hello")
    assert missing in answer.message


def test_a_frame_of_6_mib(target: Target) -> None:
    answer = refusal(target, bytes(6 << 20))
    assert (answer.code, answer.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "frame-too-large")
    assert f"{6 << 20} bytes" in answer.message
    assert "the limit is" in answer.message


def test_an_unknown_method(target: Target) -> None:
    answer = refusal(target, b"", path=f"{SERVICE}/Nothing")
    assert (answer.code, answer.reason) == (grpc.StatusCode.UNIMPLEMENTED, "unknown-method")
    assert "Nothing" in answer.message


def test_no_certificate(target: Target) -> None:
    answer = refusal(target, target.hello(), certificate=False)
    assert (answer.code, answer.reason) == (grpc.StatusCode.UNAUTHENTICATED, "no-certificate")
    assert "bcd join" in answer.message


def test_a_join_of_two_messages(target: Target) -> None:
    request = messages.JoinRequest(csr=b"x").SerializeToString()
    answer = refusal(target, request, request, path=JOIN, certificate=False)
    assert (answer.code, answer.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "bad-request")
    assert "second request message" in answer.message


# What no gRPC client sends.


def client_context(target: Target, identity: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(target.identity / "serving-ca.pem"))
    context.set_alpn_protocols(["h2"])
    if identity is not None:
        context.load_cert_chain(identity / "node.pem", identity / "node.key")
    return context


@contextlib.contextmanager
def connected(target: Target, context: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    host, _ = target.address
    with (
        socket.create_connection(target.address, timeout=WAIT_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as wrapped,
    ):
        yield wrapped


def raw_answer(target: Target, *, data: bytes = b"", **changes: str) -> dict[str, str]:
    """Make one HTTP/2 request, and return the header fields of the answer, trailers among them, and its `body`."""
    fields = {
        ":method": "POST",
        ":scheme": "https",
        ":path": SESSION,
        ":authority": "gateway",
        "content-type": "application/grpc",
        "te": "trailers",
    } | {name.replace("__", ":").replace("_", "-"): value for name, value in changes.items()}
    wire = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
    wire.initiate_connection()
    wire.send_headers(1, list(fields.items()), end_stream=not data)
    if data:
        wire.send_data(1, data, end_stream=True)
    answer: dict[str, str] = {}
    with connected(target, client_context(target, target.identity)) as tls:
        while True:
            tls.sendall(wire.data_to_send())
            received = tls.recv(65_536)
            assert received, f"the connection ended after {answer}"
            for event in wire.receive_data(received):
                if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                    answer |= {str(name): str(value) for name, value in event.headers}
                if isinstance(event, h2.events.DataReceived):
                    answer["body"] = answer.get("body", "") + event.data.decode("latin-1")
                if isinstance(event, h2.events.StreamEnded):
                    return answer


def test_a_truncated_prefix(target: Target) -> None:
    answer = raw_answer(target, data=b"\0\0\0")
    assert (answer["grpc-status"], answer["x-bc-reason"]) == ("3", "invalid-frame")
    assert "3 of 5 bytes came" in answer["grpc-message"]


def test_get(target: Target) -> None:
    answer = raw_answer(target, __method="GET")
    assert (answer[":status"], answer["allow"]) == ("405", "POST")
    assert "every request is a POST" in answer["body"]


def test_a_wrong_content_type(target: Target) -> None:
    answer = raw_answer(target, data=b"{}", content_type="application/json")
    assert answer[":status"] == "415"
    assert "takes content-type application/grpc" in answer["body"]


# TLS.


def leaf_for(issuer: Authority, identity: Path, *, age_ms: int = 0) -> x509.Certificate:
    """Make a certificate like the one of `identity`, for its key, `age_ms` ago."""
    record = json.loads((identity / "identity.json").read_text())
    return certificates.make_node_leaf(
        issuer,
        public_key=keyfiles.key_from_pem((identity / "node.key").read_bytes(), name="node.key").public_key(),
        identity=NodeIdentity(
            trust_domain=record["trust_domain"], site=record["site"], node_id=record["node_id"], role=record["role"]
        ),
        serial=WORLD.ids.random_bytes(certificates.SERIAL_BYTES),
        now_ms=WORLD.clock.now_ms() - age_ms,
    )


def foreign_ca() -> Authority:
    return certificates.make_node_ca(
        serial=WORLD.ids.random_bytes(certificates.SERIAL_BYTES), now_ms=WORLD.clock.now_ms()
    )


def server_leaf(target: Target) -> x509.Certificate:
    """Make the node's certificate as it is, but for servers only."""
    node_ca, like = target.authority("node-ca"), leaf_for(target.authority("node-ca"), target.identity)
    builder = x509.CertificateBuilder(
        issuer_name=like.issuer,
        subject_name=like.subject,
        public_key=like.public_key(),
        serial_number=like.serial_number,
        not_valid_before=like.not_valid_before_utc,
        not_valid_after=like.not_valid_after_utc,
    )
    for extension in like.extensions:
        usage = isinstance(extension.value, x509.ExtendedKeyUsage)
        value = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]) if usage else extension.value
        builder = builder.add_extension(value, critical=extension.critical)
    return builder.sign(node_ca.key, hashes.SHA256())


def alert(target: Target, context: ssl.SSLContext) -> str:
    """Return the alert that ends the connection; in TLS 1.3 it comes after the client's own handshake is done."""
    try:
        with connected(target, context) as tls:
            while tls.recv(65_536):
                pass
    except ssl.SSLError as error:
        return str(error.reason)
    return "none"


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("foreign CA", "TLSV1_ALERT_UNKNOWN_CA"),
        ("expired", "SSLV3_ALERT_CERTIFICATE_EXPIRED"),
        ("not yet valid", "SSLV3_ALERT_BAD_CERTIFICATE"),
        ("wrong usage", "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE"),
    ],
)
def test_a_certificate_that_tls_refuses(target: Target, tmp_path: Path, wrong: str, expected: str) -> None:
    node_ca = target.authority("node-ca")
    if wrong == "wrong usage":
        leaf = server_leaf(target)
    else:
        issuer = foreign_ca() if wrong == "foreign CA" else node_ca
        age_ms = {"expired": 25 * HOUR_MS, "not yet valid": -HOUR_MS}.get(wrong, 0)
        leaf = leaf_for(issuer, target.identity, age_ms=age_ms)
    (tmp_path / "node.pem").write_bytes(leaf.public_bytes(Encoding.PEM))
    (tmp_path / "node.key").write_bytes((target.identity / "node.key").read_bytes())
    assert alert(target, client_context(target, tmp_path)) == expected


def test_tls_1_2(target: Target) -> None:
    context = client_context(target, target.identity)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert alert(target, context) == "TLSV1_ALERT_PROTOCOL_VERSION"


@pytest.mark.parametrize("offered", [[], ["http/1.1"]])
def test_a_client_that_does_not_offer_http_2(target: Target, offered: list[str]) -> None:
    context = client_context(target, None)
    context.set_alpn_protocols(offered)
    with connected(target, context) as tls:
        assert tls.selected_alpn_protocol() is None
        received = b""
        with contextlib.suppress(ConnectionResetError, BrokenPipeError, ssl.SSLEOFError):
            tls.sendall(b"GET / HTTP/1.1\r\nHost: gateway\r\n\r\n")
            received = tls.recv(65_536)
        assert received == b""


# A real bcd.


class Node:
    """A `bcd` process with its own state folder, and what it says."""

    def __init__(self, folder: Path, identity: Path, gateway: str) -> None:
        self.config, self.log = folder / "bcd.toml", folder / "bcd.log"
        self.config.write_text(
            f'state_dir = "{folder / "state"}"\nidentity_import = "{identity}"\ngateway_url = ["{gateway}"]\n'
            '[log]\nformat = "json"\n'
        )
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*BCD, "node", "--config", str(self.config)], stdout=log, stderr=log)

    def said(self, event: str, *words: str) -> bool:
        """Whether a line of this event says all these words. The last line may be half written."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return any(line["event"] == event and all(word in line["why"] for word in words) for line in lines)

    def until_said(self, event: str, *words: str) -> None:
        def found() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return self.said(event, *words)

        try:
            until(found, what=f"{event} {words}")
        except AssertionError as error:
            raise AssertionError(f"{error}; bcd said:\n{self.log.read_text()}") from None

    def status(self, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, object]]:
        """Ask it as `bcd status --json` does."""
        capsys.readouterr()
        code = bcd.run(["status", "--json", "--config", str(self.config)])
        return code, json.loads(capsys.readouterr().out)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(READY_S)


@contextlib.contextmanager
def running(folder: Path, identity: Path, target: Target) -> Iterator[Node]:
    node = Node(folder, identity, target.stack.ready["gateway"])
    try:
        yield node
    finally:
        code = node.stop()
    assert code == 0, node.log.read_text()


def give_certificate(identity: Path, leaf: x509.Certificate, issuer: Authority) -> None:
    """Put another certificate for the same key into an identity folder."""
    chain = leaf.public_bytes(Encoding.PEM) + issuer.certificate.public_bytes(Encoding.PEM)
    (identity / "node.pem").write_bytes(chain)
    record = json.loads((identity / "identity.json").read_text())
    record["certificate_serial"] = certificates.serial_text(leaf)
    (identity / "identity.json").write_text(json.dumps(record))


def give_pin(identity: Path, signing: Path, pin: str) -> None:
    """Make an identity folder trust another serving CA."""
    held = trust.read_own((identity / "trust-bundle.bin").read_bytes())
    key = keyfiles.key_from_pem(signing.read_bytes(), name=str(signing))
    content = replace(held.content, serving_ca_pins=(pin,))
    other = trust.sign(content, version=held.version + 1, key=key, now_ms=WORLD.clock.now_ms())
    (identity / "trust-bundle.bin").write_bytes(other.signed)


@pytest.fixture
def identity(target: Target, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """An identity folder with one thing wrong in it."""
    wrong = request.param
    folder = provision(target.stack.client, f"{wrong}-{os.getpid()}", tmp_path / "identity")
    node_ca = target.authority("node-ca")
    if wrong == "foreign":
        issuer = foreign_ca()
        give_certificate(folder, leaf_for(issuer, folder), issuer)
    elif wrong == "expired":
        give_certificate(folder, leaf_for(node_ca, folder, age_ms=25 * HOUR_MS), node_ca)
    else:
        signing = Path(target.stack.ready["state_dir"]) / "pki" / "join-signing.key"
        give_pin(folder, signing, certificates.spki_sha256(foreign_ca().certificate))
    return folder


@pytest.mark.parametrize(
    ("identity", "words", "reason"),
    [
        ("foreign", ("refused our certificate", "unknown CA"), "unknown-ca"),
        ("pin", ("pinned serving CA", "not our gateway"), "pin-mismatch"),
    ],
    indirect=["identity"],
)
def test_bcd_says_what_is_wrong_with_its_identity(
    target: Target,
    identity: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    reason: str,
) -> None:
    with running(tmp_path, identity, target) as node:
        node.until_said("no session", *words)
        found, status = node.status(capsys)
        assert (found, status["reason_code"], status["connected"]) == (1, reason, False)
        assert all(word in str(status["reason"]) for word in words)
        assert not node.said("NEEDS_REJOIN")


@pytest.mark.parametrize("identity", ["expired"], indirect=True)
def test_bcd_says_that_no_expired_certificate_helps_it(
    target: Target, identity: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # It is older than the CA that signed it, so that nobody comes back by it.
    with running(tmp_path, identity, target) as node:
        node.until_said("NEEDS_REJOIN", "not valid at validation time")
        code, status = node.status(capsys)
        assert (code, status["connected"], status["needs_rejoin"]) == (NEEDS_REJOIN, False, True)


def test_bcd_says_that_it_was_revoked(target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client, node_id = target.stack.client, f"revoked-{os.getpid()}"
    identity = provision(client, node_id, tmp_path / "identity")
    with running(tmp_path, identity, target) as node:
        until(lambda: client.get(f"/v1/nodes/{node_id}")["state"] == "connected", what="the node's session")
        provision(client, node_id, tmp_path / "another")
        node.until_said("NEEDS_REJOIN", "revoked")
        code, status = node.status(capsys)
        assert (code, status["reason_code"], status["needs_rejoin"]) == (NEEDS_REJOIN, "revoked", True)
        assert "revoked" in str(status["reason"])


def test_bcd_without_an_identity_ends_and_says_how_to_join(tmp_path: Path) -> None:
    config = tmp_path / "bcd.toml"
    config.write_text(f'state_dir = "{tmp_path / "state"}"\n')
    ended = run_bcd("node", "--config", str(config))
    assert ended.returncode == REFUSED
    assert "has no identity" in ended.stderr
    assert "bcd join" in ended.stderr


# Tokens.


def run_bcd(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BCD, *arguments], capture_output=True, text=True, timeout=WAIT_S, check=False)


def join(folder: Path, token: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    config = folder / "bcd.toml"
    config.write_text(f'state_dir = "{folder / "state"}"\n')
    return run_bcd("join", "--token", token, "--config", str(config))


def make_token(client: ApiClient, **wanted: object) -> dict[str, str]:
    made = client.post("/v1/tokens", {"role": "node", **wanted})
    assert isinstance(made, dict)
    return made


def token_state(client: ApiClient, token_id: str) -> str:
    return next(str(token["state"]) for token in client.pages("/v1/tokens") if token["token_id"] == token_id)


def assert_join_refused(ended: subprocess.CompletedProcess[str], *words: str) -> None:
    assert ended.returncode == REFUSED, ended
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("error: "), ended.stderr
    assert all(word in last for word in words), last


def test_a_token_that_was_used(stack: Stack, tmp_path: Path) -> None:
    made = make_token(stack.client, node_id=f"first-{os.getpid()}")
    first = join(tmp_path / "first", made["token"])
    assert first.returncode == 0, first.stderr
    assert_join_refused(
        join(tmp_path / "second", made["token"]),
        made["token_id"],
        f"was used by node first-{os.getpid()}",
        "make another one",
    )


def test_a_token_that_has_expired(stack: Stack, tmp_path: Path) -> None:
    made = make_token(stack.client, ttl_ms=1_000)
    until(lambda: token_state(stack.client, made["token_id"]) == "expired", what="the token's end")
    assert_join_refused(join(tmp_path / "node", made["token"]), made["token_id"], "has expired", "make another one")


def test_a_token_for_another_role(stack: Stack, tmp_path: Path) -> None:
    made = make_token(stack.client, role="site")
    assert_join_refused(join(tmp_path / "node", made["token"]), made["token_id"], "is for role site, not node")


def test_a_token_that_was_cut(stack: Stack, tmp_path: Path) -> None:
    token = make_token(stack.client)["token"]
    ended = join(tmp_path / "node", token[:60] + token[64:])
    assert_join_refused(ended, "join token is malformed", "a part is missing or was altered")
