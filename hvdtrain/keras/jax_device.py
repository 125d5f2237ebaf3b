"""The GPU that JAX uses on this rank: the local rank's alone, where JAX would take all that it sees as it starts."""

from __future__ import annotations

import importlib.util
import itertools
import os
from pathlib import Path

import jax

from hvdtrain.distributed import devices, launch_environment
from hvdtrain.errors import HvdTrainError
from hvdtrain.system import gpus


def pick_device(local_rank: int) -> str:
    """Show JAX only the GPU of `local_rank`, or all to a process alone; return its name, or "cpu"."""
    if launch_environment.is_alone():
        return "cuda:0" if _count_gpus() else "cpu"
    if _started():
        taken = [device for device in jax.local_devices() if device.platform == "gpu"]
        if len(taken) > 1:
            raise HvdTrainError(
                "JAX already runs on several GPUs, so this rank cannot have one of its own. Call hvdtrain.init() "
                f"first, before any JAX or Keras computation. Received: {len(taken)} GPUs on local rank {local_rank}"
            )
        return f"cuda:{taken[0].id}" if taken else "cpu"
    if not (count := _count_gpus()):
        return "cpu"
    # JAX would warn, and compute on the host. A lost GPU among those that the launcher did not choose does no harm.
    if why := gpus.why_unusable(_cuda(), may_be_lost=gpus.VISIBLE not in os.environ):
        raise HvdTrainError(f"local rank {local_rank}: {why}")
    index = devices.gpu_of(local_rank, count)
    jax.config.update("jax_cuda_visible_devices", str(index))
    return f"cuda:{index}"


def _cuda() -> str:
    """Return the version of CUDA that JAX was built for, "13"; "" without its plugin for GPUs."""
    return next((each for each in ("13", "12") if importlib.util.find_spec(f"jax_cuda{each}_plugin")), "")


def _started() -> bool:
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def _count_gpus() -> int:
    """Return how many GPUs JAX would take, without asking it: asking starts its backend on all of them."""
    platforms = str(jax.config.jax_platforms or "cuda").split(",")
    if not {"cuda", "gpu"} & set(platforms) or not _cuda():
        return 0
    visible = os.environ.get(gpus.VISIBLE)
    if visible is None:
        return len(list(Path("/dev").glob("nvidia[0-9]*")))
    if gpus.names_instances(visible):
        return 1
    # CUDA does not read on after -1.
    return len(list(itertools.takewhile(lambda each: each.strip() not in ("", "-1"), visible.split(","))))
