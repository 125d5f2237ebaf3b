"""Two ranks on one GPU, through host memory: NCCL refuses that, so it takes the Horovod of `build --through-host`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hvdtrain.system import process_tree
from hvdtrain.system.start_ranks import rank_environment

HERE = Path(__file__).parent


def launch(script: str, *arguments: str, ranks: int = 2, environment: dict[str, str], timeout_s: float = 240) -> str:
    """Return what `ranks` processes print together; fail with it where one of them fails."""
    command = [sys.executable, "-m", "horovod.runner.launch", "-np", str(ranks), "--gloo", sys.executable]
    chosen = {"OMP_NUM_THREADS": "1", "HVDTRAIN_RUNS": "", **environment}
    process = subprocess.Popen(
        [*command, str(HERE / script), *arguments],
        env=rank_environment(chosen), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process_tree.end(None, below=process.pid)
        output, _ = process.communicate()
    text = output.decode(errors="replace")
    assert process.returncode == 0, text
    return text


@pytest.mark.timeout(300)
def test_two_ranks_that_share_a_gpu_equal_one_process(device):
    kind = torch.device(device).type
    environment = {}
    if kind == "cuda":
        folder = os.environ.get("HVDTRAIN_THROUGH_HOST", "")
        assert (Path(folder) / "horovod").is_dir(), "no Horovod through the host: run make gpu-build"
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), folder])
    output = launch("two_ranks.py", kind, environment=environment)
    assert "equal to one process: collectives" in output
    print(output)
