"""Two files of benches beside each other: what changed, what keeps them from being compared, when it fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import compare


def write(path: Path, *, per_s: float, cpu_us: float, daemons: int = 5, cores: int = 2) -> Path:
    row = {
        "bench": "commands",
        "per_s": per_s,
        "cpu_us": cpu_us,
        "daemons": daemons,
        "spread": {"per_s": [1, 1], "cpu_us": [1, 1]},
        "machine": {"cores": cores, "load1": 0.1},
        "commit": str(path),
    }
    path.write_text(f"a line of something else\n{json.dumps(row)}\n", encoding="utf-8")
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["compare.py", *map(str, arguments)])
    compare.main()


def test_the_table_has_every_figure_with_its_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write(tmp_path / "a", per_s=1_000, cpu_us=300)
    run(monkeypatch, before, write(tmp_path / "b", per_s=2_000, cpu_us=150))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["figure", "before", "after", "ratio"],
        ["commands", "per_s", "1000", "2000", "2.000"],
        ["commands", "cpu_us", "300", "150", "0.500"],
    ]


def test_what_is_not_alike_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write(tmp_path / "a", per_s=1, cpu_us=1)
    run(monkeypatch, before, write(tmp_path / "b", per_s=1, cpu_us=1, daemons=6, cores=4))
    assert capsys.readouterr().out.startswith(
        "not alike: commands daemons: 5 and 6\nnot alike: machine cores: 2 and 4\n"
    )


@pytest.mark.parametrize(("per_s", "cpu_us", "code"), [(80, 10, 1), (100, 12, 1), (95, 10.5, 0), (200, 5, 0)])
def test_it_fails_only_when_asked_and_only_for_the_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_s: float, cpu_us: float, code: int
) -> None:
    before, after = write(tmp_path / "a", per_s=100, cpu_us=10), write(tmp_path / "b", per_s=per_s, cpu_us=cpu_us)
    run(monkeypatch, before, after)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, before, after, "--fail-over", 10)
    assert ended.value.code == code


def test_a_file_without_rows_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.write_text("nothing\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="has no row of a bench"):
        run(monkeypatch, empty, empty)
    with pytest.raises(SystemExit, match="cannot read"):
        run(monkeypatch, tmp_path / "absent", empty)
