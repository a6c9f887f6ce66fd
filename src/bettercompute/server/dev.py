"""The whole product on one machine, for trying and for tests: database, control plane and real nodes in one folder.

A folder that is named is kept and taken up again; without one a temporary folder is used and removed. The nodes are
real `bcd` processes, which end with this one however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bettercompute.errors import Refused, Unavailable
from bettercompute.pki import certificates, keyfiles
from bettercompute.pki.keyfiles import KeyFolder
from bettercompute.protocol.statuses import Reason, Status
from bettercompute.server.app import ALL_ROLES, Running, control_plane
from bettercompute.server.config import ApiSection, Config, GatewaySection, PkiSection
from bettercompute.services import pki_setup
from bettercompute.store import embedded, migrations
from bettercompute.world import World

TEMPORARY_PREFIX = "better-compute-dev-"
SERVING_NAMES = ("localhost", "127.0.0.1", "::1")
NODES_MAX = 50
STOP_S = 10.0
JOIN_S = 60.0
TOKEN_TTL_MS = 600_000

# Between fork and exec: bcd gets SIGTERM when this process ends, however it ends.
_TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the development stack ended before its node began")
os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevStack:
    """A running stack; `dsn` is the database's address."""

    running: Running
    folder: Path
    dsn: str
    serving_ca: Path
    serving_ca_pin: str
    nodes: list[DevNode] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class DevNode:
    """One `bcd` of the stack."""

    node_id: str
    config_path: Path
    log_path: Path
    process: asyncio.subprocess.Process | None = None


@contextlib.contextmanager
def dev_folder(folder: Path | None) -> Iterator[Path]:
    """Give the stack's folder, locked: the named one, or a temporary one that is removed at the end."""
    temporary = None
    if folder is None:
        _sweep(Path(tempfile.gettempdir()))
        temporary = folder = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX))
    folder = folder.absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Refused(
                f"another development stack runs in {folder}: stop it, or name another folder with --dir",
                status=Status.FAILED_PRECONDITION,
                reason=Reason.CONFLICT,
            ) from None
        yield folder
    finally:
        os.close(lock)
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove what a stack that was killed left behind: its folder holds keys, and nobody comes back for it."""
    for left in parent.glob(f"{TEMPORARY_PREFIX}*"):
        with contextlib.suppress(OSError):
            if left.is_symlink() or left.stat().st_uid != os.getuid():
                continue
            lock = os.open(left / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                embedded.remove_socket_folder(left / "postgres")
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)


@contextlib.contextmanager
def dev_database(folder: Path) -> Iterator[str]:
    """Run the embedded database and give its address. Called by the main thread, outside the event loop."""
    server = embedded.start(folder / "postgres")
    try:
        yield server.dsn
    finally:
        server.stop()


@contextlib.asynccontextmanager
async def dev_stack(folder: Path, *, dsn: str, nodes: int, world: World) -> AsyncIterator[DevStack]:
    """Migrate, make what keys are missing, run all roles and join `nodes` nodes, until the block ends."""
    await migrations.migrate(dsn)
    keys = KeyFolder(folder / "pki")
    if not keys.names():
        pki_setup.initialise(keys, world=world)
    pki_setup.issue_gateway(keys, names=SERVING_NAMES, world=world)
    port = _free_port()
    gateway_url = f"https://127.0.0.1:{port}"
    config = Config(
        state_dir=str(folder),
        api=ApiSection(host="127.0.0.1", port=0),
        gateway=GatewaySection(name="dev", host="127.0.0.1", port=port, advertise_url=gateway_url),
        pki=PkiSection(command_signing=True),
    )
    serving_ca = keys.certificate(keyfiles.SERVING_CA)
    async with (
        control_plane(config, dsn=dsn, roles=ALL_ROLES, world=world) as running,
        _nodes(folder, running, count=nodes) as joined,
    ):
        yield DevStack(
            running=running,
            folder=folder,
            dsn=dsn,
            serving_ca=keys.path(f"{keyfiles.SERVING_CA}.pem"),
            serving_ca_pin=certificates.spki_sha256(serving_ca),
            nodes=joined,
        )


@contextlib.asynccontextmanager
async def _nodes(folder: Path, running: Running, *, count: int) -> AsyncIterator[list[DevNode]]:
    made = [_write_node(folder, f"node-{number}", running) for number in range(1, count + 1)]
    try:
        await asyncio.gather(*(_join(node, running) for node in made))
        for node in made:
            node.process = await _start(node, "node")
        yield made
    finally:
        await asyncio.gather(*(_stop(node) for node in made))


def _write_node(folder: Path, node_id: str, running: Running) -> DevNode:
    home = folder / "nodes" / node_id
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    config_path = home / "config.toml"
    # This host is not the nodes' own to reboot.
    config_path.write_text(
        f'state_dir = "{home / "state"}"\ngateway_url = ["{running.gateway_url}"]\n\n[reboot]\nallowed = false\n',
        encoding="utf-8",
    )
    return DevNode(node_id=node_id, config_path=config_path, log_path=home / "bcd.log")


async def _join(node: DevNode, running: Running) -> None:
    if (node.config_path.parent / "state" / "identity.json").exists():
        return
    token = await _token_for(running, node_id=node.node_id)
    process = await _start(node, "join", stdin=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(JOIN_S):
            await process.communicate(token.encode())
    except TimeoutError:
        process.kill()
        await process.wait()
    if process.returncode != 0:
        raise Unavailable(f"{node.node_id} did not join; {node.log_path} says why:\n{_end_of(node.log_path)}")


async def _token_for(running: Running, *, node_id: str) -> str:
    headers = {"authorization": f"Bearer {running.operator_token}"}
    async with httpx.AsyncClient(base_url=running.api_url or "", headers=headers, trust_env=False) as client:
        answer = await client.post("/v1/tokens", json={"node_id": node_id, "ttl_ms": TOKEN_TTL_MS})
    if not answer.is_success:
        raise Unavailable(f"{node_id} got no join token: {answer.text[:500]}")
    return str(answer.json()["token"])


async def _start(node: DevNode, *command: str, stdin: int = asyncio.subprocess.DEVNULL) -> asyncio.subprocess.Process:
    bcd = [sys.executable, "-m", "bettercompute.cli.bcd", *command, "--config", str(node.config_path)]
    with node.log_path.open("ab") as log:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid())),
            *bcd,
            stdin=stdin,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Ctrl-C is for the stack, which stops its nodes in order.
            start_new_session=True,
        )


async def _stop(node: DevNode) -> None:
    process = node.process
    if process is None or process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _end_of(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace")[-2_000:]
    return ""


def _free_port() -> int:
    """Return a port that was free a moment ago: the nodes must be told of it before the gateway listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
