"""identity.json: what `nodes provision` writes and `bcd` keeps, field by field.

It names the certificate that is in use, says where to dial, and holds the marks that must not go backwards even when
the journal is lost. Fields of a later release are ignored, missing ones refused. See docs/security.md, "On a node's
disk"; decisions 0106, 0110 and 0111.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import asdict, dataclass
from typing import Any

from bettercompute.errors import Refused
from bettercompute.pki.join_token import check_gateway_url
from bettercompute.pki.quorum import NO_APPROVERS, ApproverSet, make_approver_set
from bettercompute.protocol.statuses import Reason, refuse

IDENTITY_FILE = "identity.json"
KEY_FILE = "node.key"
CHAIN_FILE = "node.pem"
TRUST_FILE = "trust-bundle.bin"
SERVING_CA_FILE = "serving-ca.pem"

FORMAT = 1
RECORD_BYTES_MAX = 64 * 1024  # ours are under 2 KiB


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityRecord:
    """What identity.json holds, field by field."""

    certificate_serial: str
    node_id: str
    site: str
    trust_domain: str
    role: str
    identity_generation: int
    gateway_urls: tuple[str, ...]
    applied_generation: int = 0
    """The highest spec generation ever applied; a lower one is refused."""
    server_time_mark_ms: int = 0
    """Server time never falls far behind this, whatever happens to the journal."""
    machine_id: str | None = None
    dmi_uuid: str | None = None
    approvers: ApproverSet = NO_APPROVERS
    """The approver set that the node enforces: it outlives the journal and a re-join."""


def encode(record: IdentityRecord) -> bytes:
    """Return the file's content."""
    content = {"format": FORMAT, **asdict(record), "approvers": _approvers_content(record.approvers)}
    return (json.dumps(content, indent=2) + "\n").encode()


def parse(data: bytes, *, path: str) -> IdentityRecord:
    """Read the file's content; refuse one that is damaged, naming `path`."""
    try:
        content = json.loads(data) if len(data) <= RECORD_BYTES_MAX else None
    except (ValueError, RecursionError) as error:
        raise damaged(path, "it is no JSON") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise damaged(path, f"it is not of format {FORMAT}: was it written by a newer bcd?")
    record = IdentityRecord(
        certificate_serial=_text(content, "certificate_serial", path),
        node_id=_text(content, "node_id", path),
        site=_text(content, "site", path),
        trust_domain=_text(content, "trust_domain", path),
        role=_text(content, "role", path),
        identity_generation=_number(content, "identity_generation", path),
        gateway_urls=_gateway_urls(content, path),
        applied_generation=_number(content, "applied_generation", path),
        server_time_mark_ms=_number(content, "server_time_mark_ms", path),
        machine_id=_optional_text(content, "machine_id", path),
        dmi_uuid=_optional_text(content, "dmi_uuid", path),
        approvers=_approvers(content, path),
    )
    # It names a folder: nothing that could lead out of it.
    if not (record.certificate_serial.isascii() and record.certificate_serial.isalnum()):
        raise damaged(path, "certificate_serial is not a serial number")
    return record


def damaged(path: str, why: str) -> Refused:
    """Return the refusal of a file that an identity needs."""
    return refuse(
        Reason.INVALID_CONFIG,
        f"{path} cannot be used: {why}; restore it, or join anew with a token for this node id (`bcd join TOKEN`)",
    )


def _approvers_content(approvers: ApproverSet) -> dict[str, Any] | None:
    if approvers == NO_APPROVERS:
        return None
    return asdict(approvers) | {"keys": [base64.b64encode(key).decode() for key in approvers.keys]}


def _approvers(content: dict[str, Any], path: str) -> ApproverSet:
    """Read the approver set. One that is damaged is refused like the rest: without it the node would ask nobody."""
    held = content.get("approvers")
    if held is None:
        return NO_APPROVERS
    try:
        epoch, keys = int(held["epoch"]), [base64.b64decode(key, validate=True) for key in held["keys"]]
        if not keys:
            return ApproverSet(epoch=epoch, keys=(), threshold=0, tiers=())
        return make_approver_set(
            keys,
            epoch=epoch,
            threshold=int(held["threshold"]),
            tiers=map(int, held["tiers"]),
            unbatched_per_hour=int(held["unbatched_per_hour"]),
        )
    except (KeyError, TypeError, ValueError, binascii.Error, Refused) as error:
        raise damaged(path, "approvers is no approver set") from error


def _text(content: dict[str, Any], name: str, path: str) -> str:
    value = content.get(name)
    if not isinstance(value, str) or not value:
        raise damaged(path, f"{name} is missing or not a text")
    return value


def _number(content: dict[str, Any], name: str, path: str) -> int:
    value = content.get(name)
    if type(value) is not int or value < 0:
        raise damaged(path, f"{name} is missing or not a whole number")
    return value


def _optional_text(content: dict[str, Any], name: str, path: str) -> str | None:
    return None if content.get(name) is None else _text(content, name, path)


def _gateway_urls(content: dict[str, Any], path: str) -> tuple[str, ...]:
    urls = content.get("gateway_urls")
    if not isinstance(urls, list) or not urls or not all(isinstance(url, str) for url in urls):
        raise damaged(path, "gateway_urls is not a list of URLs")
    return tuple(check_gateway_url(url) for url in urls)
