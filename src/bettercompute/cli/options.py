"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Api = Annotated[
    str | None,
    typer.Option("--api", metavar="URL", help="The API's address. Default: BETTER_COMPUTE_API, or the profile."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
