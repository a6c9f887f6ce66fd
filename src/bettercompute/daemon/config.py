"""bcd's one configuration file: every key with its default, its limits, and what is said about a wrong one.

`docs/examples/bcd.toml` shows all of it, commented; a test keeps the two equal. Written without a validation library,
which would double what an idle bcd weighs. See docs/daemon.md, "Setting it up"; decisions 0081.
"""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from bettercompute.daemon.inventory.capabilities import RebootSettings
from bettercompute.daemon.inventory.facts import DEFAULT_PROGRAM_TIMEOUT_MS, MAX_PROGRAM_TIMEOUT_MS, FactSettings
from bettercompute.daemon.log_sources import SIZE_DEFAULT_BYTES, SIZE_LIMIT_BYTES, LogsSettings
from bettercompute.errors import Refused
from bettercompute.protocol.addresses import is_host
from bettercompute.protocol.statuses import Reason, refuse

DEFAULT_PATH = Path("/etc/bcd/config.toml")
CONFIG_BYTES_MAX = 1 << 20

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("auto", "json", "text")
GATEWAYS_MAX = 16
LIST_MAX = 64
# What Linux takes (PATH_MAX counts the NUL).
PATH_BYTES_MAX = 4_095
NAME_BYTES_MAX = 255

# A collection takes a second of one core; more often than each minute it would show in the host's own load.
REFRESH_MIN_S = 60
REFRESH_MAX_S = 7 * 24 * 3600

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LogSettings:
    """The `[log]` table."""

    level: str = "info"
    format: str = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole file."""

    state_dir: Path = Path("/var/lib/bcd")
    identity_import: Path | None = None
    gateway_url: tuple[str, ...] = ()
    gateway_server_name: str = ""
    log: LogSettings = field(default_factory=LogSettings)
    facts: FactSettings = field(default_factory=FactSettings)
    inventory_refresh_s: int = 3600
    reboot: RebootSettings = field(default_factory=RebootSettings)
    logs: LogsSettings = field(default_factory=LogsSettings)
    host_root: Path = Path("/")


def load(path: Path) -> Config:
    """Return the configuration of a TOML file; the defaults where the default file does not exist.

    Raises `Refused` naming the file, the key, the value, what is allowed and the cure.
    """
    try:
        with path.open("rb") as file:
            text = file.read(CONFIG_BYTES_MAX + 1)
        if len(text) > CONFIG_BYTES_MAX:
            raise _wrong(path, f"it is larger than {CONFIG_BYTES_MAX} bytes; is it the right file?")
        values = tomllib.loads(text.decode())
    except FileNotFoundError:
        if path == DEFAULT_PATH:
            return Config()
        raise _wrong(path, "there is no such file; name another one with --config") from None
    except PermissionError:
        raise _wrong(path, "it cannot be read: Permission denied; run bcd as a user who may") from None
    except OSError as error:
        raise _wrong(path, f"it cannot be read: {error.strerror}; name another one with --config") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise _wrong(path, f"it is not valid TOML: {error}") from None
    return parse(values, path=path)


def parse(values: Mapping[str, Any], *, path: Path) -> Config:
    """Return the configuration of a parsed file."""
    flat = _Reader(path, _flattened(values))
    config = Config(
        state_dir=flat.path("state_dir") or Config().state_dir,
        identity_import=flat.path("identity_import"),
        gateway_url=flat.urls("gateway_url"),
        gateway_server_name=flat.host("gateway_server_name"),
        log=LogSettings(
            level=flat.choice("log.level", LOG_LEVELS, default="info"),
            format=flat.choice("log.format", LOG_FORMATS, default="auto"),
        ),
        facts=FactSettings(
            facts_dir=flat.path("inventory.facts_dir"),
            fact_timeout_ms=flat.integer(
                "inventory.fact_timeout_ms", 1, MAX_PROGRAM_TIMEOUT_MS, default=DEFAULT_PROGRAM_TIMEOUT_MS
            ),
        ),
        inventory_refresh_s=flat.integer("inventory.refresh_s", REFRESH_MIN_S, REFRESH_MAX_S, default=3600),
        reboot=RebootSettings(
            allowed=flat.boolean("reboot.allowed", default=True),
            command=flat.argv("reboot.command"),
            boot_id_file=flat.path("reboot.boot_id_file"),
        ),
        logs=LogsSettings(
            folders=flat.texts("logs.folders", "a list of absolute paths", _is_path),
            size_max_bytes=flat.integer("logs.size_max_bytes", 1, SIZE_LIMIT_BYTES, default=SIZE_DEFAULT_BYTES),
            allow_http=flat.boolean("logs.allow_http", default=False),
            allow_networks=flat.texts("logs.allow_networks", 'a list of networks, as in ["127.0.0.0/8"]', _is_network),
            ca_file=flat.path("logs.ca_file"),
        ),
        host_root=flat.path("host.root") or Config().host_root,
    )
    flat.refuse_unknown()
    if bool(config.reboot.command) != (config.reboot.boot_id_file is not None):
        raise _wrong(
            path,
            "reboot.command and reboot.boot_id_file go together: after a command of its own, a new boot id proves it",
        )
    return config


def _flattened(values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": nested for inner, nested in value.items()}
            if not value:
                flat[name] = value
        else:
            flat[name] = value
    return flat


class _Reader:
    """Takes keys out of the file, each checked; what is left at the end is not known."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path = path
        self._values = values
        self._known: list[str] = []

    def host(self, key: str) -> str:
        limit = "must be a host name or an IP address, as in gateway.example.com"
        return self._take(key, "", limit, lambda text: text == "" or is_host(text))

    def path(self, key: str) -> Path | None:
        limit = f"must be an absolute path, of at most {PATH_BYTES_MAX} bytes and {NAME_BYTES_MAX} in each name"
        text = self._take(key, "", limit, lambda text: text == "" or _is_path(text))
        return Path(text) if text else None

    def choice(self, key: str, choices: tuple[str, ...], *, default: str) -> str:
        return self._take(key, default, f"must be one of {', '.join(choices)}", lambda text: text in choices)

    def boolean(self, key: str, *, default: bool) -> bool:
        return self._take(key, default, "must be true or false", lambda _: True)

    def integer(self, key: str, low: int, high: int, *, default: int) -> int:
        limit = f"must be a whole number from {low} to {high}"
        return self._take(key, default, limit, lambda number: low <= number <= high)

    def argv(self, key: str) -> tuple[str, ...]:
        limit = f'must be a list of texts, the program first, as in ["/usr/sbin/reboot", "-f"], at most {LIST_MAX}'
        empty: list[str] = []

        def fits(found: list[str]) -> bool:
            can_be_run = _are_texts(found) and not any("\0" in word for word in found) and "" not in found[:1]
            return can_be_run and len(found) <= LIST_MAX

        words: list[str] = self._take(key, empty, limit, fits)
        return tuple(words)

    def texts(self, key: str, kind: str, holds: Callable[[str], bool]) -> tuple[str, ...]:
        limit = f"must be {kind}, at most {LIST_MAX}"
        empty: list[str] = []

        def fits(found: list[str]) -> bool:
            return len(found) <= LIST_MAX and _are_texts(found) and all(map(holds, found))

        texts: list[str] = self._take(key, empty, limit, fits)
        return tuple(texts)

    def urls(self, key: str) -> tuple[str, ...]:
        value = self._values.get(key)
        if isinstance(value, str):
            self._values[key] = [value] if value else []
        limit = f"must be a URL, or a list of at most {GATEWAYS_MAX}, as in https://gateway.example.com:8443"
        empty: list[str] = []
        found = self._take(key, empty, limit, lambda urls: len(urls) <= GATEWAYS_MAX and _are_texts(urls))
        return tuple(self._checked_url(key, url) for url in found)

    def _checked_url(self, key: str, url: str) -> str:
        # Imported late: with it comes all of the cryptography, which `bcd status` has no other use for.
        from bettercompute.pki.join_token import check_gateway_url

        try:
            return check_gateway_url(url)
        except Refused as refusal:
            raise _wrong(self._path, f"{key}: {refusal.message}") from None

    def refuse_unknown(self) -> None:
        for key in self._values:
            near = get_close_matches(key, self._known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(self._known)}"
            raise _wrong(self._path, f"{key} is not a known key; {hint}")

    def _take(self, key: str, default: T, limit: str, holds: Callable[[T], bool]) -> T:
        self._known.append(key)
        value = self._values.pop(key, default)
        if type(value) is not type(default) or not holds(value):
            raise _wrong(self._path, f"{key} = {value!r}: it {limit}")
        return value


def _is_path(text: str) -> bool:
    names_fit = all(len(name.encode()) <= NAME_BYTES_MAX for name in text.split("/"))
    return text.startswith("/") and "\0" not in text and len(text.encode()) <= PATH_BYTES_MAX and names_fit


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True


def _are_texts(words: list[str]) -> bool:
    return all(isinstance(word, str) for word in words)


def _wrong(path: Path, problem: str) -> Refused:
    return refuse(Reason.INVALID_CONFIG, f"configuration {path}: {problem}")
