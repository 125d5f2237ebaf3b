"""Ranks agree in `init` on who waits for a GPU. What GPUs and proofs would say is faked, the agreement is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HOROVODRUN = Path(sys.executable).with_name("horovodrun")
# A rank of a Horovod with NCCL, on a host with a GPU, whose proof is an argument; each rank is on a host of its own.
RANK = """
import json, logging, os, pathlib, socket, sys
import horovod.torch
from hvdtrain.distributed import gpu_path, tuning
from hvdtrain.horovod_build import gpu_record
from hvdtrain.torch import collectives
import hvdtrain

rank = int(os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
horovod.torch.nccl_built = lambda: 22803
collectives.has_gpu = lambda: True
socket.gethostname = lambda: f"host-{rank}"
gpu_record.answer = lambda: gpu_record.Answer(*json.loads(sys.argv[2 + rank]))
logging.basicConfig(level=logging.INFO)
world = hvdtrain.init("torch")
total = world.allreduce([1.0])
pathlib.Path(sys.argv[1], str(rank)).write_text(json.dumps([gpu_path.is_async(), float(total[0])]))
"""
PROVEN, NOT = (True, "proven here on 2026-11-28"), (False, "no proof for this host's GPUs: hvdtrain doctor --gpu")


@pytest.mark.parametrize(
    ("second", "asked", "is_async", "said"),
    [
        (PROVEN, "", True, "the host runs ahead of the GPU (proven here on 2026-11-28)"),
        (NOT, "", False, f"the host waits for the GPU (host host-1: {NOT[1]})"),
        (NOT, "0", False, "the host waits for the GPU (HVDTRAIN_GPU_ASYNC=0)"),
    ],
)
def test_all_ranks_do_the_same_and_rank_0_says_why(
    second: tuple[bool, str], asked: str, is_async: bool, said: str, tmp_path: Path
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [HOROVODRUN, "-np", "2", sys.executable, script, tmp_path, json.dumps(PROVEN), json.dumps(second)]
    done = subprocess.run(
        command, env={**os.environ, "HVDTRAIN_GPU_ASYNC": asked}, capture_output=True, text=True, timeout=100
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    assert [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)] == [[is_async, 2.0]] * 2
    assert output.count("ranks on") == output.count(said) == 1, output


# A rank of torch's CUDA build, on a host whose driver is an argument; rank 1 sees no GPU.
OLD_DRIVER = """
import os, sys, torch, hvdtrain
torch.version.cuda = "13.0"
rank = os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
if rank == "1":
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ["PATH"] = sys.argv[1] + os.pathsep + os.environ["PATH"]
hvdtrain.init("torch")
"""


def test_a_driver_that_is_too_old_ends_the_job_with_a_line_of_its_rank(tmp_path: Path) -> None:
    program, script = tmp_path / "nvidia-smi", tmp_path / "rank.py"
    program.write_text("#!/bin/sh\necho 575.57.08\n")
    program.chmod(0o755)
    script.write_text(OLD_DRIVER)
    command = [HOROVODRUN, "-np", "2", sys.executable, script, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert "rank 1: the NVIDIA driver is 575.57.08, and CUDA 13.0 needs 580 or newer: apt-get install nvid" in output
    assert "rank 0: the NVIDIA" not in output
