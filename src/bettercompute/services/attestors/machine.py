"""Whether the machine that asks is the one that is expected, by what it claims of its hardware.

Claims prove nothing by themselves: they keep a credential from working on a machine that it was not made for, a copied
image or a swapped board. See docs/security.md, "Attestors"; decisions 0149.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bettercompute.protocol import messages
from bettercompute.protocol.limits import MAX_NAME_CHARS
from bettercompute.protocol.statuses import Reason, refuse

MAC_ADDRESSES_MAX = 256  # a host with a hundred functions on its network cards stays far below

# What names one machine. The machine id and the host name are the operating system's, which was just installed anew.
_NAMES = ("dmi_uuid", "serial", "board_serial")
_ADDRESSES = "mac_addresses"
FIELDS = (*_NAMES, _ADDRESSES)


def claims_of(request: messages.JoinRequest) -> dict[str, Any]:
    """Return the claims that were made, as they are stored; refuse INVALID_ARGUMENT what no column should take."""
    claims: dict[str, Any] = {"daemon_version": _bounded("daemon_version", request.daemon_version)}
    for field in request.hardware.DESCRIPTOR.fields:
        if field.name != "mac_addresses":
            claims[field.name] = _bounded(field.name, getattr(request.hardware, field.name))
    if len(request.hardware.mac_addresses) > MAC_ADDRESSES_MAX:
        raise refuse(
            Reason.BAD_REQUEST,
            f"the request names {len(request.hardware.mac_addresses)} hardware addresses, "
            f"the limit is {MAC_ADDRESSES_MAX}",
        )
    claims["mac_addresses"] = [_bounded("mac_addresses", address) for address in request.hardware.mac_addresses]
    return {name: value for name, value in claims.items() if value}


def expected_of(claims: Mapping[str, Any]) -> dict[str, Any]:
    """Return of stored claims what tells one machine from another."""
    return {name: claims[name] for name in FIELDS if claims.get(name)}


def difference(expected: Mapping[str, Any], claimed: Mapping[str, Any]) -> str:
    """Say how a machine differs from the expected one; empty: it does not. All that is expected must be claimed."""
    for name in _NAMES:
        if name in expected and _plain(expected[name]) != _plain(claimed.get(name, "")):
            return (
                f"{name} {str(expected[name])[:80]!a} was expected, and it claims {str(claimed.get(name, ''))[:80]!a}"
            )
    if _ADDRESSES in expected and not _plain_all(expected[_ADDRESSES]) & _plain_all(claimed.get(_ADDRESSES, ())):
        return f"none of its hardware addresses is one of {', '.join(sorted(_plain_all(expected[_ADDRESSES]))[:4])}"
    return ""


def _plain(text: object) -> str:
    return str(text).strip().lower()


def _plain_all(texts: Sequence[object]) -> set[str]:
    return {_plain(text) for text in texts}


def _bounded(name: str, text: str) -> str:
    if len(text) > MAX_NAME_CHARS or "\0" in text:
        raise refuse(
            Reason.BAD_REQUEST,
            f"{name} of the request has {len(text)} characters or a NUL in it, the limit is {MAX_NAME_CHARS}",
        )
    return text
