"""A checkpoint of three ranks with Keras's optimizer state in shards is resumed by other ranks, and by Keras alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hvdtrain.system import start_ranks

SCRIPT = Path(__file__).with_name("change_of_ranks_keras.py")
SAVERS, LIMIT_S = 3, 300
LONG = pytest.mark.long
FIRST = "06/"

Arrays = dict[str, NDArray[np.float32]]


def run(folder: Path, backend: str, mode: str, size: int = 1) -> None:
    """Run the script on so many ranks."""
    launcher = [*start_ranks.horovodrun(Path(sys.executable)), "-np", str(size)] if size > 1 else []
    chosen = {"OMP_NUM_THREADS": "1", "KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu"}
    chosen["XLA_FLAGS"] = (
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # to compile fast
    )
    environment = start_ranks.rank_environment(chosen | ({} if launcher else {"HVDTRAIN_SOLO": "1"}))
    command = [*launcher, sys.executable, str(SCRIPT), str(folder), mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def arrays(path: Path) -> Arrays:
    with np.load(path) as found:
        return dict(found)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that returns a folder with what three ranks have saved, and Keras alone has trained."""
    known: dict[str, Path] = {}

    def of(backend: str) -> Path:
        if backend not in known:
            folder = tmp_path_factory.mktemp(backend)
            run(folder, backend, "save", SAVERS)
            run(folder, backend, "plain")
            known[backend] = folder
        return known[backend]

    return of


def assert_equal(backend: str, ours: Arrays, right: Arrays) -> None:
    """Check weights and optimizer state, by step: bit for bit on torch; elsewhere, fused operations round otherwise."""
    assert ours.keys() == right.keys()
    assert len(ours) > 6
    for name, array in right.items():
        tolerance = 0.0 if backend == "torch" else 1e-6
        np.testing.assert_allclose(ours[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


BACKENDS = ["torch", pytest.param("tensorflow", marks=LONG), pytest.param("jax", marks=LONG)]


@pytest.mark.timeout(700)
@pytest.mark.parametrize("backend", BACKENDS)
def test_keras_alone_resumes_what_three_ranks_have_saved_in_shards(backend: str, saved: Callable[[str], Path]) -> None:
    folder = saved(backend)
    straight = arrays(folder / "straight.npz")
    begin = {name: array for name, array in straight.items() if name.startswith(FIRST)}
    assert_equal(backend, arrays(folder / "save-3.npz"), begin)
    assert_equal(backend, arrays(folder / "plain.npz"), straight)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("size", [pytest.param(2, marks=LONG), 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_other_ranks_resume_what_three_ranks_have_saved_in_shards(
    backend: str, size: int, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(saved(backend) / "run", tmp_path / "run")
    run(tmp_path, backend, "resume", size)
    assert_equal(backend, arrays(tmp_path / f"resume-{size}.npz"), arrays(saved(backend) / "straight.npz"))
