"""The control plane's one configuration file: every key with its default and its limits.

`docs/examples/better-compute.toml` shows all of it, commented; a test keeps the two equal.
"""

from __future__ import annotations

import re
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from bettercompute.errors import Refused
from bettercompute.protocol.statuses import Reason, Status

CONFIG_BYTES_MAX = 1 << 20

Port = Annotated[int, Field(ge=0, le=65_535)]


_ORIGIN = re.compile(r"https://([a-z0-9.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?", re.ASCII | re.IGNORECASE)


def _services_url(url: str) -> str:
    if url and not _ORIGIN.fullmatch(url):
        raise ValueError("write https://HOST:PORT, nothing after it")
    return url


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DatabaseSection(_Section):
    """PostgreSQL. An empty `dsn` starts the embedded one under `state_dir`."""

    dsn: Annotated[str, Field(pattern=r"^$|^postgres(ql)?://")] = ""
    pool_size: Annotated[int, Field(ge=2, le=200)] = 10


class ApiSection(_Section):
    """The operators' HTTP API."""

    host: str = "127.0.0.1"
    port: Port = 8420


class GatewaySection(_Section):
    """The nodes' endpoint."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")] = "gateway"
    host: str = "0.0.0.0"  # noqa: S104 - nodes dial in from everywhere; mutual TLS guards the port
    port: Port = 8443
    advertise_url: str = ""
    max_streams: Annotated[int, Field(ge=1, le=100_000)] = 5_000
    handshakes_per_s: Annotated[int, Field(ge=1, le=10_000)] = 200
    services_url: Annotated[str, AfterValidator(_services_url)] = ""


class InternalSection(_Section):
    """Where gateways on other hosts reach the join service. Empty `host`: nowhere."""

    host: str = ""
    port: Port = 8444
    gateway_names: Annotated[list[str], Field(max_length=1_000)] = []


class PkiSection(_Section):
    """Names that go into certificates, and where the keys are."""

    trust_domain: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,253}$")] = "bc.local"
    site: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")] = "default"
    dir: str = ""
    command_signing: bool = False
    node_certificate_s: Annotated[int, Field(ge=10, le=30 * 86_400)] = 86_400


class HealthSection(_Section):
    """`/healthz`, `/readyz` and `/metrics` of a process without the API, which has them itself. No `host`: none."""

    host: str = ""
    port: Port = 8421


class WorkerSection(_Section):
    """The controllers."""

    command_retention_days: Annotated[int, Field(ge=1, le=3_650)] = 30


class Config(_Section):
    """The whole file."""

    state_dir: str = "/var/lib/better-compute"
    database: DatabaseSection = DatabaseSection()
    api: ApiSection = ApiSection()
    internal: InternalSection = InternalSection()
    gateway: GatewaySection = GatewaySection()
    pki: PkiSection = PkiSection()
    health: HealthSection = HealthSection()
    worker: WorkerSection = WorkerSection()

    @property
    def state_path(self) -> Path:
        """The folder that holds everything this program keeps on disk."""
        return Path(self.state_dir)

    @property
    def pki_path(self) -> Path:
        """The folder of the keys: `pki.dir`, or `pki` under `state_dir`."""
        return Path(self.pki.dir) if self.pki.dir else self.state_path / "pki"


def load(path: Path | None) -> Config:
    """Return the configuration of a TOML file, or the defaults when there is no path.

    Raises `Refused` naming the file, the key, the value and what is allowed.
    """
    if path is None:
        return Config()
    try:
        with path.open("rb") as file:
            text = file.read(CONFIG_BYTES_MAX + 1)
        if len(text) > CONFIG_BYTES_MAX:
            raise _refuse(path, f"it is larger than {CONFIG_BYTES_MAX} bytes; is it the right file?")
        values = tomllib.loads(text.decode())
    except OSError as error:
        raise _refuse(path, f"it cannot be read: {error.strerror}; name the right file with --config") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise _refuse(path, f"it is not valid TOML: {error}") from None
    return validate(values, where=path)


def validate(values: dict[str, Any], *, where: Path | str) -> Config:
    """Return `values` as a `Config`, or raise `Refused` with one clause for each wrong key."""
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise _refuse(where, "; ".join(_clause(dict(problem)) for problem in error.errors())) from None


def _clause(problem: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        near = get_close_matches(str(problem["loc"][-1]), _keys(problem["loc"][:-1]), n=1)
        return f"{key} is not a known key" + (f"; did you mean {near[0]!r}?" if near else "")
    if problem["type"] in ("model_type", "model_attributes_type"):
        return f"{key} = {problem['input']!r}: it is a table; write [{key}], and its keys below"
    return f"{key} = {problem['input']!r}: {str(problem['msg']).lower()}"


def _keys(parents: tuple[str | int, ...]) -> list[str]:
    model: type[BaseModel] = Config
    for parent in parents:
        annotation = model.model_fields[str(parent)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def _refuse(where: Path | str, problem: str) -> Refused:
    return Refused(f"configuration {where}: {problem}", status=Status.INVALID_ARGUMENT, reason=Reason.INVALID_CONFIG)
