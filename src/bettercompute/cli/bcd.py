"""`bcd`: the daemon of every node, and what an operator does beside it on the node itself.

Parsed by the standard library, and every import of a command is late: typer and rich together cost more memory than
the daemon's whole session, and `bcd status` shall answer at once. Results go to standard output, everything else to
standard error; a failure is one sentence and an exit code. See docs/daemon.md, "Setting it up"; decisions 0081.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from bettercompute import __version__
from bettercompute.errors import BetterComputeError, Bug

if TYPE_CHECKING:
    from bettercompute.daemon.config import Config
    from bettercompute.daemon.status import DaemonStatus

# Exit codes as in `cli.output`: 1 the work failed, 2 somebody must change something, 3 try again later.
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3
# Of `bcd status`: nothing but a new join token helps.
EXIT_NEEDS_REJOIN = 4

_PASSING_STATUSES = frozenset({4, 8, 14})  # DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNAVAILABLE

DEFAULT_CONFIG = Path("/etc/bcd/config.toml")
TOKEN_BYTES_MAX = 64 * 1024


def main() -> None:
    """Run the command line."""
    # structlog draws tracebacks with rich where it finds it: a tenth of an idle daemon's memory, for nothing.
    sys.modules["rich"] = None  # type: ignore[assignment]  # how Python spells "there is no such module"
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        options = _parser().parse_args(arguments)
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except Bug:
        raise
    except BetterComputeError as error:
        return _fail(error.message, code=EXIT_UNAVAILABLE if error.status in _PASSING_STATUSES else EXIT_USAGE)
    except KeyboardInterrupt:
        return 130


def node(options: argparse.Namespace) -> int:
    """Run the daemon until it is told to stop."""
    import asyncio

    from bettercompute.daemon.agent import Agent
    from bettercompute.daemon.identity import IdentityStore
    from bettercompute.daemon.logs import set_up
    from bettercompute.daemon.node_round import CurrentConfig, NodeParts
    from bettercompute.daemon.notify import SystemdNotifier
    from bettercompute.system import environment, system_world

    config = _config(options)
    set_up(config.log)
    parts = NodeParts(
        world=system_world(),
        config=CurrentConfig(config),
        environment=environment(),
        identities=IdentityStore(config.state_dir),
        notifier=SystemdNotifier(environment()),
    )

    async def live() -> None:
        await Agent(parts, config_path=options.config, adopt=options.adopt).run()

    asyncio.run(live())
    return 0


def status(options: argparse.Namespace) -> int:
    """Say how the daemon is; 0 only when it is connected."""
    from bettercompute.daemon.status import ask

    found = ask(_config(options).state_dir)
    if options.json:
        _print_json({**asdict(found), "connected": found.connected, "needs_rejoin": found.needs_rejoin})
    else:
        _print_facts(_shown(found))
    if found.connected:
        return 0
    return EXIT_NEEDS_REJOIN if found.needs_rejoin else EXIT_FAILED


def join(options: argparse.Namespace) -> int:
    """Get this machine an identity, or replace the one it has."""
    import asyncio

    from bettercompute.daemon.logs import set_up
    from bettercompute.daemon.maintenance import Joining, join_here
    from bettercompute.system import environment, system_world

    config = _config(options)
    set_up(config.log)
    joining = Joining(
        config=config,
        token=_token(options),
        role=options.role,
        node_id=options.node_id,
        attestor=options.attestor,
        evidence=_evidence(options),
        rejoin=options.rejoin,
        environment=environment(),
        world=system_world(),
    )
    joined = asyncio.run(join_here(joining))
    if options.json:
        _print_json(asdict(joined))
    else:
        _note(
            f"joined as {joined.node_id} (site {joined.site}, role {joined.role}); `bcd node` runs it, if none runs yet"
        )
    return 0


def journal_check(options: argparse.Namespace) -> int:
    """Read every row of the journal and say whether it is sound."""
    from bettercompute.daemon.maintenance import check_journal

    report = check_journal(_config(options).state_dir)
    if options.json:
        _print_json(report)
    else:
        _print_facts(report)
    if report["sound"]:
        return 0
    return _fail("the journal is damaged: `bcd node` will set it aside and begin a new one", code=EXIT_FAILED)


def clock_reset(options: argparse.Namespace) -> int:
    """Believe this host's clock."""
    from bettercompute.daemon.maintenance import reset_clock
    from bettercompute.system import system_world

    was_ms, now_ms = reset_clock(_config(options).state_dir, world=system_world())
    _note(f"the node's server time is now {_time(now_ms)}; it was {_time(was_ms)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bcd", description="The node daemon of better-compute.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    for name, rejoin, help_ in (
        ("join", False, "get this machine an identity, with a token from `better-compute token create`"),
        ("rejoin", True, "replace this machine's identity by a new one, also of a running daemon; its journal stays"),
    ):
        joining = _command(commands, name, join, help_)
        joining.set_defaults(rejoin=rejoin)
        token = joining.add_mutually_exclusive_group()
        token.add_argument("word", nargs="?", metavar="TOKEN", help="the join token; others see it in the process list")
        token.add_argument("--token", metavar="TOKEN", help="the same")
        token.add_argument("--token-file", metavar="FILE", help="the file that holds it (default: standard input)")
        joining.add_argument("--role", default="node", help="what this machine is (default: node)")
        joining.add_argument("--node-id", default="", metavar="ID", help="the name asked for (default: the token's)")
        joining.add_argument(
            "--attestor", default="", metavar="NAME", help="why this machine is to be believed (default: the token's)"
        )
        joining.add_argument(
            "--evidence-file",
            metavar="FILE",
            help="with --attestor discovery: the assertion that the site agent signed",
        )
        joining.add_argument("--json", action="store_true", help="print JSON")

    running = _command(commands, "node", node, "run the daemon until it is told to stop")
    running.add_argument(
        "--adopt", action="store_true", help="run although this is another machine than the one that joined"
    )
    asking = _command(commands, "status", status, "say how the daemon is; exits 0 only when it is connected")
    asking.add_argument("--json", action="store_true", help="print JSON")

    journal = _group(commands, "journal", "what the node owes and must not do twice")
    checking = _command(journal, "check", journal_check, "read the whole journal; the daemon must be stopped")
    checking.add_argument("--json", action="store_true", help="print JSON")
    clock = _group(commands, "clock", "the node's idea of the control plane's time")
    _command(
        clock,
        "reset",
        clock_reset,
        "believe this host's clock: the way out when a gateway told a time far in the future; stop the daemon first",
    )
    return parser


def _group(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, help_: str
) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    parser = commands.add_parser(name, help=help_, description=help_)
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    command: Callable[[argparse.Namespace], int],
    help_: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help_, description=help_)
    parser.set_defaults(command=command)
    parser.add_argument(
        "--config",
        type=Path,
        default=DEFAULT_CONFIG,
        metavar="FILE",
        help=f"the configuration (default: {DEFAULT_CONFIG}, or the defaults where that does not exist)",
    )
    return parser


def _config(options: argparse.Namespace) -> Config:
    from bettercompute.daemon import config

    return config.load(options.config)


def _token(options: argparse.Namespace) -> str:
    from bettercompute.protocol.statuses import Reason, refuse

    given = options.token if options.word is None else options.word
    if given is not None:
        return str(given).strip()
    if options.token_file is None:
        if sys.stdin.isatty():
            _note("paste the token that `better-compute token create` printed, then press Enter")
            return sys.stdin.readline(TOKEN_BYTES_MAX).strip()
        return sys.stdin.read(TOKEN_BYTES_MAX).strip()
    try:
        with Path(options.token_file).open(encoding="utf-8") as file:
            return file.read(TOKEN_BYTES_MAX).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise refuse(Reason.BAD_REQUEST, f"--token-file {options.token_file} cannot be read: {error}") from None


def _evidence(options: argparse.Namespace) -> bytes:
    from bettercompute.protocol.statuses import Reason, refuse

    if options.evidence_file is None:
        return b""
    try:
        with Path(options.evidence_file).open("rb") as file:
            return file.read(TOKEN_BYTES_MAX)
    except OSError as error:
        raise refuse(Reason.BAD_REQUEST, f"--evidence-file {options.evidence_file} cannot be read: {error}") from None


def _shown(found: DaemonStatus) -> dict[str, object]:
    return {
        "state": found.state,
        "why": found.reason,
        "since": _time(found.since_ms),
        "next dial in": f"{found.next_dial_in_ms / 1000:.0f} s" if found.next_dial_in_ms else "",
        "node": found.node_id,
        "site": found.site,
        "role": found.role,
        "version": found.version,
        "gateway": f"{found.gateway_url} ({found.gateway_id})" if found.connected else found.gateway_url,
        "epoch": found.epoch or "",
        "certificate until": _time(found.certificate_not_after_ms),
        "running": ", ".join(found.running_commands),
        "unacked": f"{found.unacked_results} results, {found.unacked_events} events",
        "journal": f"{found.journal_id}, {found.journal_bytes / 1024:.0f} KiB",
        **{f"condition {condition.type}": condition.message or condition.reason for condition in found.conditions},
        **{f"refused {name}": f"{count} times" for name, count in found.refusals.items()},
    }


def _print_json(value: object) -> None:
    _write(json.dumps(value, separators=(",", ":"), ensure_ascii=False) + "\n")


def _print_facts(facts: Mapping[str, object]) -> None:
    shown = {name: str(value) for name, value in facts.items() if value not in (None, "")}
    width = max(map(len, shown), default=0)
    _write("".join(f"{name:<{width}}  {value}\n" for name, value in shown.items()))


def _write(text: str) -> None:
    """Print a result; where it cannot go (a full disk, nobody who reads) is told, or at least an end."""
    if sys.stdout is None:  # closed by the caller, who wants none
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        # What is buffered would fail again at the very end, and Python would say so.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            _note(f"error: the results cannot be written: {error.strerror}")
        sys.exit(EXIT_FAILED)


def _note(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")


def _fail(sentence: str, *, code: int) -> int:
    sys.stderr.write(f"error: {sentence}\n")
    return code


def _time(time_ms: int) -> str:
    from datetime import UTC, datetime

    if not time_ms:
        return ""
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(sep=" ", timespec="seconds")


if __name__ == "__main__":
    main()
