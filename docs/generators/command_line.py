"""The reference of both commands, from their own parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import typer.main

from bettercompute.cli import bcd, better_compute
from docs.generators.markdown import code, generated, table

INTRODUCTION = """\
# Commands

Results go to standard output, everything else to standard error. With `--json` every result is one JSON object on a
line of its own. A failure is one sentence and an exit code: 1 the work failed, 2 somebody must change something, 3 try
again later, 70 a fault of ours. Durations are written `90s`, `5m`, `24h`, `7d`; a bare number counts seconds."""

# Every command of the group has these; they are said once.
SHARED = frozenset({"--help"})


def page() -> str:
    """Return docs/reference/cli.md."""
    parts = [generated("the two commands' parsers"), INTRODUCTION, "## better-compute"]
    for names, command in _commands(typer.main.get_command(better_compute.app), ()):
        parts += _typer_command(names, command)
    parts.append("## bcd")
    # The parser is the command's own business; only its documentation is made from it.
    for path, parser in _parsers(bcd._parser(), "bcd"):  # noqa: SLF001 - as the comment says
        parts += _argparse_command(path, parser)
    return "\n\n".join(parts)


# Any: typer brings its own click, whose classes have no public name.


def _commands(command: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    members = getattr(command, "commands", None)
    if members is None:
        yield names, command
        return
    for name, member in members.items():
        yield from _commands(member, (*names, name))


def _typer_command(names: tuple[str, ...], command: Any) -> Iterator[str]:
    path = " ".join(("better-compute", *names))
    parameters = [parameter for parameter in command.params if not SHARED & set(parameter.opts)]
    needed = [_typer_usage(parameter) for parameter in parameters if parameter.required]
    yield f"### {path}"
    optional = ("[OPTIONS]",) if len(needed) < len(parameters) else ()
    yield "\n".join(("```text", " ".join((path, *needed, *optional)), "```"))
    yield (command.help or "").strip()
    rows = [
        (_typer_name(parameter), getattr(parameter, "help", None) or "", _typer_default(parameter))
        for parameter in parameters
    ]
    if rows:
        yield table(("argument or option", "meaning", "default"), rows)


def _typer_usage(parameter: Any) -> str:
    shown = parameter.name.upper()
    return shown if parameter.param_type_name == "argument" else f"{parameter.opts[0]} {_metavar(parameter)}"


def _typer_name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return code(parameter.name.upper())
    names = ", ".join(code(name) for name in (*parameter.opts, *parameter.secondary_opts))
    return names if parameter.is_flag else f"{names} {code(_metavar(parameter))}"


def _metavar(parameter: Any) -> str:
    return str(parameter.metavar or parameter.opts[0].lstrip("-").upper())


def _typer_default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if parameter.default in (None, "", False, ()) or callable(parameter.default):
        return ""
    return code(parameter.default)


def _parsers(parser: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    # argparse shows the parsers of its commands nowhere else.
    # argparse tells its subcommands no other way.
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]  # noqa: SLF001 - as above
    if not groups:
        yield path, parser
    for group in groups:
        for name, member in group.choices.items():
            yield from _parsers(member, f"{path} {name}")


def _argparse_command(path: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield f"### {path}"
    sentence = (parser.description or "").strip()
    yield f"{sentence[:1].upper()}{sentence[1:]}."
    rows = [
        (_argparse_name(action), action.help or "", "required" if action.required else "")
        for action in parser._actions  # noqa: SLF001 - as above
        if not SHARED & set(action.option_strings)
    ]
    if rows:
        yield table(("argument or option", "meaning", "default"), rows)


def _argparse_name(action: argparse.Action) -> str:
    metavar = str(action.metavar or action.dest.upper())
    if not action.option_strings:
        return code(metavar)
    names = ", ".join(code(name) for name in action.option_strings)
    return names if action.nargs == 0 else f"{names} {code(metavar)}"
