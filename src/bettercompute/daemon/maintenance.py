"""What an operator does to a node beside running it: join it, check its journal, reset its clock.

Each takes the state folder's lock, so that it never works under a running daemon's hands; only a re-join is handed to
the daemon that runs. See docs/daemon.md, "Setting it up", "A new token for a running daemon".
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from bettercompute import __version__
from bettercompute.daemon import control, machine
from bettercompute.daemon.config import Config
from bettercompute.daemon.control import Rejoined, RejoinRequest
from bettercompute.daemon.identity import Identity, IdentityStore
from bettercompute.daemon.inventory.host import HostRoot
from bettercompute.daemon.join import JoinSettings, join
from bettercompute.daemon.join_attempt import Dial
from bettercompute.daemon.journal import DATABASE_NAME, JournalDatabase
from bettercompute.daemon.journal_files import FolderLock, companions, prepare_folder
from bettercompute.daemon.journal_records import LIMITS, JournalContents, JournalDamagedError
from bettercompute.errors import Refused, Unavailable
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.session.effects import StoreTime
from bettercompute.world import World

# A journal at its bound, and a log that has grown as large.
COPY_BYTES_MAX = 2 * LIMITS.max_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Joining:
    """A join as it was asked for."""

    config: Config
    token: str = field(repr=False)
    role: str
    node_id: str
    rejoin: bool
    environment: Mapping[str, str]
    world: World
    attestor: str = ""
    """Empty: the token's."""
    evidence: bytes = field(default=b"", repr=False)
    """What the attestor wants beside the token."""
    dial: Dial | None = None


async def join_here(joining: Joining) -> Rejoined:
    """Join this machine, or have the daemon that runs on it join anew, and return who the node is."""
    config = joining.config
    try:
        with _locked(config.state_dir, make=True):
            identity = await join_with(IdentityStore(config.state_dir), joining, root=HostRoot.live())
    except Unavailable as error:
        if error.reason != FolderLock.HELD:
            raise
        if not joining.rejoin:
            raise Unavailable(
                f"{error.message}; a new token is handed to it by `bcd rejoin`", reason=error.reason
            ) from error
        request = RejoinRequest(
            token=joining.token,
            role=joining.role,
            node_id=joining.node_id,
            attestor=joining.attestor,
            evidence_hex=joining.evidence.hex(),
        )
        return await asyncio.to_thread(control.ask, config.state_dir, request)
    return rejoined(identity)


async def join_with(identities: IdentityStore, joining: Joining, *, root: HostRoot) -> Identity:
    """Join and return the identity, which is on disk then; the caller holds the state folder."""
    config = joining.config
    settings = JoinSettings(
        token=joining.token,
        daemon_version=__version__,
        role=joining.role,
        node_id=joining.node_id,
        attestor=joining.attestor,
        evidence=joining.evidence,
        hardware=machine.hardware_claims(root, boot_id=machine.read_boot_id(root, config.reboot.boot_id_file)),
        machine=machine.read_machine(root),
        gateway_url=config.gateway_url,
        server_name=config.gateway_server_name or None,
        environment=joining.environment,
        rejoin=joining.rejoin,
    )
    return await join(identities, settings, world=joining.world, dial=joining.dial)


def rejoined(identity: Identity) -> Rejoined:
    """Return who the node is now."""
    record = identity.record
    return Rejoined(node_id=record.node_id, site=record.site, role=record.role)


def check_journal(state_dir: Path) -> dict[str, object]:
    """Read the whole journal and return what it holds, or what is wrong with it, without changing anything."""
    with _locked(state_dir):
        path = state_dir / DATABASE_NAME
        if not any(companion.exists() for companion in companions(path)):
            raise refuse(Reason.INVALID_CONFIG, f"{path} does not exist: this node has not run yet")
        try:
            contents = _checked_copy(path)
        except JournalDamagedError as damage:
            return {"sound": False, "file": str(path), "why": str(damage)}
        unfinished = sum(1 for entry in contents.commands if not entry.done)
        return {
            "sound": True,
            "file": str(path),
            "journal_id": contents.meta.journal_id,
            "commands": contents.meta.commands,
            "unfinished_commands": unfinished,
            "results_not_acked": sum(1 for entry in contents.commands if entry.done and not entry.acked),
            "events_not_acked": contents.meta.events,
            "bytes": path.stat().st_size,
        }


def _checked_copy(path: Path) -> JournalContents:
    """Read a copy of a journal: to open and close the journal itself would write its log into it."""
    size_bytes = sum(companion.stat().st_size for companion in companions(path) if companion.exists())
    if size_bytes > COPY_BYTES_MAX:
        raise refuse(
            Reason.INVALID_CONFIG,
            f"{path} and the files beside it have {size_bytes} bytes, which no journal has (at most {COPY_BYTES_MAX}): "
            "move them away, and look at what wrote them",
        )
    try:
        with tempfile.TemporaryDirectory(prefix="bcd-journal-") as folder:
            for companion in companions(path):
                if companion.exists():
                    shutil.copyfile(companion, Path(folder, companion.name))
            copy = JournalDatabase(Path(folder))
            try:
                return copy.check()
            finally:
                copy.close()
    except OSError as error:
        raise Unavailable(
            f"{path} is checked as a copy, which cannot be made: {error}: make {path.parent} readable for this user, "
            f"and have {size_bytes} bytes free in {tempfile.gettempdir()} (or set TMPDIR elsewhere)",
            reason="journal-copy",
        ) from error


def reset_clock(state_dir: Path, *, world: World) -> tuple[int, int]:
    """Make the host's clock the node's server time, also backwards; return what it was and what it is now."""
    with _locked(state_dir):
        identities, now_ms = IdentityStore(state_dir), world.clock.now_ms()
        identity = identities.load()
        if identity is None:
            raise refuse(Reason.NOT_JOINED, f"{state_dir} holds no identity: there is no clock to reset")
        was_ms = identity.record.server_time_mark_ms
        database = JournalDatabase(state_dir)
        if database.path.exists():
            try:
                _checked_copy(database.path)  # a damaged one is kept as it is
                was_ms = max(was_ms, database.check().meta.time_mark_ms)
                database.apply([StoreTime(now_ms, now_ms)])
            except JournalDamagedError as damage:
                raise _damaged(database, damage) from damage
            finally:
                database.close()
        identities.reset_clock(server_time_ms=now_ms)
        return was_ms, now_ms


def _damaged(database: JournalDatabase, damage: JournalDamagedError) -> Refused:
    return refuse(
        Reason.INVALID_CONFIG,
        f"{database.path} is damaged ({damage}): start `bcd node`, which sets it aside, and stop it",
    )


@contextmanager
def _locked(state_dir: Path, *, make: bool = False) -> Iterator[None]:
    if not make and not state_dir.exists():
        raise refuse(Reason.INVALID_CONFIG, f"state_dir {state_dir} does not exist: this node has not joined yet")
    prepare_folder(state_dir)
    lock = FolderLock.take(state_dir)
    try:
        yield
    finally:
        lock.release()
