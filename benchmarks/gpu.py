"""Steps on GPUs. One rank: the Trainer and the drop-in with the reduction forced, plain PyTorch, DDP over nccl.

With several GPUs a rank for each: the drop-in and DDP over nccl.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from benchmarks import steps
from benchmarks.catalog import Peer
from benchmarks.steps import Plan
from benchmarks.workloads import Workload
from hvdtrain.horovod_build import installed

_REDUCED = {"HVDTRAIN_REDUCE_ALONE": "1"}
_ASYNC = {**_REDUCED, "HVDTRAIN_GPU_ASYNC": "1"}
_HOROVOD = ("horovod",)
# averages=False: bf16 on a GPU does not repeat bit for bit, and there is one rank; tests/gpu hold the weights.
PEERS = (
    Peer("single", "plain PyTorch loop", "gpu_plain", "python", ranks=1, averages=False),
    Peer("ddp", "torch DDP, nccl", "gpu_ddp", "torchrun", ranks=1, averages=False),
    Peer("hvdtrain", "hvdtrain, drop-in", "gpu_hvdtrain", "horovodrun", (), _REDUCED, _HOROVOD, 1, averages=False),
    Peer("trainer", "hvdtrain, Trainer", "gpu_trainer", "horovodrun", (), _REDUCED, _HOROVOD, 1, averages=False),
    Peer("hvdtrain-async", "hvdtrain, drop-in, HVDTRAIN_GPU_ASYNC=1", "gpu_hvdtrain", "horovodrun", (), _ASYNC,
         _HOROVOD, 1, averages=False),
    Peer("trainer-async", "hvdtrain, Trainer, HVDTRAIN_GPU_ASYNC=1", "gpu_trainer", "horovodrun", (), _ASYNC,
         _HOROVOD, 1, averages=False),
)  # fmt: skip
# What a host's proof would choose, if it holds, and if not.
SEVERAL = (
    Peer("ddp", "torch DDP, nccl", "gpu_ddp", "torchrun", has_reference=False),
    Peer("hvdtrain", "hvdtrain, drop-in, HVDTRAIN_GPU_ASYNC=0", "gpu_hvdtrain", "horovodrun", (),
         {"HVDTRAIN_GPU_ASYNC": "0"}, _HOROVOD, has_reference=False),
    Peer("hvdtrain-async", "hvdtrain, drop-in, HVDTRAIN_GPU_ASYNC=1", "gpu_hvdtrain", "horovodrun", (),
         {"HVDTRAIN_GPU_ASYNC": "1"}, _HOROVOD, has_reference=False),
)  # fmt: skip
# All peers wait on the GPU at once. A generous guess, for the whole batch of either workload.
_GIB_A_PEER = {"bf16": 13, "fp32": 25}
_TRIAL_BATCH = 2

_ASK = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
found = [torch.cuda.get_device_properties(index) for index in range(count)]
print(json.dumps({
    "gpus": [each.name for each in found],
    "memory_gib": [round(each.total_memory / 2**30, 1) for each in found],
    "torch_cuda": torch.version.cuda,
    "cudnn": torch.backends.cudnn.version() if count else None,
    "torch_nccl": ".".join(map(str, torch.cuda.nccl.version())) if count else None,
}))
"""


def is_trial() -> bool:
    """True under BENCH_GPU_TRIAL=1: the scripts in small, on the CPU, for a look at everything but the figures."""
    return os.environ.get("BENCH_GPU_TRIAL") == "1"


def hardware() -> dict[str, Any]:
    """Return the GPUs, their driver and libraries; asked in a process of its own, which then lets go of them."""
    asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=120, check=False)
    found: dict[str, Any] = json.loads(asked.stdout.splitlines()[-1]) if asked.returncode == 0 else {"gpus": []}
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found["driver"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        found["driver"] = ""
    built = installed.record()
    return {**found, "horovod": {name: built.get(name, "") for name in ("data_planes", "cuda", "nccl", "compiler")}}


def batch_size(workload: Workload, memory_gib: float, peers: int = len(PEERS)) -> int:
    """Return the samples of a step: the workload's, or fewer on a GPU that is too small for all peers at once."""
    size, needed = workload.batch_size, _GIB_A_PEER[workload.precision] * peers
    while size > 1 and needed * size / workload.batch_size > memory_gib:
        size //= 2
    return size


def measure(workload: Workload, plan: Plan, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Return what results/gpu-NAME.json holds, or gpus-NAME-RANKS.json."""
    found = hardware()
    chosen = PEERS if plan.ranks == 1 else SEVERAL
    size = _TRIAL_BATCH if is_trial() else batch_size(workload, min(found["memory_gib"]), len(chosen))
    if size != workload.batch_size:
        title = f"{workload.title.rpartition(',')[0]}, batch {size}{', a trial' if is_trial() else ''}"
        workload = replace(workload, batch_size=size, title=title)
    shared = {"BENCH_GPU_BATCH": str(size)}
    # A rank has its share of the cores, as `hvdtrain.init` finds for itself; torchrun would leave it one.
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // plan.ranks))}
    peers = [
        replace(peer, environment={**peer.environment, **shared, **({} if peer.needs else threads)}) for peer in chosen
    ]
    measured = steps.measure(workload, peers, plan, say=say)
    measured["machine"] |= found
    return measured
