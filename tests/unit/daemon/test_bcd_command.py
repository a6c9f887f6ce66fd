"""The `bcd` command: its help, its exit codes, and what it does to a node that is stopped."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bettercompute import __version__
from bettercompute.cli import bcd
from bettercompute.daemon import maintenance, status
from bettercompute.daemon.config import Config
from bettercompute.daemon.identity import IdentityStore
from bettercompute.daemon.journal import JournalDatabase
from bettercompute.daemon.journal_files import FolderLock
from bettercompute.daemon.maintenance import Joining
from bettercompute.daemon.status import ConditionStatus, DaemonStatus
from bettercompute.errors import Unavailable
from tests.unit.daemon.fake_gateway import NODE_ID, join
from tests.unit.daemon.journal_samples import accept, open_journal


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(f'state_dir = "{tmp_path / "state"}"\n')
    return path


def state_dir(config_file: Path) -> Path:
    return config_file.parent / "state"


def fill_journal(config_file: Path) -> JournalDatabase:
    database: JournalDatabase
    database, _ = open_journal(state_dir(config_file))
    database.apply([accept("c1")])
    database.close()
    return database


@pytest.mark.parametrize("arguments", [["--help"], ["join", "--help"], ["journal", "check", "--help"], ["--version"]])
def test_help_is_printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bcd.run(arguments)
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert (__version__ if arguments == ["--version"] else "usage: bcd") in out


@pytest.mark.parametrize("arguments", [[], ["tunnel"], ["journal"], ["join", "--token", "t", "--token-file", "f"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bcd.run(arguments)
    assert ended.value.code == 2
    assert "usage: bcd" in capsys.readouterr().err


def test_help_and_status_import_nothing_heavy(config_file: Path) -> None:
    program = (
        "import sys; from bettercompute.cli import bcd\n"
        f"code = bcd.run(['status', '--config', {str(config_file)!r}])\n"
        "heavy = {'rich', 'typer', 'pydantic', 'cryptography', 'h2', 'asyncpg', 'fastapi', 'sqlite3'}\n"
        "print(code, sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "3 []"


def test_an_interrupt_is_an_exit_code_also_while_arguments_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bcd, "_parser", interrupted)
    assert bcd.run(["status"]) == 130


def test_a_wrong_configuration_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.toml"
    path.write_text("state_dri = 7")
    assert bcd.run(["status", "--config", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"error: configuration {path}: state_dri is not a known key; did you mean state_dir?\n"
    )


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (DaemonStatus(state="connected", node_id="n1", gateway_url="https://gw", gateway_id="gw-1"), 0),
        (DaemonStatus(state="waiting", reason="the gateway drains", next_dial_in_ms=2_400), 1),
        (
            DaemonStatus(
                state="waiting",
                conditions=(ConditionStatus(type="NeedsRejoin", reason="revoked", message="join anew"),),
            ),
            4,
        ),
    ],
)
def test_status_exits_0_only_when_connected(
    config_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: DaemonStatus,
    code: int,
) -> None:
    monkeypatch.setattr(status, "ask", lambda _: found)
    assert bcd.run(["status", "--config", str(config_file)]) == code
    shown = capsys.readouterr().out
    assert f"state              {found.state}" in shown or f"  {found.state}\n" in shown
    if found.reason:
        assert "the gateway drains" in shown
        assert "2 s" in shown
    assert bcd.run(["status", "--config", str(config_file), "--json"]) == code
    answer = json.loads(capsys.readouterr().out)
    assert (answer["connected"], answer["needs_rejoin"]) == (code == 0, code == 4)


def test_a_sound_journal_is_told_as_such(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill_journal(config_file)
    assert bcd.run(["journal", "check", "--config", str(config_file), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["sound"], report["commands"], report["unfinished_commands"]) == (True, 1, 1)
    assert bcd.run(["journal", "check", "--config", str(config_file)]) == 0
    assert "journal_id" in capsys.readouterr().out


def test_a_damaged_journal_is_told_and_left_as_it_is(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database = fill_journal(config_file)
    seal = database.path.with_name("journal.db-seal")
    seal.write_bytes(bytes(seal.stat().st_size))
    assert bcd.run(["journal", "check", "--config", str(config_file)]) == 1
    told = capsys.readouterr()
    assert "the seal is missing, damaged or of another journal" in told.out
    assert "the journal is damaged" in told.err
    assert database.path.exists()


def test_maintenance_needs_a_folder_and_no_running_daemon(
    config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bcd.run(["journal", "check", "--config", str(config_file)]) == 2
    assert "does not exist: this node has not joined yet" in capsys.readouterr().err
    state_dir(config_file).mkdir()
    assert bcd.run(["journal", "check", "--config", str(config_file)]) == 2
    assert "this node has not run yet" in capsys.readouterr().err
    lock = FolderLock.take(state_dir(config_file))
    for arguments in (["journal", "check"], ["clock", "reset"], ["join", "--token", "t"]):
        assert bcd.run([*arguments, "--config", str(config_file)]) == 3
        assert "another bcd" in capsys.readouterr().err
    lock.release()


def test_the_clock_is_reset_in_identity_and_journal(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bcd.run(["clock", "reset", "--config", str(config_file)]) == 2
    assert "does not exist" in capsys.readouterr().err
    join(Config(state_dir=state_dir(config_file)))
    identities = IdentityStore(state_dir(config_file))
    identities.raise_marks(server_time_ms=4_000_000_000_000)
    fill_journal(config_file)
    assert bcd.run(["clock", "reset", "--config", str(config_file)]) == 0
    assert "it was 2096-10-02 07:06:40+00:00" in capsys.readouterr().err
    identity = identities.load()
    assert identity is not None
    assert identity.record.server_time_mark_ms < 4_000_000_000_000
    database, contents = open_journal(state_dir(config_file))
    database.close()
    assert contents.meta.time_mark_ms == contents.meta.confirmed_ms == identity.record.server_time_mark_ms
    seal = database.path.with_name("journal.db-seal")
    seal.write_bytes(bytes(seal.stat().st_size))
    assert bcd.run(["clock", "reset", "--config", str(config_file)]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_a_join_takes_its_token_from_option_file_or_standard_input(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Joining] = []

    async def join_here(joining: Joining):
        asked.append(joining)
        join(joining.config)
        identity = IdentityStore(joining.config.state_dir).load()
        assert identity is not None
        return maintenance.rejoined(identity)

    monkeypatch.setattr(maintenance, "join_here", join_here)
    (tmp_path / "token").write_text("from-file\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("from-stdin\n"))
    common = ["--config", str(config_file)]
    assert bcd.run(["join", "from-option", *common]) == 0
    assert f"joined as {NODE_ID} (site default, role node)" in capsys.readouterr().err
    assert bcd.run(["rejoin", "--token-file", str(tmp_path / "token"), "--node-id", "n7", *common]) == 0
    assert bcd.run(["join", "--json", "--role", "site", *common]) == 0
    assert json.loads(capsys.readouterr().out)["node_id"] == NODE_ID
    assert [joining.token for joining in asked] == ["from-option", "from-file", "from-stdin"]
    assert [joining.rejoin for joining in asked] == [False, True, False]
    assert [joining.node_id for joining in asked] == ["", "n7", ""]
    assert "from-option" not in repr(asked)
    assert bcd.run(["join", "--token-file", str(tmp_path / "missing"), *common]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_malformed_token_is_refused(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bcd.run(["join", "--token", "nonsense", "--config", str(config_file)]) == 2
    assert "token" in capsys.readouterr().err


def test_a_node_without_identity_ends_with_the_cure(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bcd.run(["node", "--config", str(config_file)]) == 2
    assert "this node has no identity in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ('state_dir = "FILE"', "state_dir FILE is no folder, or lies below a file: move that file away"),
        ('state_dir = "FILE/below"', "state_dir FILE/below is no folder, or lies below a file"),
        ('gateway_url = "https://x:99999"', "gateway_url: 'https://x:99999' is not a gateway URL"),
        ('gateway_url = "https://x:0"', "gateway_url: 'https://x:0' is not a gateway URL"),
        ('gateway_server_name = "a b"', "gateway_server_name = 'a b': it must be a host name or an IP address"),
    ],
)
def test_a_configuration_that_cannot_work_is_one_sentence_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str, sentence: str
) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "config.toml"
    path.write_text(lines.replace("FILE", str(tmp_path / "file")))
    assert bcd.run(["node", "--config", str(path)]) == 2
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(told) == 1
    assert sentence.replace("FILE", str(tmp_path / "file")) in told[0]


def test_an_interrupt_is_exit_code_130(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Path) -> DaemonStatus:
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "ask", interrupted)
    assert bcd.run(["status", "--config", str(config_file)]) == 130
    monkeypatch.setattr(status, "ask", lambda _: (_ for _ in ()).throw(Unavailable("later")))
    assert bcd.run(["status", "--config", str(config_file)]) == 3
