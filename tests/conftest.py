"""What every kind of test shares: the `gpu` mark. Imports no framework and starts no Horovod."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

GPU_SWITCH = "HVDTRAIN_TEST_GPU"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"gpu: needs a GPU; skipped unless {GPU_SWITCH}=1, and then a skip of any kind is a failure"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(GPU_SWITCH) == "1":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: set {GPU_SWITCH}=1 on a machine that has one"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # A GPU run that skips its tests proves nothing, so it must not look green.
    if report.skipped and os.environ.get(GPU_SWITCH) == "1" and item.get_closest_marker("gpu"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} did not run although {GPU_SWITCH}=1. {reason}"
    return report
