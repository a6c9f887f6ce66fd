"""What an operator asks of the living daemon beside its status: to take a new join token, without a restart.

One JSON line there and one back, over a socket in the state folder that is its owner's alone. Whoever asked waits as
long as the join takes; when it hangs up, the join is given up, and may be asked for again with the same token. See
docs/daemon.md, "A new token for a running daemon"; decisions 0147.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import structlog

from bettercompute.daemon import local_socket
from bettercompute.errors import BetterComputeError, Refused, Unavailable
from bettercompute.protocol.statuses import Reason, refuse

SOCKET_NAME = "control.sock"
REQUEST_BYTES_MAX = 256 * 1024  # a token, an assertion, a few names
ANSWER_BYTES_MAX = 64 * 1024
ASKED_TIMEOUT_S = 5.0
# How long an answer may take to be read by whoever asked, once bcd stops.
FAREWELL_S = 2.0
# How long whoever asked waits: longer than a join goes on.
ANSWER_TIMEOUT_S = 11 * 60.0

log = structlog.get_logger("bcd.control")


@dataclass(frozen=True, slots=True, kw_only=True)
class RejoinRequest:
    """A re-join as an operator asked for it."""

    token: str = field(repr=False)
    role: str
    node_id: str
    attestor: str
    evidence_hex: str = field(default="", repr=False)
    """What the attestor wants beside the token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejoined:
    """Who the node is now."""

    node_id: str
    site: str
    role: str


class ControlServer:
    """Takes one request of each connection."""

    def __init__(self, state_dir: Path, rejoin: Callable[[RejoinRequest], Awaitable[Rejoined]]) -> None:
        self._state_dir = state_dir
        self._rejoin = rejoin
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._joining: set[asyncio.Future[Rejoined]] = set()

    async def start(self) -> None:
        """Listen; the folder's lock is held."""
        self._server = await local_socket.serve(self._state_dir, SOCKET_NAME, self._serve, limit=REQUEST_BYTES_MAX)

    async def close(self) -> None:
        """Stop listening, and give up what is under way."""
        if self._server is None:
            return
        self._server.close()
        for joining in list(self._joining):
            joining.cancel()
        if self._serving:
            _, hanging = await asyncio.wait(set(self._serving), timeout=FAREWELL_S)
            for task in hanging:
                task.cancel()
            await asyncio.gather(*hanging, return_exceptions=True)
        await self._server.wait_closed()
        (self._state_dir / SOCKET_NAME).unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection is served in a task of its own"
        self._serving.add(task)
        try:
            with contextlib.suppress(ConnectionError, TimeoutError, ValueError):
                async with asyncio.timeout(ASKED_TIMEOUT_S):
                    line = await reader.readuntil()
                writer.write(json.dumps(await self._answered(line, reader)).encode() + b"\n")
                await writer.drain()
        except asyncio.IncompleteReadError:
            log.debug("somebody connected to the control socket and asked for nothing")
        finally:
            self._serving.discard(task)
            writer.close()

    async def _answered(self, line: bytes, reader: asyncio.StreamReader) -> dict[str, Any]:
        """Do what was asked for, unless whoever asked hangs up before it is done."""
        try:
            request = parse_request(line)
            doing = asyncio.ensure_future(self._rejoin(request))
            self._joining.add(doing)
            gone = asyncio.ensure_future(reader.read())
            try:
                await asyncio.wait({doing, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not doing.done():
                    raise ConnectionError("whoever asked has hung up")
                if doing.cancelled():
                    raise Unavailable("bcd is stopping: hand it the token again when it runs")
                return asdict(doing.result())
            finally:
                self._joining.discard(doing)
                doing.cancel()
                gone.cancel()
                await asyncio.gather(doing, gone, return_exceptions=True)
        except BetterComputeError as error:
            return {"error": error.message, "status": int(error.status), "reason": str(error.reason)}


def parse_request(line: bytes) -> RejoinRequest:
    """Read a request; refuse what is none."""
    try:
        values = json.loads(line)["rejoin"]
        if not all(isinstance(value, str) for value in values.values()):
            raise TypeError("every part of a request is a text")
        request = RejoinRequest(**values)
        bytes.fromhex(request.evidence_hex)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise refuse(
            Reason.BAD_REQUEST, "the running bcd does not understand the request: is it of another version? Restart it"
        ) from error
    return request


def ask(state_dir: Path, request: RejoinRequest) -> Rejoined:
    """Hand a token to the daemon that holds `state_dir` and return who it is then; raise what it met."""
    try:
        with local_socket.connect(state_dir, SOCKET_NAME, timeout_s=ANSWER_TIMEOUT_S) as asking:
            asking.sendall(json.dumps({"rejoin": asdict(request)}).encode() + b"\n")
            answer = json.loads(local_socket.received(asking, limit=ANSWER_BYTES_MAX))
            if "error" in answer:
                raise Refused(str(answer["error"]), status=int(answer["status"]), reason=str(answer["reason"]))
            return Rejoined(**answer)
    except (FileNotFoundError, ConnectionRefusedError):
        problem = "it takes no token now: it is starting, stopping, or of an older version; try again"
    except TimeoutError:
        problem = f"it did not answer within {ANSWER_TIMEOUT_S:g} s; look at its log"
    except PermissionError:
        problem = "only its owner may: run this as the user that bcd runs as, or as root"
    except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        problem = f"its answer cannot be read ({error}); look at its log"
    raise Unavailable(f"the bcd that holds {state_dir} was not given the token: {problem}", reason="not-handed-over")
