"""Where the control plane's keys are, for the commands that make and move them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from bettercompute.pki.keyfiles import KeyFolder

ConfigFile = Annotated[Path | None, typer.Option("--config", help="The control plane's configuration file.")]
KeyDir = Annotated[Path | None, typer.Option("--dir", help="The key folder. Default: the configuration's.")]


def key_folder(config: Path | None, folder: Path | None) -> KeyFolder:
    """Return the key folder that is named, or the configuration's."""
    from bettercompute.pki.keyfiles import KeyFolder
    from bettercompute.server.config import load

    return KeyFolder(folder or load(config).pki_path)
