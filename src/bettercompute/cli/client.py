"""The command line's way to the HTTP API: where it is, which token, and what a problem document means to a person.

The address comes from `--api`, `BETTER_COMPUTE_API` or the profile file, the token from `BETTER_COMPUTE_TOKEN` or the
same file (`better-compute/profile.toml` under the XDG configuration folder, keys `api` and `token`).
"""

from __future__ import annotations

import json
import time
import tomllib
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from bettercompute.errors import BetterComputeError, Refused, Unavailable
from bettercompute.protocol.statuses import Reason, Status
from bettercompute.system import environment

REQUEST_TIMEOUT_S = 30.0
PAGE_ROWS = 500
# How soon, and how rarely at last, a stream that broke off is taken up again, and for how long that is tried.
RESUME_S_MIN = 0.25
RESUME_S_MAX = 5.0
RESUME_FOR_S = 300.0

_HTTP_STATUS = {
    400: Status.INVALID_ARGUMENT,
    401: Status.UNAUTHENTICATED,
    403: Status.PERMISSION_DENIED,
    404: Status.NOT_FOUND,
    408: Status.UNAVAILABLE,
    409: Status.ALREADY_EXISTS,
    413: Status.INVALID_ARGUMENT,
    414: Status.INVALID_ARGUMENT,
    422: Status.INVALID_ARGUMENT,
    429: Status.RESOURCE_EXHAUSTED,
    431: Status.INVALID_ARGUMENT,
}


class ApiClient:
    """A synchronous client: a command line does one thing at a time."""

    def __init__(self, *, address: str, token: str) -> None:
        """Raises `Refused` for an address that is no http(s) URL, or a token that no header can carry."""
        self.address = address.rstrip("/")
        try:
            url = httpx.URL(self.address)
        except (httpx.InvalidURL, UnicodeError) as error:
            raise _refuse(f"the API's address {address!a} is not a URL: {error}") from None
        if url.scheme not in {"http", "https"} or not url.host:
            raise _refuse(f"the API's address {address!a} is not a URL: write http://HOST:PORT or https://HOST:PORT")
        if not (token.isascii() and token.isprintable()):
            raise _refuse("BETTER_COMPUTE_TOKEN has characters that no token has: copy it again")
        self._http = httpx.Client(
            base_url=url,
            headers={"authorization": f"Bearer {token}"} if token else {},
            timeout=REQUEST_TIMEOUT_S,
            trust_env=False,
            # Reading the bundle of public CAs takes 30 ms, a twentieth of a command; plain HTTP has no use for it.
            verify=url.scheme == "https",
        )
        # A command ends where it likes: whoever drops the client drops its connections.
        weakref.finalize(self, self._http.close)

    @classmethod
    def from_environment(cls, api: str | None) -> ApiClient:
        """Return a client for `--api`, or for what the environment and the profile file say.

        Raises `Refused` where none of them names an address.
        """
        variables = environment()
        profile = _profile(variables)
        address = api or variables.get("BETTER_COMPUTE_API") or profile.get("api", "")
        if not address:
            raise _refuse(
                'no API address: give --api URL, set BETTER_COMPUTE_API, or write api = "..." into the profile file'
            )
        return cls(address=address, token=variables.get("BETTER_COMPUTE_TOKEN") or profile.get("token", ""))

    def close(self) -> None:
        """Let go of the connections."""
        self._http.close()

    def get(self, path: str, **query: str | int | bool | list[str] | None) -> Any:
        """Return the JSON of `GET path`; query values that are None are left out."""
        return self._request("GET", path, params={name: value for name, value in query.items() if value is not None})

    def post(self, path: str, body: Mapping[str, Any], *, idempotency_key: str | None = None) -> Any:
        """Return the JSON of `POST path`."""
        headers = {"idempotency-key": idempotency_key} if idempotency_key else {}
        return self._request("POST", path, json=dict(body), headers=headers)

    def put(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON of `PUT path`: all of a thing."""
        return self._request("PUT", path, json=dict(body))

    def patch(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON of `PATCH path`: some of a thing."""
        return self._request("PATCH", path, json=dict(body))

    def delete(self, path: str, **query: str) -> Any:
        """Return the JSON of `DELETE path`, or None."""
        return self._request("DELETE", path, params=query)

    def pages(self, path: str, **query: str | int | bool | None) -> Iterator[Any]:
        """Yield the items of every page of a listing."""
        after: str | None = None
        while True:
            page = self.get(path, **{**query, "after": after, "limit": PAGE_ROWS})
            yield from page["items"]
            after = page.get("next")
            if after is None:
                return

    def server_sent(self, path: str, **query: str | int | None) -> Iterator[tuple[str, Any]]:
        """Yield the name and data of server-sent events, and go on after the last one when the connection ends.

        Raises `Unavailable` when the first answer fails, or the API stays away for longer than a restart takes.
        """
        params = {name: value for name, value in query.items() if value is not None}
        headers = {"accept": "text/event-stream"}
        away_since_s: float | None = None
        retry_s = RESUME_S_MIN
        while True:
            try:
                for event in self._one_stream(path, params=params, headers=headers):
                    away_since_s, retry_s = None, RESUME_S_MIN
                    if event is not None:
                        yield event
            except Unavailable:
                now_s = time.monotonic()
                away_since_s = away_since_s or now_s
                if "last-event-id" not in headers or now_s - away_since_s > RESUME_FOR_S:
                    raise
            time.sleep(retry_s)
            retry_s = min(2 * retry_s, RESUME_S_MAX)

    def _one_stream(
        self, path: str, *, params: Mapping[str, str | int], headers: dict[str, str]
    ) -> Iterator[tuple[str, Any] | None]:
        """Yield the events of one connection, None for a sign of life, and keep `last-event-id` in `headers`."""
        try:
            with self._http.stream("GET", path, params=params, headers=headers) as answer:
                if not answer.is_success:
                    answer.read()
                    raise _problem(answer)
                name = data = ""
                for line in answer.iter_lines():
                    field, _, value = line.partition(": ")
                    if field == "id":
                        headers["last-event-id"] = value
                    elif field == "event":
                        name = value
                    elif field == "data":
                        data = value
                    elif not line:
                        yield (name, json.loads(data)) if data else None
                        name = data = ""
        except httpx.HTTPError as error:
            raise Unavailable(
                f"the API at {self.address} did not answer: {str(error) or type(error).__name__}"
            ) from None

    def _request(self, method: str, path: str, **options: Any) -> Any:
        try:
            answer = self._http.request(method, path, **options)
        except (httpx.InvalidURL, UnicodeError) as error:
            raise _refuse(f"this cannot be asked of the API: {error}") from None
        except httpx.HTTPError as error:
            raise Unavailable(
                f"the API at {self.address} did not answer: {str(error) or type(error).__name__}"
            ) from None
        if answer.is_success:
            return answer.json() if answer.content else None
        raise _problem(answer)


def path_of(*parts: str) -> str:
    """Return an API path of `parts`, each one segment whatever characters it has: an id never leads elsewhere.

    Raises `Refused` for a part that cannot be a segment.
    """
    for part in parts:
        if part in {"", ".", ".."} or not part.isprintable():
            raise _refuse(f"{part!a} is not an id")
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


def _refuse(sentence: str) -> Refused:
    return Refused(sentence, status=Status.INVALID_ARGUMENT, reason=Reason.INVALID_CONFIG)


def _problem(answer: httpx.Response) -> BetterComputeError:
    try:
        document = answer.json()
        sentence, reason = str(document.get("detail") or document["title"]), str(document.get("reason", "api"))
    except (ValueError, KeyError, AttributeError):
        sentence, reason = f"the API answered HTTP {answer.status_code}", "api"
    if answer.status_code >= 500:
        return Unavailable(sentence, reason=reason)
    if answer.status_code == 401:
        sentence += " (set BETTER_COMPUTE_TOKEN)"
    return Refused(sentence, status=_HTTP_STATUS.get(answer.status_code, Status.UNKNOWN), reason=reason)


def _profile(variables: Mapping[str, str]) -> dict[str, str]:
    folder = variables.get("XDG_CONFIG_HOME") or str(Path(variables.get("HOME", "/")) / ".config")
    path = Path(folder) / "better-compute" / "profile.toml"
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _refuse(f"profile file {path}: {error}") from None
    return {name: str(value) for name, value in values.items()}
