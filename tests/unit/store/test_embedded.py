from __future__ import annotations

import asyncio
import fcntl
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bettercompute.errors import Bug, Refused, Unavailable
from bettercompute.store import embedded, embedded_binaries
from bettercompute.store.database import Database
from bettercompute.system import system_world
from bettercompute.testing.postgres import CHEAP_SETTINGS
from bettercompute.testing.thread_connection import ThreadConnection

INITDB = ("--no-sync",)


@pytest.fixture(scope="module")
def shared_dir(tmp_path_factory):
    """A folder below parents of mode 0700, made once: making a cluster is what takes time."""
    data_dir = tmp_path_factory.mktemp("embedded") / ("long" * 20) / "data"
    server = embedded.start(data_dir, settings=CHEAP_SETTINGS, initdb_options=INITDB)
    server.stop()
    return data_dir


def ask(dsn: str, sql: str) -> object:
    with ThreadConnection(dsn, application_name="tests") as connection:
        [row] = connection.query(f"SELECT ({sql}) AS answer")
        return row["answer"]


def is_alive(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_the_end_of(process_id: int) -> None:
    handle = os.pidfd_open(process_id)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        assert poll.poll(20_000), f"process {process_id} still runs"
    finally:
        os.close(handle)


def test_the_server_runs_as_an_ordinary_user_behind_a_private_socket(shared_dir):
    server = embedded.start(shared_dir, settings=CHEAP_SETTINGS)
    try:
        assert ask(server.dsn, "current_database()") == "bettercompute"
        folder = Path(server.dsn.partition("host=")[2])
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(str(folder)) < 60
        status = Path(f"/proc/{server.process_id}/status").read_text()
        assert "\nUid:\t0\t" not in status
        assert ask(server.dsn, "current_setting('listen_addresses')") == ""
        rules = ask(server.dsn, "SELECT string_agg(type || ' ' || auth_method, ',' ORDER BY rule_number) "
                    "FROM pg_hba_file_rules")  # fmt: skip
        assert rules == "local peer,host scram-sha-256"
    finally:
        server.stop()


def test_fsync_is_on_unless_somebody_turns_it_off():
    assert embedded.SETTINGS["fsync"] == "on"


def test_a_restart_keeps_the_data_and_the_address(shared_dir):
    server = embedded.start(shared_dir, settings=CHEAP_SETTINGS)
    try:
        address = server.dsn
        with ThreadConnection(address, application_name="tests") as connection:
            connection.script("CREATE TABLE IF NOT EXISTS kept (x int); INSERT INTO kept VALUES (1)")
        server.stop()
        assert not server.running()
        server.start()
        assert server.dsn == address
        assert ask(address, "SELECT count(*) FROM kept") == 1
    finally:
        server.stop()
        server.stop()


def test_a_killed_server_starts_again(shared_dir):
    server = embedded.start(shared_dir, settings=CHEAP_SETTINGS)
    try:
        killed = server.process_id
        os.kill(killed, signal.SIGKILL)
        wait_for_the_end_of(killed)
        server.start()
        assert server.process_id != killed
        assert ask(server.dsn, "1 + 1") == 2
    finally:
        server.stop()


def test_a_folder_in_use_is_refused_and_found(shared_dir, monkeypatch):
    monkeypatch.setattr(embedded, "IN_USE_WAIT_MS", 20)
    server = embedded.start(shared_dir, settings=CHEAP_SETTINGS)
    try:
        with pytest.raises(Refused, match="another process uses the database"):
            embedded.start(shared_dir, settings=CHEAP_SETTINGS)
        assert server.running()
        assert embedded.find_running(shared_dir) == server.dsn
    finally:
        server.stop()
    assert embedded.find_running(shared_dir) is None


def test_a_stale_pid_file_that_names_a_living_process_harms_nobody(shared_dir):
    pid_file = shared_dir / "cluster" / "postmaster.pid"
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        lines = [str(bystander.pid), str(shared_dir / "cluster"), "0", "5432", "/tmp", "", "1 1", "ready"]
        pid_file.write_text("\n".join(lines) + "\n")
        assert embedded.find_running(shared_dir) is None
        server = embedded.start(shared_dir, settings=CHEAP_SETTINGS)
        assert ask(server.dsn, "1") == 1
        server.stop()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_another_major_version_is_refused_by_name(shared_dir):
    version = shared_dir / "cluster" / "PG_VERSION"
    kept = version.read_text()
    version.write_text("12\n")
    try:
        with pytest.raises(Refused, match="made by PostgreSQL 12"):
            embedded.start(shared_dir, settings=CHEAP_SETTINGS)
    finally:
        version.write_text(kept)


def test_a_server_that_cannot_start_says_why(shared_dir):
    with pytest.raises(Unavailable, match="shared_buffers"):
        embedded.start(shared_dir, settings={**CHEAP_SETTINGS, "shared_buffers": "nonsense"})


PARENT = """
import sys, threading
from pathlib import Path
from bettercompute.store import embedded
from bettercompute.testing.postgres import CHEAP_SETTINGS
server = embedded.start(Path(sys.argv[1]), settings=CHEAP_SETTINGS)
print(server.process_id, flush=True)
threading.Event().wait()
"""


def start_parent(data_dir: Path) -> tuple[subprocess.Popen[str], int]:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(data_dir)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_ends_with_its_parent_however_that_ends(shared_dir, how):
    parent, process_id = start_parent(shared_dir)
    with parent:
        assert is_alive(process_id)
        # A client keeps a backend alive; it must end as well.
        address = embedded.find_running(shared_dir)
        assert address is not None
        with ThreadConnection(address, application_name="tests") as connection:
            [row] = connection.query("SELECT pg_backend_pid() AS backend")
            parent.send_signal(how)
            parent.wait()
            if is_alive(process_id):
                wait_for_the_end_of(process_id)
    assert not is_alive(process_id)
    assert not is_alive(row["backend"])
    # The next start waits for the last of them.
    server = embedded.start(shared_dir, settings=CHEAP_SETTINGS)
    server.stop()


def test_a_start_waits_for_a_server_that_is_ending(shared_dir, monkeypatch):
    lock = os.open(shared_dir / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    monkeypatch.setattr(embedded, "LOCK_WAIT_MS", 30)
    try:
        with pytest.raises(Refused, match="another process uses"):
            embedded.start(shared_dir, settings=CHEAP_SETTINGS)
    finally:
        os.close(lock)


async def test_only_the_main_thread_may_start_it(shared_dir):
    with pytest.raises(Bug, match="main thread"):
        await asyncio.to_thread(embedded.start, shared_dir, settings=CHEAP_SETTINGS)


@pytest.mark.skipif(os.getuid() != 0, reason="copies are made only when root hands the server to another user")
def test_binaries_that_the_server_may_not_reach_are_copied_where_it_may(shared_dir, monkeypatch):
    home = Path(f"/var/tmp/bc-test-{os.getpid()}")
    open_to_all = embedded_binaries._open_to_all
    monkeypatch.setattr(
        embedded_binaries, "_open_to_all", lambda path: "site-packages" not in str(path) and open_to_all(path)
    )
    monkeypatch.setattr(embedded_binaries, "CACHES", (Path("/proc/nowhere"), home))
    try:
        bin_dir = embedded_binaries.reachable(for_other_user=True)
        assert home in bin_dir.parents
        assert embedded_binaries.reachable(for_other_user=True) == bin_dir
        assert embedded_binaries.reachable(for_other_user=False) == embedded_binaries.installed()
        server = embedded.start(shared_dir, settings=CHEAP_SETTINGS)
        try:
            assert home in Path(f"/proc/{server.process_id}/exe").resolve().parents
        finally:
            server.stop()
        monkeypatch.setattr(embedded_binaries, "CACHES", (Path("/proc/nowhere"),))
        with pytest.raises(Refused, match="none of /proc/nowhere can hold a copy"):
            embedded_binaries.reachable(for_other_user=True)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def test_a_socket_folder_that_is_not_ours_is_not_used(shared_dir, tmp_path):
    note = shared_dir / "socket-folder"
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o755)
    note.write_text(str(foreign))
    server = embedded.start(shared_dir, settings=CHEAP_SETTINGS)
    try:
        assert str(foreign) not in server.dsn
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(f"{server.dsn.partition('host=')[2]}/.s.PGSQL.5432")
    finally:
        server.stop()


def test_a_standby_is_refused_at_connect(tmp_path):
    settings = {"fsync": "off", "shared_buffers": "16MB"}
    server = embedded.start(tmp_path / "data", settings=settings, initdb_options=INITDB)
    try:
        server.stop()
        signal_file = tmp_path / "data" / "cluster" / "standby.signal"
        signal_file.touch()
        shutil.chown(signal_file, embedded._server_owner().user)
        server.start()
        with pytest.raises(Unavailable, match="standby"):
            ThreadConnection(server.dsn, application_name="tests")
        with pytest.raises(Unavailable, match="standby"):
            asyncio.run(Database.open(server.dsn, dice=system_world().dice, application_name="tests"))
    finally:
        server.stop()
