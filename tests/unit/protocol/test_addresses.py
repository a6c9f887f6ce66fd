"""Hosts and gateway URLs: what can be dialed passes, what never can does not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bettercompute.errors import BetterComputeError
from bettercompute.protocol.addresses import is_gateway_url, is_host
from bettercompute.transport.client import parse_gateway_url


@pytest.mark.parametrize(
    "host",
    [
        "gw",
        "gw-a",
        "gw_a.internal",
        "a.b.example.org",
        "a.example.",
        "127.0.0.1",
        "::1",
        "fe80::1%eth0",
        "x" * 63,
        "1a",
    ],
)
def test_hosts(host: str) -> None:
    assert is_host(host)
    assert is_gateway_url(f"https://{f'[{host}]' if ':' in host else host}:8443")


@pytest.mark.parametrize(
    "host",
    [
        *("", ".", "a b", "a..b", "-a", "a-", "a.-b", "x" * 64, ".".join(["x" * 60] * 5), "*.example.org", "gw:443"),
        *("1.2.3", "256.1.1.1", "1.2.3.4.5", "10", "bücher.example", "a\n", "a\0", ":::", "1::2::3", "[::1]", "a/b"),
    ],
)
def test_what_names_no_host(host: str) -> None:
    assert not is_host(host)


@pytest.mark.parametrize(
    "url",
    [
        "https://gw",
        "https://gw/",
        "https://gw:1",
        "https://gw:65535/",
        "https://10.0.0.1:8443",
        "https://[2001:db8::1]",
    ],
)
def test_gateway_urls(url: str) -> None:
    assert is_gateway_url(url)


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "gw:443",
            "http://gw",
            "HTTPS://gw",
            "https://",
            "https:///",
            "https://:443",
            "https://gw:",
            "https://gw:0",
        ),
        *(
            "https://gw:99999",
            "https://gw:65536",
            "https://gw:x",
            "https://gw:-1",
            "https://gw:4 43",
            "https://gw:443:443",
        ),
        *("https://::1", "https://::1:443", "https://[::1", "https://[::1]443", "https://[]", "https://[gw]:443"),
        *("https://[127.0.0.1]", "https://[::1]]:443", "https://u@gw", "https://u:p@gw:1", "https://gw/path"),
        *("https://gw?x", "https://gw#x", "https://a b", "https://gw\n", "https://300.1.1.1", "https://gw:٤٤٣"),
    ],
)
def test_what_is_no_gateway_url(url: str) -> None:
    assert not is_gateway_url(url)


@given(
    st.from_regex(r"https://[!-~]{1,30}", fullmatch=True) | st.from_regex(r"https://[a:.0\[\]]{1,9}", fullmatch=True)
)
def test_what_passes_can_be_taken_apart_to_dial(url: str) -> None:
    if not is_gateway_url(url):
        return
    try:
        host, port = parse_gateway_url(url)
    except BetterComputeError as error:
        raise AssertionError(f"{url} passes and cannot be dialed") from error
    assert is_host(host)
    assert 1 <= port <= 65_535
