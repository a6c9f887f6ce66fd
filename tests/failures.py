"""What a failed test leaves behind stays with it: its neighbours do not fail for it, and its end does not hang.

A test that is given up in the middle leaves transports open and coroutines that nobody awaited. They are collected
while one of the next tests runs, which then fails for what it has not done. And pytest-timeout stops its clock at the
first failure, so that nothing bounds the teardown that follows.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Generator
from typing import Any

import pytest
import pytest_timeout  # type: ignore[import-untyped] # it has none


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
