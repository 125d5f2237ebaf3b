"""The GPU that JAX uses on this rank: the local rank's, and no other.

JAX takes every GPU that it sees when its backend starts, so that ranks on one host would share the first.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import jax

from hvdtrain.distributed import devices, launch_environment
from hvdtrain.errors import HvdTrainError

_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def pick_device(local_rank: int) -> str:
    """Show JAX only the GPU of `local_rank`, and return its name; "cpu" where JAX has no GPU.

    A process without ranks beside it gets all GPUs.

    Raises:
        HvdTrainError: JAX already started on several GPUs.
        RuntimeError: there are GPUs, but fewer than local ranks.
    """
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
    count = _count_gpus()
    if count == 0:
        return "cpu"
    index = devices.gpu_of(local_rank, count)
    jax.config.update("jax_cuda_visible_devices", str(index))
    return f"cuda:{index}"


def _started() -> bool:
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def _count_gpus() -> int:
    """Return how many GPUs JAX would take, without asking it: asking starts its backend on all of them."""
    platforms = str(jax.config.jax_platforms or "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return 0
    if not any(importlib.util.find_spec(name) for name in _PLUGINS):
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([each for each in visible.split(",") if each.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
