"""What every test may ask for: a PostgreSQL server of this process, and a fresh migrated database of its own."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings

from bettercompute.store.database import Database
from bettercompute.system import system_world
from bettercompute.testing import postgres
from tests.failures import (  # noqa: F401 - pytest finds them here
    pytest_runtest_call,
    pytest_runtest_protocol,
    pytest_runtest_teardown,
    pytest_timeout_set_timer,
)
from tests.sim import totals

# The same examples in every run, and a busy machine is no failure.
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the simulations of this run amounted to."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    calls = [report for report in reports if isinstance(report, pytest.TestReport) and report.when == "call"]
    told = [entry for report in calls for entry in report.user_properties]
    for line in totals.lines(told):
        terminalreporter.write_line(line)


def plain_logs() -> None:
    """Log as structlog does by itself, tracebacks without the locals of each frame: drawing them takes seconds."""
    structlog.reset_defaults()
    *others, _ = structlog.get_config()["processors"]
    plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*others, plain])


plain_logs()


@pytest.fixture(autouse=True)
def own_logs() -> Iterator[None]:
    """Forget where a test sent the logs: its captured stream is closed when it ends."""
    yield
    plain_logs()


@pytest.fixture(autouse=True)
def no_gateway_left() -> Iterator[None]:
    """Fail a test that leaves a gateway in this process: its thread would complain into the tests that follow."""
    yield
    assert "gateway-lease" not in [thread.name for thread in threading.enumerate()], "a gateway was not stopped"


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[postgres.TestServer]:
    """One real embedded server for all tests of this process."""
    with postgres.scratch(tmp_path_factory.mktemp("postgres")) as folder, postgres.serve(folder) as server:
        yield server


@pytest.fixture
def dsn(postgres_server: postgres.TestServer) -> Iterator[str]:
    """The address of a fresh, migrated database."""
    address = postgres_server.create_database()
    yield address
    postgres_server.drop_database(address)


@pytest.fixture
def empty_dsn(postgres_server: postgres.TestServer) -> Iterator[str]:
    """The address of a database without a schema."""
    address = postgres_server.create_database(migrated=False)
    yield address
    postgres_server.drop_database(address)


@pytest.fixture
async def database(dsn: str) -> AsyncIterator[Database]:
    """A pool on a fresh, migrated database."""
    opened = await Database.open(dsn, dice=system_world().dice, application_name="tests")
    yield opened
    await opened.close()
