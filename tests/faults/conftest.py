"""Injected faults: few by default, many under HVDTRAIN_FAULTS=long, reproducible under HVDTRAIN_FAULTS_SEED.

Each test adds a row (fault, tries, survived or detected, seconds) to the table that the run ends with.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

ROWS = pytest.StashKey[list[tuple[str, int, str, float]]]()


LONG = os.environ.get("HVDTRAIN_FAULTS") == "long"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


def _seed() -> int:
    return int(os.environ.get("HVDTRAIN_FAULTS_SEED", "0"))


@pytest.fixture
def rng() -> np.random.Generator:
    """The source of every random choice of a test."""
    return np.random.default_rng(_seed())


@pytest.fixture
def scale() -> int:
    """The number of times that a fault is tried: 10 times as often in the long run."""
    return 10 if LONG else 1


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Callable[[str, int, str], None]:
    """Return a function that adds a row to the table; the seconds are the test's."""
    started = time.perf_counter()
    rows = request.config.stash[ROWS]
    return lambda fault, tries, outcome: rows.append((fault, tries, outcome, time.perf_counter() - started))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # of pytest-xdist: the rows are shown by the process that started it
        session.config.workeroutput["faults"] = session.config.stash[ROWS]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[ROWS] += map(tuple, getattr(node, "workeroutput", {}).get("faults", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash[ROWS]
    if rows:
        terminalreporter.section(f"faults (seed {_seed()})")
        terminalreporter.line("| fault | tries | outcome | seconds |")
        terminalreporter.line("|---|---|---|---|")
        for fault, tries, outcome, seconds in rows:
            terminalreporter.line(f"| {fault} | {tries} | {outcome} | {seconds:.1f} |")
