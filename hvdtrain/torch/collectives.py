"""Host (numpy) collectives over horovod.torch, and the GPU that belongs to a local rank."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.distributed import devices
from hvdtrain.torch import compiler_on_demand


def run(horovod: ModuleType, kind: str, array: NDArray[Any], *args: Any, **options: Any) -> NDArray[Any]:
    """Return what Horovod's collective `kind` makes of a host array."""
    result = getattr(horovod, kind)(torch.from_numpy(np.array(array)), *args, **options)
    return np.asarray(result.numpy())


def has_gpu() -> bool:
    """Return whether torch sees a GPU."""
    return torch.cuda.is_available()


def gpu(index: int) -> tuple[str, str]:
    """Return UUID and name of a GPU that this process sees."""
    found = torch.cuda.get_device_properties(index)
    return f"GPU-{found.uuid}", str(found.name)


def why_not(horovod: ModuleType) -> str:
    """Return why `horovod` cannot serve the GPU that torch would compute on, "" if it can or torch sees none."""
    if torch.version.hip:
        return (
            f"torch {torch.__version__} is built for AMD GPUs (ROCm {torch.version.hip}), which hvdtrain does not "
            "support. Install its CUDA or CPU build, then `hvdtrain build`."
        )
    if not torch.cuda.is_available() or horovod.cuda_built():
        return ""
    name = torch.cuda.get_device_name()
    return (
        f"torch would compute on a GPU ({name}), and the installed Horovod has no GPU operations. Run `hvdtrain build` "
        'in this environment, or set CUDA_VISIBLE_DEVICES="" to train on the CPU.'
    )


def put_off_loading() -> str:
    """Put off the compiler; see `hvdtrain.torch.compiler_on_demand`."""
    return "torch.compile" if compiler_on_demand.install() else ""


def starts_with_threads() -> bool:
    """Return False: torch's number of threads can change at any time."""
    return False


def set_threads(threads: int) -> int:
    """Compute with at most `threads` threads: a lower number of the user's own stays."""
    if torch.get_num_threads() > threads:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def pick_device(local_rank: int) -> str:
    """Make the GPU of `local_rank` the current one, before anything is allocated on another; "cpu" without a GPU."""
    if not torch.cuda.is_available():
        return "cpu"
    index = devices.gpu_of(local_rank, torch.cuda.device_count())
    torch.cuda.set_device(index)
    return f"cuda:{index}"
