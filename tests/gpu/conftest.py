"""Tests for a machine with a GPU: they run under HVDTRAIN_TEST_GPU=1 only, and then a skip is a failure.

`make gpu` starts them. One process is one rank that reduces all the same (HVDTRAIN_REDUCE_ALONE=1), so that everything
goes through NCCL. HVDTRAIN_TEST_GPU=cpu runs the same bodies on the CPU: a developer sees that the tests work.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SWITCH = "HVDTRAIN_TEST_GPU"
ON_CPU = os.environ.get(SWITCH) == "cpu"
_passed: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"cuda_only: a test of tests/gpu that means nothing on a CPU ({SWITCH}=cpu)")
    config.addinivalue_line("markers", "needs(*packages): left out, which is no failure, where one is not installed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        named = [name for mark in item.iter_markers("needs") for name in mark.args]
        if missing := [name for name in named if importlib.util.find_spec(name) is None]:
            item.add_marker(pytest.mark.skip(reason=f"not installed: {', '.join(missing)}"))
        elif not ON_CPU or item.get_closest_marker("cuda_only"):
            item.add_marker(pytest.mark.gpu)  # tests/conftest.py skips these, or forbids them to skip


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _passed.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    # What has proven nothing must not look green.
    if os.environ.get(SWITCH) and exitstatus == pytest.ExitCode.OK and not _passed:
        print(f"\nno test of tests/gpu has passed although {SWITCH}={os.environ[SWITCH]}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _one_rank_that_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if not ON_CPU and not torch.cuda.is_available():
        pytest.skip("no GPU: torch sees no CUDA device")
    monkeypatch.setenv("HVDTRAIN_REDUCE_ALONE", "1")


@pytest.fixture
def device() -> str:
    """Where the test computes: "cuda:0", or "cpu" under HVDTRAIN_TEST_GPU=cpu."""
    return "cpu" if ON_CPU else "cuda:0"
