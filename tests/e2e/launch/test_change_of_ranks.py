"""A checkpoint of three ranks is resumed by two, by four and by one: what only one rank held stays in the run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.system import start_ranks

SCRIPT = Path(__file__).with_name("change_of_ranks.py")
SAVERS, LIMIT_S = 3, 150
LONG = pytest.mark.long


def train(folder: Path, size: int) -> dict[str, Any]:
    """Run the cases on so many ranks; return what rank 0 has found."""
    launcher = [*start_ranks.horovodrun(Path(sys.executable)), "-np", str(size)] if size > 1 else []
    environment = start_ranks.rank_environment({"OMP_NUM_THREADS": "1"}) | ({} if launcher else {"HVDTRAIN_SOLO": "1"})
    command = [*launcher, sys.executable, str(SCRIPT), str(folder), str(SAVERS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads((folder / f"found-{size}.json").read_text())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder of checkpoints of three ranks, stopped within an epoch, and what they were then."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, train(folder, SAVERS)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process that was never stopped, with the same global batches."""
    return train(tmp_path_factory.mktemp("straight"), 1)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=LONG), pytest.param(1, marks=LONG)])
def test_a_checkpoint_of_three_ranks_is_resumed_by_another_number(
    size: int, saved: tuple[Path, dict[str, Any]], straight: dict[str, Any]
) -> None:
    folder, before = saved
    for name in before:
        shutil.copytree(folder / f"{name}-saved", folder / f"{name}-{size}")
    found = train(folder, size)
    for name, case in found.items():
        assert case["are_equal"], name
        assert case["step"] == straight[name]["step"], name
        start = before[name]["sums"]
        if name in ("topk", "powersgd") and size > 1:  # one process sends nothing, and remembers nothing
            assert np.abs(start).max() > 1e-4, name
            mean = np.divide(case["sums"], size)  # as they count in the mean gradient
            np.testing.assert_allclose(mean, np.divide(start, SAVERS), rtol=1e-5, atol=1e-8, err_msg=name)
            assert case["loss"][-1] < 0.9 * case["loss"][0], name
        if name in ("gradients", "none"):
            np.testing.assert_allclose(case["weights"], straight[name]["weights"], atol=1e-5, err_msg=name)
