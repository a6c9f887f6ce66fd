"""What travels between gateways and the services: refusals lose nothing, chains come back byte by byte."""

import base64

import pytest

from bettercompute.errors import BetterComputeError, Refused, Unavailable
from bettercompute.pki.certificates import CERTIFICATE_BYTES_MAX, CHAIN_LENGTH_MAX
from bettercompute.protocol.limits import MAX_BIGINT
from bettercompute.protocol.statuses import STATUS_OF, Reason, Status, refuse
from bettercompute.server.internal_rpc import (
    CERTIFICATE_HEADER,
    CHAIN_HEADER,
    Refusal,
    format_peer_chain,
    parse_peer_chain,
)


def same(one: BetterComputeError, other: BetterComputeError) -> bool:
    def facts(error: BetterComputeError) -> tuple[object, ...]:
        return type(error), error.message, error.status, str(error.reason), error.pushback_ms

    return facts(one) == facts(other)


def there_and_back(error: BetterComputeError) -> BetterComputeError:
    return Refusal.model_validate_json(Refusal.of(error).model_dump_json()).as_error()


@pytest.mark.parametrize("reason", Reason)
def test_every_refusal_comes_back_whole(reason: Reason) -> None:
    sentence = f'über "{reason}" {"x" * 9_000}\n\0'
    for pushback_ms in (None, 0, 900_001, MAX_BIGINT):
        for error in (
            refuse(reason, sentence, pushback_ms=pushback_ms),
            Unavailable(sentence, reason=reason, pushback_ms=pushback_ms),
        ):
            back = there_and_back(error)
            assert same(back, error)
            assert isinstance(back.reason, Reason)


def test_what_a_newer_release_says_is_kept() -> None:
    newer = Refused("no", status=Status.OUT_OF_RANGE, reason="not-invented-yet")
    assert same(there_and_back(newer), newer)
    with_more = '{"error": "refused", "status": 5, "reason": "not-found", "message": "m", "and": 1}'
    assert same(Refusal.model_validate_json(with_more).as_error(), refuse(Reason.NOT_FOUND, "m"))
    assert there_and_back(refuse(Reason.BAD_REQUEST, "half \ud800 a pair")).message == "half ? a pair"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"error": "bug", "status": 5, "reason": "r", "message": "m"}',
        '{"error": "refused", "status": 0, "reason": "r", "message": "m"}',
        '{"error": "refused", "status": 17, "reason": "r", "message": "m"}',
        '{"error": "refused", "status": 5, "reason": "r", "message": "m", "pushback_ms": -1}',
        '{"error": "refused", "status": 5, "message": "m"}',
    ],
)
def test_what_is_no_refusal(text: str) -> None:
    with pytest.raises(ValueError, match="validation error"):
        Refusal.model_validate_json(text)


@pytest.mark.parametrize(
    "chain", [(), (b"leaf",), (b"leaf", b"ca"), (b"\0" * CERTIFICATE_BYTES_MAX,) * CHAIN_LENGTH_MAX]
)
def test_a_chain_comes_back_byte_by_byte(chain: tuple[bytes, ...]) -> None:
    assert parse_peer_chain(format_peer_chain(chain)) == chain


@pytest.mark.parametrize("chain", [(b"x",) * (CHAIN_LENGTH_MAX + 1), (b"x" * (CERTIFICATE_BYTES_MAX + 1),)])
def test_a_chain_that_no_node_has_is_refused(chain: tuple[bytes, ...]) -> None:
    with pytest.raises(Refused, match="the client's chain has") as refused:
        format_peer_chain(chain)
    assert refused.value.status == STATUS_OF[Reason.BAD_CERTIFICATE]


@pytest.mark.parametrize(
    ("leaf", "above", "why"),
    [
        (None, ":YQ==:", "without client-cert"),
        ("YQ==", None, "RFC 9440"),
        (":Y*==:", None, "RFC 9440"),
        (":YQ:", None, "padding"),
        ("::", None, "0 bytes"),
        (":YQ==:", ":YQ==:, :YQ==:, :YQ==:, :YQ==:", "5 certificates"),
        (":YQ==:", ":YQ==:,", "RFC 9440"),
        (f":{base64.b64encode(bytes(CERTIFICATE_BYTES_MAX + 1)).decode()}:", None, "8193 bytes"),
    ],
)
def test_a_malformed_chain_is_named(leaf: str | None, above: str | None, why: str) -> None:
    headers = {name: value for name, value in ((CERTIFICATE_HEADER, leaf), (CHAIN_HEADER, above)) if value is not None}
    with pytest.raises(ValueError, match=why):
        parse_peer_chain(headers)
