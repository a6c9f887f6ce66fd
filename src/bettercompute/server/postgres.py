"""Which database the control plane uses: the configured one, or the embedded one under its state folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from bettercompute.server.config import Config
from bettercompute.store import embedded


@contextlib.contextmanager
def database(config: Config) -> Iterator[str]:
    """Give the database's address; without a dsn that of the embedded server, which runs until the block ends.

    One that runs already is used as it is. Called by the main thread, outside the event loop. Raises Unavailable when
    the server does not start.
    """
    if config.database.dsn:
        yield config.database.dsn
        return
    folder = config.state_path / "postgres"
    running = embedded.find_running(folder)
    if running is not None:
        yield running
        return
    server = embedded.start(folder)
    try:
        yield server.dsn
    finally:
        server.stop()
