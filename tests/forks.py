"""Processes that tests end with kill -9: forked from a server that has imported what they run, in milliseconds each."""

from __future__ import annotations

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
# One list for all of a test process's children: the server imports it once, when the first of them is started.
FORKS.set_forkserver_preload(["tests.unit.daemon.journal_samples", "tests.kills.victims"])
