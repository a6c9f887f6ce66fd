"""What gateways and the services behind them say to each other: HTTP over mutual TLS, the port `GatewayServices` on the
wire.

Bodies are the serialized messages. Beside them, in headers, goes what the gateway alone knows: from where a join came,
and the certificates that TLS verified, written as RFC 9440 says. A refusal is a JSON body that loses nothing of it:
status, reason, pushback, sentence. Any other answer than these is a fault between the two, and never a node's business.
See docs/protocol.md, "The service".
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from bettercompute.errors import BetterComputeError, Refused, Unavailable
from bettercompute.pki.certificates import CERTIFICATE_BYTES_MAX, CHAIN_LENGTH_MAX
from bettercompute.protocol.limits import MAX_BIGINT, MAX_JOIN_BYTES, MAX_TRUST_BUNDLE_BYTES
from bettercompute.protocol.statuses import Reason, refuse

JOIN_PATH = "/internal/v1/join"
RENEW_PATH = "/internal/v1/renew"
TRUST_PATH = "/internal/v1/trust-bundle"

MESSAGE_TYPE = "application/x-protobuf"
REFUSAL_TYPE = "application/json"
SOURCE_HEADER = "x-bc-source"
TRUST_VERSION_HEADER = "x-bc-trust-version"
CERTIFICATE_HEADER = "client-cert"
CHAIN_HEADER = "client-cert-chain"

# A bundle, a chain, a signature and a few names; a refusal's sentence is far below.
ANSWER_BYTES_MAX = MAX_TRUST_BUNDLE_BYTES + MAX_JOIN_BYTES
# What the services allow themselves for an answer.
ANSWER_S = 12.0
# An IPv6 address with its zone.
SOURCE_CHARACTERS_MAX = 100
# All headers of a request.
HEADER_BYTES_MAX = 64 << 10

assert CHAIN_LENGTH_MAX * CERTIFICATE_BYTES_MAX * 4 // 3 < HEADER_BYTES_MAX * 3 // 4, (
    "the longest chain fits the headers"
)

_KNOWN_REASONS = {str(reason): reason for reason in Reason}
_BYTE_SEQUENCE = re.compile(r":([A-Za-z0-9+/]*={0,2}):")


class Refusal(BaseModel):
    """An error of ours as it travels."""

    model_config = ConfigDict(frozen=True)

    error: Literal["refused", "unavailable"]
    status: Annotated[int, Field(ge=1, le=16)]
    reason: str
    message: str
    pushback_ms: Annotated[int | None, Field(ge=0, le=MAX_BIGINT)] = None

    @classmethod
    def of(cls, error: BetterComputeError) -> Refusal:
        """Return what is sent for an error."""
        return cls(
            error="unavailable" if isinstance(error, Unavailable) else "refused",
            status=error.status,
            reason=str(error.reason),
            # A lone surrogate, which no JSON can hold, would turn a clear refusal into a fault.
            message=error.message.encode("utf-8", "replace").decode(),
            pushback_ms=error.pushback_ms,
        )

    def as_error(self) -> BetterComputeError:
        """Return the error to raise; a reason that a newer release knows stays as it came."""
        reason = _KNOWN_REASONS.get(self.reason, self.reason)
        if self.error == "unavailable":
            return Unavailable(self.message, reason=reason, pushback_ms=self.pushback_ms)
        return Refused(self.message, status=self.status, reason=reason, pushback_ms=self.pushback_ms)


def format_peer_chain(chain_der: Sequence[bytes]) -> dict[str, str]:
    """Return the headers for a verified chain (DER, leaf first); none for an empty one.

    Raises `Refused` BAD_CERTIFICATE for a chain that no node of ours has.
    """
    if not chain_der:
        return {}
    if len(chain_der) > CHAIN_LENGTH_MAX or any(len(der) > CERTIFICATE_BYTES_MAX for der in chain_der):
        raise refuse(
            Reason.BAD_CERTIFICATE,
            f"the client's chain has {len(chain_der)} certificates of {sum(map(len, chain_der))} bytes, the limit is "
            f"{CHAIN_LENGTH_MAX} of {CERTIFICATE_BYTES_MAX} each",
        )
    leaf, *above = (f":{base64.b64encode(der).decode()}:" for der in chain_der)
    return {CERTIFICATE_HEADER: leaf, **({CHAIN_HEADER: ", ".join(above)} if above else {})}


def parse_peer_chain(headers: Mapping[str, str]) -> tuple[bytes, ...]:
    """Return the chain that the headers name (DER, leaf first), () when they name none.

    Raises ValueError, saying what is wrong.
    """
    leaf, above = headers.get(CERTIFICATE_HEADER), headers.get(CHAIN_HEADER)
    if leaf is None:
        if above is not None:
            raise ValueError(f"{CHAIN_HEADER} without {CERTIFICATE_HEADER}")
        return ()
    items = [leaf, *(above.split(",") if above else ())]
    if len(items) > CHAIN_LENGTH_MAX:
        raise ValueError(f"a chain of {len(items)} certificates, the limit is {CHAIN_LENGTH_MAX}")
    return tuple(_byte_sequence(item.strip(" \t")) for item in items)


def _byte_sequence(item: str) -> bytes:
    match = _BYTE_SEQUENCE.fullmatch(item)
    if match is None:
        raise ValueError("a certificate that is not written as RFC 9440 says")
    der = base64.b64decode(match[1], validate=True)
    if not 0 < len(der) <= CERTIFICATE_BYTES_MAX:
        raise ValueError(f"a certificate of {len(der)} bytes, the limit is {CERTIFICATE_BYTES_MAX}")
    return der
