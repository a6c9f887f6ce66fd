"""What a failed test leaves behind stays with it: it ends in time, and its neighbours do not fail for it.

pytest-timeout raises out of whatever runs when the clock strikes. In an event loop that may be any task, which keeps
the exception as its own result, and uvloop catches all of them: the test would hang on, and all after it. Besides, the
clock is stopped at the first failure, so that nothing bounds the teardown that follows.

A test that is given up in the middle leaves transports open and coroutines that nobody awaited. They are collected
while one of the next tests runs, which then fails for what it has not done.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import warnings
from collections.abc import Generator
from typing import Any

import pytest
import pytest_timeout  # type: ignore[import-untyped] # it has none

STRUCK = pytest.StashKey[float]()
"""After how many seconds the clock of a test struck."""

# A loop that was told to stop and has not is held up by something that does not await.
STOP_S = 10.0


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Stop the event loop when the time is over; where none runs, or it does not stop, raise as pytest-timeout does."""
    if settings.method != "signal":
        return None
    told: list[asyncio.AbstractEventLoop] = []

    def strike(*_: object) -> None:
        loop = asyncio._get_running_loop()
        if loop is None or loop in told:
            pytest_timeout.timeout_sigalrm(item, settings)
        else:
            told.append(loop)
            item.stash[STRUCK] = settings.timeout
            pytest_timeout.dump_stacks(item.config.get_terminal_writer())
            # This wakes it, too: a signal alone need not.
            loop.call_soon_threadsafe(loop.stop)
            signal.setitimer(signal.ITIMER_REAL, STOP_S)

    def cancel() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    item.cancel_timeout = cancel  # type: ignore[attr-defined] # pytest-timeout's own
    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Say of a loop that was stopped why it was."""
    try:
        return (yield)
    except RuntimeError as error:
        if STRUCK not in item.stash:
            raise
        raise pytest.fail.Exception(f"Timeout (>{item.stash[STRUCK]}s)") from error


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Give the teardown as long as the test had."""
    settings = pytest_timeout._get_item_settings(item)
    if settings.timeout and not settings.func_only:
        item.config.hook.pytest_timeout_cancel_timer(item=item)
        item.config.hook.pytest_timeout_set_timer(item=item, settings=settings)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Let go of what a failed test held before the next one begins, and say nothing of it: it is reported already."""
    failed_before = item.session.testsfailed
    try:
        return (yield)
    finally:
        if item.session.testsfailed > failed_before:
            _forget(item.config)


def _forget(config: pytest.Config) -> None:
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
    # What was logged of an exception holds its frames.
    logging_plugin = config.pluginmanager.get_plugin("logging-plugin")
    if logging_plugin is not None:
        logging_plugin.caplog_handler.reset()
        logging_plugin.report_handler.reset()
    told, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # What a first collection finalizes a second one frees.
            gc.collect()
            gc.collect()
    finally:
        sys.unraisablehook = told
