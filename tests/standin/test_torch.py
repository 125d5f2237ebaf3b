"""Rank tests of torch over the stand-in: Horovod's torch library, compiled as for GPUs. `make standin-torch`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hvdtrain.system import start_ranks

if TYPE_CHECKING:
    from torch_library import TorchLibrary

ROOT = Path(__file__).parents[2]
FILES = (
    "optimizer", "collectives", "join", "buckets", "large_buckets", "broadcast", "sync_batch_norm", "uneven_gradients"
)  # fmt: skip
ASYNC = {"HOROVOD_ENABLE_ASYNC_COMPLETION": "1"}

pytestmark = [
    pytest.mark.skipif(os.environ.get("HVDTRAIN_TEST_LONG") != "1", reason="it takes long: make standin-torch"),
    pytest.mark.timeout(3000),
]


@pytest.fixture(scope="session")
def library(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TorchLibrary:
    from torch_library import TorchLibrary  # imports torch

    return TorchLibrary(folder, tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="session")
def site(library: TorchLibrary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return library.site(tmp_path_factory.mktemp("site") / "whole")


def run(site: Path, size: int, chosen: str, settings: Mapping[str, str], report: Path) -> tuple[int, str]:
    """Run rank tests; return the exit status, and what they and the stand-in have said."""
    environment = {**os.environ, **settings, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
    environment["HVDTRAIN_STANDIN_REPORT"] = str(report)
    command = [sys.executable, "tests/ranks/run.py", "--only", "torch-gloo", "--all", "--np", str(size)]
    done = subprocess.run(
        [*command, "--max-failures", "40", "--", "-k", chosen],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = report.read_text() if report.exists() else ""
    return done.returncode, done.stdout[-8000:] + done.stderr[-2000:] + said


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("settings", [{}, ASYNC], ids=["blocking", "async"])
def test_ranks_train_with_what_horovod_does_on_gpus(
    site: Path, size: int, settings: Mapping[str, str], tmp_path: Path
) -> None:
    files = (*FILES, "shards") if size == 2 else FILES
    chosen = " or ".join(f"test_{name}.py" for name in files)
    status, said = run(site, size, chosen, settings, tmp_path / "report")
    assert status == 0, said


@pytest.fixture
def alltoall_that_waits(library: TorchLibrary, tmp_path: Path) -> Path:
    return library.site(tmp_path / "site", {"    output.resize_(tensor.sizes());\n": ""})


def steps_with_bf16(site: Path) -> tuple[int, str]:
    """Return how many of two ranks have ended well, where Horovod may wait for nothing that is computed later."""
    # Without fusion: Horovod waits once in a run, where it makes the buffer for it.
    environment = start_ranks.rank_environment(ASYNC | {"HOROVOD_FUSION_THRESHOLD": "0"})
    environment["PYTHONPATH"] = f"{site}{os.pathsep}{ROOT}"
    command = [*start_ranks.horovodrun(Path(sys.executable)), "--gloo", "-np", "2"]
    command += [sys.executable, "tests/standin/bf16_steps.py"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    said = done.stdout + done.stderr
    return sum(line.endswith("ok") for line in said.splitlines()), said


def test_bf16_waits_for_nothing_that_is_computed_later(site: Path) -> None:
    ended, said = steps_with_bf16(site)
    assert ended == 2, said


def test_an_alltoall_that_waits_for_what_is_computed_later_is_found(alltoall_that_waits: Path) -> None:
    ended, said = steps_with_bf16(alltoall_that_waits)
    assert ended < 2, said
    assert "has sent to its stream meanwhile" in said, said


def test_a_result_that_nobody_waits_for_is_found(library: TorchLibrary, tmp_path: Path) -> None:
    site = library.site(tmp_path / "site", {"  LetStreamsWait(handle);\n": ""})
    status, said = run(site, 2, "test_accumulation_sums_by_default_and_averages_by_choice", ASYNC, tmp_path / "report")
    assert status != 0, said
    assert " failed" in said, said
