"""The control plane's configuration file: the example is the defaults, and mistakes are named."""

import tomllib
from pathlib import Path

import pytest

from bettercompute.errors import Refused
from bettercompute.server.config import Config, load, validate

EXAMPLE = Path(__file__).resolve().parents[3] / "docs" / "examples" / "better-compute.toml"


def test_the_example_is_complete_and_equals_the_defaults() -> None:
    assert tomllib.loads(EXAMPLE.read_text()) == Config().model_dump()
    assert load(EXAMPLE) == Config()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"gateway": {"prot": 1}}, "gateway.prot is not a known key; did you mean 'port'?"),
        ({"databse": {}}, "databse is not a known key; did you mean 'database'?"),
        ({"gateway": {"port": 70_000}}, "gateway.port = 70000: input should be less than or equal to 65535"),
        ({"gateway": {"name": "Not Good"}}, "gateway.name = 'Not Good'"),
        ({"worker": {"command_retention_days": 0}}, "worker.command_retention_days = 0"),
        (
            {"gateway": {"services_url": "http://api:1"}},
            "gateway.services_url = 'http://api:1': value error, write https://host",
        ),
        ({"gateway": {"services_url": "https://api:1/v1"}}, "nothing after it"),
        ({"internal": {"gateway_names": "gw"}}, "internal.gateway_names = 'gw': input should be a valid list"),
        ({"state_dir": 3}, "state_dir = 3: input should be a valid string"),
        ({"database": "postgresql://x"}, "database = 'postgresql://x': it is a table; write [database], and its keys"),
    ],
)
def test_a_mistake_is_named_with_key_value_and_limit(values: dict[str, object], says: str) -> None:
    with pytest.raises(Refused) as refused:
        validate(values, where="f.toml")
    assert says in refused.value.message
    assert "f.toml" in refused.value.message


@pytest.mark.parametrize("content", [b"state_dir = ", b"\xff\xfe", b"x = 1", b"x = " + b"[" * 5_000])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.toml"
    path.write_bytes(content)
    with pytest.raises(Refused, match=r"c\.toml"):
        load(path)
    with pytest.raises(Refused, match="No such file"):
        load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    "url", ["", "https://api", "https://api.internal:8444", "https://[::1]:1", "https://10.0.0.1:8444"]
)
def test_where_the_join_service_may_be(url: str) -> None:
    assert validate({"gateway": {"services_url": url}}, where="").gateway.services_url == url


def test_the_key_folder_is_under_the_state_folder_unless_it_is_named() -> None:
    assert validate({"state_dir": "/s"}, where="").pki_path == Path("/s/pki")
    assert validate({"state_dir": "/s", "pki": {"dir": "/keys"}}, where="").pki_path == Path("/keys")
