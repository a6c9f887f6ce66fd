"""Where the command line finds the API, and what it says when it does not."""

from pathlib import Path

import httpx
import pytest

from bettercompute.cli.client import ApiClient, path_of
from bettercompute.errors import Refused, Unavailable


def client_of(handler) -> ApiClient:
    client = ApiClient(address="http://api.test", token="t")
    client._http = httpx.Client(transport=httpx.MockTransport(handler), base_url="http://api.test")
    return client


def test_the_address_comes_from_the_option_then_the_environment_then_the_profile(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("BETTER_COMPUTE_API", raising=False)
    with pytest.raises(Refused, match="no API address"):
        ApiClient.from_environment(None)
    (tmp_path / "better-compute").mkdir()
    (tmp_path / "better-compute" / "profile.toml").write_text('api = "http://profile"\n')
    assert ApiClient.from_environment(None).address == "http://profile"
    monkeypatch.setenv("BETTER_COMPUTE_API", "http://environment/")
    assert ApiClient.from_environment(None).address == "http://environment"
    assert ApiClient.from_environment("http://option").address == "http://option"


def test_a_broken_profile_is_named(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("BETTER_COMPUTE_API", raising=False)
    (tmp_path / "better-compute").mkdir()
    (tmp_path / "better-compute" / "profile.toml").write_text("api = ")
    with pytest.raises(Refused, match=r"profile\.toml"):
        ApiClient.from_environment(None)


def test_a_problem_document_becomes_its_sentence() -> None:
    client = client_of(
        lambda _: httpx.Response(404, json={"title": "Not Found", "detail": "no node n9", "reason": "x"})
    )
    with pytest.raises(Refused, match="no node n9"):
        client.get("/v1/nodes/n9")


@pytest.mark.parametrize("response", [httpx.Response(503, json={"title": "Down"}), httpx.Response(502, text="<html>")])
def test_a_server_that_fails_is_a_passing_fault(response: httpx.Response) -> None:
    with pytest.raises(Unavailable):
        client_of(lambda _: response).get("/v1/nodes")


def test_a_missing_token_names_the_variable() -> None:
    client = client_of(
        lambda _: httpx.Response(401, json={"title": "Unauthorized", "detail": "a bearer token is needed"})
    )
    with pytest.raises(Refused, match="set BETTER_COMPUTE_TOKEN"):
        client.get("/v1/nodes")


def test_nobody_listening_is_a_passing_fault() -> None:
    with pytest.raises(Unavailable, match=r"http://127\.0\.0\.1:1 did not answer"):
        ApiClient(address="http://127.0.0.1:1", token="").get("/v1/nodes")


def test_pages_are_followed_to_the_last() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        after = request.url.params.get("after")
        return httpx.Response(200, json={"items": [after or "first"], "next": None if after else "more"})

    assert list(client_of(handler).pages("/v1/nodes", state=None)) == ["first", "more"]


@pytest.mark.parametrize("address", ["http://[::1", "http://127.0.0.1:bad", "localhost:8420", "ftp://host", "http://"])
def test_an_address_that_is_no_url_is_refused(address: str) -> None:
    with pytest.raises(Refused, match="is not a URL"):
        ApiClient(address=address, token="")


@pytest.mark.parametrize("token", ["ä", "a\nb", "\x00"])
def test_a_token_that_no_header_carries_is_refused(token: str) -> None:
    with pytest.raises(Refused, match="BETTER_COMPUTE_TOKEN"):
        ApiClient(address="http://api.test", token=token)


@pytest.mark.parametrize(
    ("part", "path"),
    [("n1", "/v1/nodes/n1"), ("a/../b", "/v1/nodes/a%2F..%2Fb"), ("n?x=1#y", "/v1/nodes/n%3Fx%3D1%23y")],
)
def test_an_id_stays_one_segment(part: str, path: str) -> None:
    assert path_of("nodes", part) == path


@pytest.mark.parametrize("part", ["", ".", "..", "a\x00b", "\udcff"])
def test_what_cannot_be_a_segment_is_no_id(part: str) -> None:
    with pytest.raises(Refused, match="is not an id"):
        path_of("nodes", part)


def test_a_query_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(Refused, match="cannot be asked"):
        client_of(lambda _: httpx.Response(200, json={})).get("/v1/nodes", state="\udcff")
