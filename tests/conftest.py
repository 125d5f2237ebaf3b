"""The common part of all tests: marks, and which skips are failures. Imports no framework, starts no Horovod."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import ModuleType

import pytest

sys.path.append(str(Path(__file__).parent))  # for stopping.py beside this file

GPU_SWITCH = "HVDTRAIN_TEST_GPU"
# Set to 1, they make a skip a failure: a run that skips its tests proves nothing, so it must not look green.
SWITCHES = {"gpu": GPU_SWITCH, "hosts": "HVDTRAIN_TEST_HOSTS", "nccl": "HVDTRAIN_TEST_NCCL"}
# What proves a claim once more, in another place, runs where there is time for it.
LONG_SWITCHES = {"HVDTRAIN_TEST_LONG": "1", "HVDTRAIN_FAULTS": "long"}

# Set to 1 where all packages are installed, as .ci/run does as root. Then a skip for want of one is a failure.
INSTALLED_SWITCH = "HVDTRAIN_TEST_INSTALLED"
FOR_WANT_OF_A_PACKAGE = re.compile(
    r"(apt-get|pip) install|make setup|not installed|could not import|No module named|needs Java|no \S+ compiler|"
    r"no Open MPI|no ompi_info|built without MPI"
)

# A GPU host's .venv has none: it is built for CUDA 12, torch and JAX for CUDA 13.
HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None


@pytest.fixture(autouse=True)
def restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a new Trainer of a test stand for a restart of the script, which resumes what another one has trained."""
    if importlib.util.find_spec("hvdtrain") is None:  # the suite for GPUs is tested without it
        return
    from hvdtrain.training.checkpointing import RunCheckpoints

    monkeypatch.setattr(RunCheckpoints, "claim", lambda self, adapter: None)


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background, and all that it starts
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("HVDTRAIN_RUNS", "")  # hundreds of trainings, none of which anybody wants to keep
    config.addinivalue_line(
        "markers", f"gpu: needs a GPU; skipped unless {GPU_SWITCH}=1, and then a skip of any kind is a failure"
    )
    if not HAS_TENSORFLOW:
        os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras's own default is TensorFlow
    config.addinivalue_line("markers", "tensorflow: needs TensorFlow; so does a test with the parameter 'tensorflow'")
    config.addinivalue_line(
        "markers", f"nccl: of a Horovod built with NCCL, which needs no GPU; {SWITCHES['nccl']}=1: must not skip"
    )
    config.addinivalue_line("markers", "tooling: of the harness, the benchmarks and the package: make tooling")
    config.addinivalue_line(
        "markers",
        "long: proves a claim once more in another place; runs under HVDTRAIN_TEST_LONG=1 or HVDTRAIN_FAULTS=long",
    )
    config.addinivalue_line(
        "markers",
        f"hosts: on several hosts, which needs root, namespaces and sshd; {SWITCHES['hosts']}=1: must not skip",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any(os.environ.get(name) == value for name, value in LONG_SWITCHES.items()):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    if not HAS_TENSORFLOW:
        for item in items:
            parameters = getattr(getattr(item, "callspec", None), "params", {}).values()
            named = any(isinstance(value, str) and value == "tensorflow" for value in parameters)
            if named or item.get_closest_marker("tensorflow"):
                item.add_marker(pytest.mark.skip(reason="TensorFlow is not installed, as on a GPU host"))
    if os.environ.get(GPU_SWITCH) == "1":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: set {GPU_SWITCH}=1 on a machine that has one"))


def _must_not_skip(report: pytest.TestReport | pytest.CollectReport, switch: str) -> None:
    """Make a skip a failure."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"{report.nodeid} did not run although {switch}=1. {reason}"


def _wants_a_package(report: pytest.TestReport | pytest.CollectReport) -> bool:
    if not report.skipped or os.environ.get(INSTALLED_SWITCH) != "1":
        return False
    return FOR_WANT_OF_A_PACKAGE.search(str(report.longrepr)) is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    for mark, switch in SWITCHES.items():
        if report.skipped and os.environ.get(switch) == "1" and item.get_closest_marker(mark):
            _must_not_skip(report, switch)
    if _wants_a_package(report):
        _must_not_skip(report, INSTALLED_SWITCH)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if _wants_a_package(report):  # of a whole file
        _must_not_skip(report, INSTALLED_SWITCH)
    return report


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """Make a cgroup that may have 2 GB, below this process's own; skip where that is not allowed."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        name = {"": "memory.max", "memory": "memory.limit_in_bytes"}.get(controllers, "")
        folder = Path("/sys/fs/cgroup", controllers, path.lstrip("/"), f"hvdtrain-test-{os.getpid()}")
        with contextlib.suppress(OSError):
            folder.mkdir()
            with contextlib.ExitStack() as stack:
                stack.callback(_remove, folder)
                (folder / name).write_text("2000000000")
                yield folder
                return
    pytest.skip("no cgroup with a limit can be made here: needs root, and a memory controller")


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + 10  # until its last process is gone
    while folder.is_dir() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            folder.rmdir()
        time.sleep(0.1)


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """Return a function that imports a script of tests/ by its path under tests/, e.g. "readme/run_blocks.py"."""

    def load(name: str) -> ModuleType:
        path = Path(__file__).parent / name
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"not a Python file: {path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module  # dataclasses look their module up by name
        spec.loader.exec_module(module)
        return module

    return load
