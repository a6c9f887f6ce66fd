"""Which database the control plane uses: the configured one, or the embedded one under its state folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from bettercompute.protocol.statuses import Reason, refuse
from bettercompute.server.config import Config
from bettercompute.store import embedded


@contextlib.contextmanager
def database(config: Config, *, make: bool = True) -> Iterator[str]:
    """Give the database's address; without a dsn that of the embedded server, which runs until the block ends.

    One that runs already is used as it is; where there is none, it is made or, without `make`, refused. Called by the
    main thread, outside the event loop. Raises Unavailable when the server does not start.
    """
    if config.database.dsn:
        yield config.database.dsn
        return
    folder = config.state_path / "postgres"
    if not make and not embedded.exists(folder):
        raise refuse(
            Reason.INVALID_CONFIG,
            f"database.dsn is not set, and {folder} holds no embedded database: name the configuration by --config, "
            "or make one by `better-compute db migrate`",
        )
    running = embedded.find_running(folder)
    if running is not None:
        yield running
        return
    server = embedded.start(folder)
    try:
        yield server.dsn
    finally:
        server.stop()
