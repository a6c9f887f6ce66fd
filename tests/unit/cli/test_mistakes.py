"""A user's mistake is one sentence on standard error and an exit code, whatever part of the machine refuses."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bettercompute.cli.better_compute import app

RUNNER = CliRunner()
NOBODY = ("--api", "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("pki", "init", "--dir", "/proc/none/q"), "/proc"),
        (("pki", "init", "--dir", "{file}"), "{file}"),
        (("nodes", "list", "--api", "http://[::1"), "is not a URL"),
        (("nodes", "list", *NOBODY), "did not answer"),
        (("nodes", "show", "..", *NOBODY), "is not an id"),
        (("run", "inventory.refresh", *NOBODY), "name the nodes"),
        (("run", "inventory.refresh", "--all", "--payload", "[]", *NOBODY), "a JSON object"),
        (("run", "inventory.refresh", "--all", "--payload", "{", *NOBODY), "write a JSON object, or @FILE"),
        (("run", "inventory.refresh", "--all", "--payload", "[" * 5_000, *NOBODY), "recursion"),
        (
            ("run", "inventory.refresh", "--all", "--payload", "@/dev/zero", *NOBODY),
            "is larger than",
        ),
        (("run", "inventory.refresh", "--all", "--payload", "@{file}/x", *NOBODY), "{file}/x cannot be read: Not a"),
        (("serve", "--role", "king"), "one of api, gateway, worker"),
        (("serve", "--config", "{file}"), "invalid"),
        (("serve", "--config", "{folder}"), "cannot be read: Is a directory; name the right file with --config"),
        (("db", "status", "--config", "{bogus}"), "database.dsn"),
        (("db", "status", "--config", "{empty}"), "{folder}/none/postgres holds no embedded database"),
        (("db", "roles", "--config", "{empty}"), "{folder}/none/postgres holds no embedded database"),
        (("dev", "--dir", "{file}"), "{file}"),
    ],
)
def test_one_sentence_and_a_code(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    file, bogus = tmp_path / "file", tmp_path / "bogus.toml"
    file.write_text("not = [toml")
    bogus.write_text('[database]\ndsn = "bogus"\n')
    empty = tmp_path / "empty.toml"
    empty.write_text(f'state_dir = "{tmp_path}/none"\n')
    fill = {"{file}": str(file), "{bogus}": str(bogus), "{empty}": str(empty), "{folder}": str(tmp_path)}
    filled = [_filled(part, fill) for part in arguments]
    done = RUNNER.invoke(app, filled, env={"BETTER_COMPUTE_TOKEN": "", "BETTER_COMPUTE_API": ""})
    assert done.exit_code in {1, 2, 3}
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert done.stderr.startswith("error: ")
    assert _filled(says, fill).lower() in done.stderr.lower()
    assert done.stderr.count("\n") <= 2
    assert not (tmp_path / "none").exists()


def _filled(text: str, fill: dict[str, str]) -> str:
    for name, value in fill.items():
        text = text.replace(name, value)
    return text


@pytest.mark.parametrize("where", ["a full disk", "nobody who reads", "closed"])
@pytest.mark.parametrize(
    "program",
    [
        "from bettercompute.cli import output; output.guard(lambda: output.print_facts({'node': 'n1'}))",
        "from bettercompute.cli import bcd; bcd._print_facts({'node': 'n1'})",
    ],
    ids=["better-compute", "bcd"],
)
def test_results_that_cannot_be_written_are_no_traceback(program: str, where: str) -> None:
    reader, nobody = os.pipe()
    os.close(reader)
    closed = ["bash", "-c", 'exec "$0" "$@" >&-'] if where == "closed" else []
    command = [*closed, sys.executable, "-c", program]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command,
            stdout=full if where == "a full disk" else nobody,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    os.close(nobody)
    full_says = "error: the results cannot be written: No space left on device\n"
    assert done.stderr == (full_says if where == "a full disk" else "")
    assert done.returncode == (0 if where == "closed" else 1)


@pytest.mark.parametrize("ending", ["KeyboardInterrupt", "ValueError"])
def test_an_interrupt_while_commands_are_imported_is_silent_and_nothing_else_is(ending: str) -> None:
    program = f"import bettercompute.cli; raise {ending}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    interrupted = ending == "KeyboardInterrupt"
    assert done.returncode == (-signal.SIGINT if interrupted else 1)
    assert ("Traceback" in done.stderr) is not interrupted
