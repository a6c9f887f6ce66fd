"""Which roles need which files, and what is said when one is missing or wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from bettercompute.cli import better_compute
from bettercompute.errors import Refused
from bettercompute.pki import certificates, keyfiles
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.pki.rotation import Purpose
from bettercompute.server.app import ALL_ROLES, Role, control_plane, needs_service_keys
from bettercompute.server.config import Config, GatewaySection, validate
from bettercompute.server.examining import held_certificates
from bettercompute.server.keys import (
    GATEWAY_FILES,
    SERVING_FILES,
    advertised_url,
    check_serving_files,
    serving_secrets,
    warn_of_needless_keys,
)
from bettercompute.services import rotation_files
from bettercompute.services.pki_setup import initialise, issue_gateway
from tests.unit.server.internal_site import WORLD, Site

REMOTE = GatewaySection(services_url="https://api.internal:8444")


@pytest.fixture
def installation(tmp_path: Path) -> KeyFolder:
    folder = KeyFolder(tmp_path / "keys")
    initialise(folder, world=WORLD)
    issue_gateway(folder, names=["api.internal"], world=WORLD)
    return folder


@pytest.fixture
def bundle(installation: KeyFolder, tmp_path: Path) -> KeyFolder:
    """What `pki issue-gateway --out` writes."""
    out = KeyFolder(tmp_path / "gateway")
    issue_gateway(installation, names=["gw.example.org"], world=WORLD, out=out)
    return out


def check(folder: KeyFolder, *, files: tuple[str, ...] = GATEWAY_FILES, later_ms: int = 0) -> None:
    check_serving_files(folder, files=files, what="a gateway", now_ms=WORLD.clock.now_ms() + later_ms)


@pytest.mark.parametrize(
    ("roles", "remote", "needed"),
    [
        (ALL_ROLES, False, True),
        (ALL_ROLES, True, True),
        ({Role.API}, True, True),
        ({Role.GATEWAY}, False, True),
        ({Role.GATEWAY}, True, False),
        ({Role.GATEWAY, Role.WORKER}, True, False),
        ({Role.WORKER}, False, False),
    ],
)
def test_who_needs_the_service_keys(roles: set[Role], remote: bool, needed: bool) -> None:
    config = Config(gateway=REMOTE) if remote else Config()
    assert needs_service_keys(frozenset(roles), config) is needed


def test_a_gateways_bundle_is_all_it_needs_and_no_more(installation: KeyFolder, bundle: KeyFolder) -> None:
    assert sorted(path.name for path in bundle.folder.iterdir()) == sorted(GATEWAY_FILES)
    check(bundle)
    check(installation, files=SERVING_FILES)
    named = certificates.load_certificate(certificates.chain_from_pem(installation.pem("gateway"))[0])
    assert named.serial_number != bundle.certificate("gateway").serial_number, "the folder's own leaf stays"
    with capture_logs() as logs:
        warn_of_needless_keys(bundle)
        assert not logs
        warn_of_needless_keys(installation)
    assert logs[0]["keys"] == [
        "command-root",
        "join-encryption",
        "join-signing",
        "node-ca",
        "serving-ca",
        "worker",
    ]


def test_the_command_writes_the_bundle_and_says_where_it_goes(installation: KeyFolder, tmp_path: Path) -> None:
    out = tmp_path / "new" / "bundle"
    command = ["pki", "issue-gateway", "--san", "gw.example.org", "--dir", str(installation.folder), "--out", str(out)]
    ended = CliRunner().invoke(better_compute.app, [*command, "--json"])
    assert ended.exit_code == 0, ended.output
    facts = json.loads(ended.stdout)
    assert (facts["file"], facts["names"]) == (str(out / "gateway.pem"), ["gw.example.org"])
    assert f"copy {out} to the gateway's host" in ended.stderr.replace("\n", " ")
    check(KeyFolder(out))


@pytest.mark.parametrize("name", GATEWAY_FILES)
def test_a_missing_file_is_named_with_the_cure(bundle: KeyFolder, name: str) -> None:
    bundle.path(name).unlink()
    with pytest.raises(Refused) as refused:
        check(bundle)
    assert (
        f"which lacks {name}: where the CAs' keys are, run `better-compute pki issue-gateway" in refused.value.message
    )
    assert str(bundle.folder) in refused.value.message


def test_an_empty_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"which lacks gateway\.pem, gateway\.key, serving-ca\.pem, node-ca\.pem:"):
        check(KeyFolder(tmp_path / "none"))


def test_wrong_files_are_named(installation: KeyFolder, bundle: KeyFolder) -> None:
    def refused(*, later_ms: int = 0) -> str:
        with pytest.raises(Refused) as caught:
            check(bundle, later_ms=later_ms)
        return caught.value.message

    expired = refused(later_ms=91 * certificates.DAY_MS)
    assert (
        "gateway.pem cannot be used with the serving-ca.pem beside it: the certificate is refused: it expired"
        in expired
    )
    assert "issue it anew for gw.example.org" in expired
    good = {name: bundle.path(name).read_bytes() for name in GATEWAY_FILES}
    for name, wrong, why in (
        ("gateway.key", installation.path("gateway.key").read_bytes(), "it is not the key of gateway.pem"),
        ("gateway.pem", b"nothing", "it holds no PEM certificate"),
        ("serving-ca.pem", good["node-ca.pem"], "its chain does not verify"),
        ("node-ca.pem", b"", "node-ca.pem cannot be used: it holds no PEM certificate"),
    ):
        bundle.path(name).write_bytes(wrong)
        assert why in refused()
        bundle.path(name).write_bytes(good[name])
    check(bundle)


def test_a_leaf_that_may_call_nobody_is_named(tmp_path: Path) -> None:
    """A leaf for servers only, as another program may make."""
    site, folder = Site(), KeyFolder(tmp_path)
    node = site.node(site.serving_ca)
    for name, content in (("gateway.pem", node.certificate_chain_pem), ("gateway.key", node.private_key_pem)):
        folder.path(name).write_bytes(content)
    folder.write_certificate(keyfiles.SERVING_CA, site.serving_ca.certificate)
    with pytest.raises(Refused, match="its extended key usage is not that of a server certificate"):
        check(folder, files=SERVING_FILES)


async def test_a_process_says_what_is_missing_before_it_starts_anything(tmp_path: Path, bundle: KeyFolder) -> None:
    nowhere = "postgresql:///none?host=/nonexistent"
    for values, roles, says in (
        (
            {"gateway": {"services_url": "https://api:1"}},
            {Role.GATEWAY},
            "a gateway with services_url needs gateway.pem",
        ),
        ({"internal": {"host": "127.0.0.1"}}, {Role.API}, "the internal listener needs gateway.pem"),
    ):
        config = validate({"state_dir": str(tmp_path / "empty"), **values}, where="tests")
        with pytest.raises(Refused, match=says):
            async with control_plane(config, dsn=nowhere, roles=frozenset(roles), world=WORLD):
                raise AssertionError("it started")


def test_what_nodes_dial_is_not_guessed_from_the_services_certificate(installation: KeyFolder) -> None:
    config = validate({"internal": {"host": "127.0.0.1"}}, where="")
    assert advertised_url(config, installation, gateway_is_here=True) == "https://api.internal:8443"
    with pytest.raises(Refused, match=r"gateway\.advertise_url is empty, and the gateways run elsewhere"):
        advertised_url(config, installation, gateway_is_here=False)
    told = validate({"internal": {"host": "x"}, "gateway": {"advertise_url": "https://gw:1"}}, where="")
    assert advertised_url(told, installation, gateway_is_here=False) == "https://gw:1"


def test_what_a_gateway_says_of_its_certificates_follows_its_files(installation: KeyFolder) -> None:
    held = held_certificates(serving_secrets(installation))
    first = held()
    assert first is not None
    node_ca, serving_ca = installation.certificate(keyfiles.NODE_CA), installation.certificate(keyfiles.SERVING_CA)
    assert first.node_cas_sha256 == (certificates.spki_sha256(node_ca),)
    assert first.serving_ca_sha256 == certificates.spki_sha256(serving_ca)
    new = rotation_files.prepare(installation, Purpose.NODE_CA, world=WORLD)
    second = held()
    assert second is not None
    assert second.node_cas_sha256 == (*first.node_cas_sha256, new.key_sha256)
    installation.path(keyfiles.NODE_CA + ".pem").write_text("torn")
    assert held() is None, "what it does not know it does not say"
