"""Tests for a machine with a GPU: they run under HVDTRAIN_TEST_GPU=1 only, and then a skip is a failure.

`make gpu` starts them. One process is one rank that reduces all the same (HVDTRAIN_REDUCE_ALONE=1), so that everything
goes through NCCL. HVDTRAIN_TEST_GPU=cpu runs the same bodies on the CPU: a developer sees that the tests work.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SWITCH = "HVDTRAIN_TEST_GPU"
ON_CPU = os.environ.get(SWITCH) == "cpu"
_passed: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"cuda_only: a test of tests/gpu that means nothing on a CPU ({SWITCH}=cpu)")
    config.addinivalue_line("markers", "needs(*packages): left out, which is no failure, where one is not installed")
    if os.environ.get(SWITCH) == "1":
        # Other versions of torch than the pinned one may warn of themselves; ours is a failure, as everywhere.
        config.addinivalue_line("filterwarnings", "default")
        config.addinivalue_line("filterwarnings", "error:::hvdtrain")


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
    """The device on which the test computes: "cuda:0", or "cpu" under HVDTRAIN_TEST_GPU=cpu."""
    return "cpu" if ON_CPU else "cuda:0"


@pytest.fixture(scope="session")
def world() -> Any:
    """Horovod with one rank, on the GPU with NCCL."""
    import hvdtrain

    world = hvdtrain.init("torch", seed=0)
    assert world.engine == "torch", "Horovod is not installed: run make gpu-build"
    return world


@pytest.fixture
def hvd(world: Any) -> Any:
    import hvdtrain.torch as hvd

    assert ON_CPU or hvd.nccl_built(), "Horovod was built without NCCL: run make gpu-build"
    return hvd


class Sent:
    """The tensors given to Horovod: (name, device, type) of each tensor, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str]] = []

    def names(self, model: Any) -> list[str]:
        """Return under which names gradients of `model` were sent: of a bucket or a group, that of its first one."""
        return [name for name, *_ in self._gradients(model)]

    def kinds(self, model: Any) -> set[tuple[str, str]]:
        """Return the (device, type) of all gradients of `model` that were sent."""
        return {(device, dtype) for _, device, dtype in self._gradients(model)}

    def _gradients(self, model: Any) -> list[tuple[str, str, str]]:
        names = tuple(name for name, _ in model.named_parameters())
        return [call for call in self.calls if call[0].startswith(names)]


@pytest.fixture
def sent(hvd: Any, monkeypatch: pytest.MonkeyPatch) -> Sent:
    """The tensors in Horovod's allreduce, seen below every form of it."""
    from horovod.torch import mpi_ops

    found, library = Sent(), mpi_ops.mpi_lib

    class Watched:
        def __getattr__(self, name: str) -> Any:
            function = getattr(library, name)
            if not name.startswith(("horovod_torch_allreduce_async", "horovod_torch_alltoall_async")):
                return function

            def noted(tensor: Any, *arguments: Any) -> Any:
                named = next((each for each in arguments if isinstance(each, bytes)), b"")
                kind = str(tensor.dtype).removeprefix("torch.")
                found.calls.append((named.decode(), tensor.device.type, kind))
                return function(tensor, *arguments)

            return noted

    monkeypatch.setattr(mpi_ops, "mpi_lib", Watched())
    return found
