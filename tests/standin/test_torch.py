"""Rank tests of torch over the stand-in: Horovod's torch library, compiled as for GPUs. `make standin-torch`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = (
    "optimizer", "collectives", "join", "buckets", "large_buckets", "broadcast", "sync_batch_norm", "uneven_gradients"
)  # fmt: skip

pytestmark = [
    pytest.mark.skipif(os.environ.get("HVDTRAIN_TEST_LONG") != "1", reason="it takes long: make standin-torch"),
    pytest.mark.timeout(3000),
]


@pytest.fixture(scope="session")
def site(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from torch_library import TorchLibrary  # imports torch

    scratch = tmp_path_factory.mktemp("source")
    return TorchLibrary(folder, scratch).site(scratch / "site")


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_train_with_what_horovod_does_on_gpus(site: Path, size: int) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
    command = [sys.executable, "tests/ranks/run.py", "--only", "torch-gloo", "--all", "--np", str(size)]
    chosen = " or ".join(f"test_{name}.py" for name in FILES)
    done = subprocess.run(
        [*command, "--max-failures", "40", "--", "-k", chosen],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
