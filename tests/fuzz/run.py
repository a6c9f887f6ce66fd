"""Fuzz one target after the other under atheris for a while: `make fuzz`, or `python -m tests.fuzz.run TARGET SECONDS`.

Each runs in a process of its own, since libFuzzer ends the process it runs in. What it finds is written to the corpus
folder as `crash-...` and makes the exit code 1; a fixed one becomes a test beside the code that was wrong.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SECONDS = 60
CORPUS = Path(".fuzz")


def one(name: str, seconds: int) -> None:
    """Fuzz a target in this process, which atheris ends."""
    import atheris

    with atheris.instrument_imports(include=["bettercompute"]):
        from bettercompute.errors import Refused
        from tests.fuzz.targets import TARGETS

    target = TARGETS[name]
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (folder / f"seed-{number}").write_bytes(seed)

    def run(data: bytes) -> None:
        try:
            target.run(data)
        except Refused:
            return

    options = [f"-max_total_time={seconds}", f"-artifact_prefix={folder}/", "-max_len=65536", "-timeout=10"]
    atheris.Setup([sys.argv[0], *options, str(folder)], run)
    atheris.Fuzz()


def main(arguments: list[str]) -> int:
    """Fuzz the named target, or all of them; return 1 when one of them fell over."""
    if len(arguments) > 2 and arguments[2] == "here":
        one(arguments[0], int(arguments[1]))
        return 0
    from tests.fuzz.targets import TARGETS

    names = arguments[:1] or list(TARGETS)
    if unknown := set(names) - TARGETS.keys():
        sys.stderr.write(f"no target {unknown.pop()!r}: {', '.join(TARGETS)}\n")
        return 2
    seconds = int(arguments[1]) if len(arguments) > 1 else SECONDS
    failed = []
    for name in names:
        sys.stdout.write(f"{name}: {seconds} s\n")
        sys.stdout.flush()
        command = [sys.executable, "-m", "tests.fuzz.run", name, str(seconds), "here"]
        if subprocess.run(command, check=False, timeout=seconds + 120).returncode:
            failed.append(name)
    sys.stdout.write(f"fell over: {', '.join(failed)}\n" if failed else f"{len(names)} targets, nothing found\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
