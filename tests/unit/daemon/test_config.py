"""bcd's configuration: the example equals the defaults, and each mistake is answered with file, key, value and cure."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from bettercompute.daemon import config as config_module
from bettercompute.daemon.config import Config, load, parse
from bettercompute.errors import Refused

EXAMPLE = Path(__file__).parents[3] / "docs/examples/bcd.toml"


def test_the_example_is_the_defaults() -> None:
    assert load(EXAMPLE) == Config()


def test_the_example_shows_every_key() -> None:
    shown = tomllib.loads(EXAMPLE.read_text())
    names = {f"{table}.{key}" for table, keys in shown.items() if isinstance(keys, dict) for key in keys}
    names |= {key for key, value in shown.items() if not isinstance(value, dict)}
    with pytest.raises(Refused) as caught:
        parse({"zzzzz": 1}, path=Path("x"))
    assert names == set(caught.value.message.rpartition("the keys are ")[2].split(", "))


def test_every_key_is_taken() -> None:
    values = {
        "state_dir": "/srv/bcd",
        "identity_import": "/srv/identity",
        "gateway_url": ["https://a.example:8443", "https://b.example:8443"],
        "gateway_server_name": "gateway.example",
        "log": {"level": "debug", "format": "json"},
        "inventory": {"refresh_s": 60, "facts_dir": "/etc/bcd/facts", "fact_timeout_ms": 5},
        "logs": {"folders": ["/var/log"], "size_max_bytes": 9, "allow_http": True, "allow_networks": ["10.0.0.0/8"]},
        "reboot": {"allowed": False, "command": ["/sbin/reboot"], "boot_id_file": "/run/boot-id"},
    }
    config = parse(values, path=Path("x"))
    assert config.state_dir == Path("/srv/bcd")
    assert config.identity_import == Path("/srv/identity")
    assert config.gateway_url == ("https://a.example:8443", "https://b.example:8443")
    assert config.gateway_server_name == "gateway.example"
    assert (config.log.level, config.log.format) == ("debug", "json")
    assert (config.inventory_refresh_s, config.facts.fact_timeout_ms) == (60, 5)
    assert config.facts.facts_dir == Path("/etc/bcd/facts")
    assert (config.reboot.allowed, config.reboot.command) == (False, ("/sbin/reboot",))
    assert (config.logs.folders, config.logs.size_max_bytes) == (("/var/log",), 9)
    assert (config.logs.allow_http, config.logs.allow_networks) == (True, ("10.0.0.0/8",))
    assert config.reboot.boot_id_file == Path("/run/boot-id")
    assert parse({"gateway_url": "https://a.example"}, path=Path("x")).gateway_url == ("https://a.example",)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('state_dri = "/x"', "state_dri is not a known key; did you mean state_dir?"),
        ("[inventory]\nrefresh = 60", "inventory.refresh is not a known key; did you mean inventory.refresh_s?"),
        ('[logs]\nfolders = ["var/log"]', "logs.folders = ['var/log']: it must be a list of absolute paths"),
        (
            '[logs]\nallow_networks = ["10.0.0.1/8"]',
            "logs.allow_networks = ['10.0.0.1/8']: it must be a list of networks",
        ),
        ("[logs]\nsize_max_bytes = 0", "logs.size_max_bytes = 0: it must be a whole number from 1 to 1073741824"),
        ("[journal]", "journal is not a known key"),
        ('state_dir = "relative"', "state_dir = 'relative': it must be an absolute path"),
        ("state_dir = 7", "state_dir = 7: it must be an absolute path"),
        ('[log]\nlevel = "loud"', "log.level = 'loud': it must be one of debug, info, warning, error"),
        ("[inventory]\nrefresh_s = 1", "inventory.refresh_s = 1: it must be a whole number from 60 to 604800"),
        ("[inventory]\nrefresh_s = true", "inventory.refresh_s = True: it must be a whole number"),
        ("[reboot]\nallowed = 1", "reboot.allowed = 1: it must be true or false"),
        ("[reboot]\ncommand = [1]", "reboot.command = [1]: it must be a list of texts, the program first"),
        ('[reboot]\ncommand = [""]', "reboot.command = ['']: it must be a list of texts, the program first"),
        ('[reboot]\ncommand = ["/r", "\\u0000"]', "reboot.command = ['/r', '\\x00']: it must be a list of texts"),
        (f"[reboot]\ncommand = {['x'] * 65}", "reboot.command = ['x', 'x'"),
        ('[reboot]\ncommand = ["x"]', "reboot.command and reboot.boot_id_file go together"),
        ('gateway_url = ["ftp://x"]', "gateway_url: "),
        (
            'gateway_url = "https://x:99999"',
            "gateway_url: 'https://x:99999' is not a gateway URL: write https://HOST:PORT",
        ),
        ('gateway_url = ["https://x:1", "https://x:0"]', "gateway_url: 'https://x:0' is not a gateway URL"),
        ('gateway_url = "https://::1:8443"', "gateway_url: 'https://::1:8443' is not a gateway URL"),
        ('gateway_server_name = "a b"', "gateway_server_name = 'a b': it must be a host name or an IP address"),
        ('gateway_server_name = "gw:8443"', "gateway_server_name = 'gw:8443': it must be a host name or an IP address"),
        ('state_dir = "/a\\u0000b"', "state_dir = '/a\\x00b': it must be an absolute path"),
        (f'state_dir = "/{"x" * 256}"', f"state_dir = '/{'x' * 256}': it must be an absolute path"),
        ("gateway_url = [1]", "gateway_url = [1]: it must be a URL, or a list of at most 16"),
        ('log = "info"', "log is not a known key"),
        ("state_dir = ", "it is not valid TOML"),
        (f"state_dir = {'[' * 5_000}", "it is not valid TOML"),
    ],
)
def test_mistakes_are_named_with_their_cure(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(content)
    with pytest.raises(Refused) as caught:
        load(path)
    assert f"configuration {path}: {sentence}" in caught.value.message
    assert caught.value.reason == "INVALID_CONFIG"


def test_files_that_cannot_be_read_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused, match="there is no such file; name another one with --config"):
        load(tmp_path / "missing.toml")
    monkeypatch.setattr(config_module, "DEFAULT_PATH", tmp_path / "missing.toml")
    assert load(tmp_path / "missing.toml") == Config()
    with pytest.raises(Refused, match="it cannot be read: Is a directory; name another one with --config"):
        load(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(Refused, match="not valid TOML"):
        load(tmp_path / "binary.toml")
    (tmp_path / "large.toml").write_text("#" * (config_module.CONFIG_BYTES_MAX + 1))
    with pytest.raises(Refused, match="larger than 1048576 bytes"):
        load(tmp_path / "large.toml")
