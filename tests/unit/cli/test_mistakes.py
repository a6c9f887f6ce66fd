"""A user's mistake is one sentence on standard error and an exit code, whatever part of the machine refuses."""

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
        (
            ("run", "inventory.refresh", "--all", "--payload", "@/dev/zero", *NOBODY),
            "is larger than",
        ),
        (("run", "inventory.refresh", "--all", "--payload", "@{file}/x", *NOBODY), "--payload"),
        (("serve", "--role", "king"), "one of api, gateway, worker"),
        (("serve", "--config", "{file}"), "invalid"),
        (("db", "status", "--config", "{bogus}"), "database.dsn"),
        (("dev", "--dir", "{file}"), "{file}"),
    ],
)
def test_one_sentence_and_a_code(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    file, bogus = tmp_path / "file", tmp_path / "bogus.toml"
    file.write_text("not = [toml")
    bogus.write_text('[database]\ndsn = "bogus"\n')
    filled = [part.format(file=file, bogus=bogus) for part in arguments]
    done = RUNNER.invoke(app, filled, env={"BETTER_COMPUTE_TOKEN": "", "BETTER_COMPUTE_API": ""})
    assert done.exit_code in {1, 2, 3}
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert done.stderr.startswith("error: ")
    assert says.format(file=file).lower() in done.stderr.lower()
    assert done.stderr.count("\n") <= 2
