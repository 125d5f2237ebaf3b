"""Host (numpy) collectives over horovod.torch, and the GPU that belongs to a local rank."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.distributed import devices
from hvdtrain.system import gpus

_DYNAMO = "torch._dynamo"
_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")  # torch._disable_dynamo wraps them
_STEP_WRAPPER = "_use_grad"  # and torch.optim.optimizer._use_grad_for_differentiable the built-in optimizers' step


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
    # An instance is what the variable says: CUDA may give the number of the GPU that it is a part of.
    named = os.environ.get(gpus.VISIBLE, "").partition(",")[0].strip()
    return named if gpus.names_instances(named) else f"GPU-{found.uuid}", str(found.name)


def why_not(horovod: ModuleType) -> str:
    """Return why `horovod` cannot serve the GPU that torch would compute on, "" if it can or torch sees none."""
    if torch.version.hip:
        rocm = f"torch {torch.__version__} is built for AMD GPUs (ROCm {torch.version.hip})"
        return f"{rocm}, which hvdtrain does not support. Install its CUDA or CPU build, then `hvdtrain build`."
    if torch.version.cuda and not torch.cuda.is_available():
        return gpus.why_unusable(torch.version.cuda)
    if not torch.cuda.is_available():
        return ""
    if horovod.cuda_built():
        return _other_nccl(int(horovod.nccl_built()))
    name = torch.cuda.get_device_name()
    return (
        f"torch would compute on a GPU ({name}), and the installed Horovod has no GPU operations. Run `hvdtrain build` "
        'in this environment, or set CUDA_VISIBLE_DEVICES="" to train on the CPU.'
    )


def _other_nccl(built: int) -> str:
    """Return why Horovod cannot use the NCCL that torch has loaded; `built` is the code of a version, 0 for none."""
    if not built:
        return ""
    loaded: tuple[int, ...] = torch.cuda.nccl.version()
    major = built // (10000 if built >= 10000 else 1000)  # NCCL wrote its number in another way up to 2.8
    if loaded[0] == major:
        return ""
    return (
        f"the installed Horovod was built for NCCL {major}, and torch {torch.__version__} has loaded NCCL "
        f"{'.'.join(map(str, loaded))}. Run `hvdtrain build` in this environment."
    )


def put_off_loading() -> str:
    """Let torch's optimizers work without torch.compile's front end until something imports it; return its name.

    torch's optimizers import torch._dynamo to tell it not to trace some of their methods: 69 MiB and 1.1 s of processor
    time for every rank, compiled or not (torch 2.13, CPU). Does nothing where it is imported already.
    """
    if os.environ.get("HVDTRAIN_COMPILER_ON_DEMAND") == "0" or _DYNAMO in sys.modules:
        return ""
    _change_optimizers()
    return "torch.compile"


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


@functools.cache
def _change_optimizers() -> None:
    for name in _METHODS:
        method = getattr(torch.optim.Optimizer, name)
        if hasattr(method, "__wrapped__"):
            setattr(torch.optim.Optimizer, name, _on_demand(method))
    for kind in vars(torch.optim).values():
        step = vars(kind).get("step") if isinstance(kind, type) else None
        if step is not None and hasattr(step, "__wrapped__") and step.__code__.co_name == _STEP_WRAPPER:
            kind.step = _on_demand(step, is_step=True)


def _on_demand(method: Any, *, is_step: bool = False) -> Callable[..., Any]:
    """Return `method`, calling what it wraps directly as long as there is no compiler."""
    body = method.__wrapped__

    @functools.wraps(body)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _DYNAMO in sys.modules:
            return method(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]) if is_step else nullcontext():
            return body(self, *args, **kwargs)

    return called
