"""horovod.torch's primitives for one process, so that a script runs where Horovod is not installed.

Same names and results as horovod.torch at size 1; a handle is a number whose result is there at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hvdtrain.distributed import world
from hvdtrain.distributed.solo_process_sets import (  # noqa: F401 - Horovod's names
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from hvdtrain.errors import HvdTrainError


class HorovodInternalError(RuntimeError):
    """A collective failed; elastic training recovers from it."""


# None: neither init nor shutdown was called; then hvdtrain.init() counts.
_initialized: bool | None = None
_results: dict[int, Any] = {}
_handles = itertools.count()


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Note that the run began, and register process sets."""
    global _initialized
    _initialized = True
    if process_sets and not isinstance(process_sets, str):
        for process_set in process_sets:
            add_process_set(process_set)


def shutdown() -> None:
    """Note that the run ended."""
    global _initialized
    _initialized = False
    _results.clear()


def is_initialized() -> bool:
    """Return whether `init`, or `hvdtrain.init`, was called."""
    if _initialized is not None:
        return _initialized
    try:
        world.current()
    except HvdTrainError:
        return False
    return True


def size() -> int:
    """Return 1."""
    return 1 + rank()


def rank(*_: Any, **__: Any) -> int:
    """Return 0."""
    if not is_initialized():
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return 0


def is_homogeneous() -> bool:
    """Return True: one host, one rank."""
    return True


def _no() -> bool:
    return False


local_size = cross_size = size
local_rank = cross_rank = rank
join = rank  # the last rank to join is the only one
mpi_threads_supported = mpi_enabled = mpi_built = gloo_enabled = gloo_built = _no
nccl_built = ddl_built = ccl_built = cuda_built = rocm_built = _no


def barrier(process_set: Any = None) -> None:
    """Return at once."""
    rank()


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Do nothing: no communication, no timeline."""


def stop_timeline() -> None:
    """Do nothing."""


# Operations, with those of Horovod's arguments that change a result where there is one rank.


def _handle_on(result: Any) -> int:
    rank()
    handle = next(_handles)
    _results[handle] = result
    return handle


def poll(handle: int) -> bool:
    """Return True: results are there at once."""
    return True


def synchronize(handle: int) -> Any:
    """Return the result, once; None afterwards."""
    return _results.pop(handle, None)


def _scaled(tensor: Tensor, prescale_factor: float = 1.0, postscale_factor: float = 1.0, **_: Any) -> Tensor:
    factor = prescale_factor * postscale_factor
    return tensor.clone() if factor == 1.0 else (tensor * factor).to(tensor.dtype)


def allreduce_async_(tensor: Tensor, **options: Any) -> int:
    """Scale `tensor` in place and return a handle on it."""
    if options.get("prescale_factor", 1.0) * options.get("postscale_factor", 1.0) != 1.0:
        tensor.detach().copy_(_scaled(tensor, **options))
    return _handle_on(tensor)


def grouped_allreduce_async_(tensors: Sequence[Tensor], **options: Any) -> int:
    """`allreduce_async_` for each tensor, under one handle."""
    return _handle_on(tuple(synchronize(allreduce_async_(t, **options)) for t in tensors))


def reducescatter_async(tensor: Tensor, **options: Any) -> int:
    """Return a handle on a scaled copy of `tensor`."""
    return _handle_on(_scaled(tensor, **options))


def grouped_reducescatter_async(tensors: Sequence[Tensor], **options: Any) -> int:
    """`reducescatter_async` for each tensor, under one handle."""
    return _handle_on(tuple(_scaled(t, **options) for t in tensors))


def allgather_async(tensor: Tensor, **options: Any) -> int:
    """Return a handle on a copy of `tensor`."""
    return _handle_on(tensor.clone())


def grouped_allgather_async(tensors: Sequence[Tensor], **options: Any) -> int:
    """Return a handle on copies of `tensors`."""
    return _handle_on(tuple(t.clone() for t in tensors))


def broadcast_async_(tensor: Tensor, root_rank: int, **options: Any) -> int:
    """Return a handle on `tensor`.

    Raises:
        ValueError: the root is not rank 0.
    """
    if root_rank != 0:
        raise ValueError(f"There is one process, rank 0. Received: root_rank={root_rank}")
    return _handle_on(tensor)


def alltoall_async(tensor: Tensor, splits: Any = None, **options: Any) -> int:
    """Return a handle on (copy of `tensor`, number of rows)."""
    received = torch.tensor([tensor.shape[0] if tensor.dim() else 1], dtype=torch.int32)
    if splits is not None and int(torch.as_tensor(splits).sum()) != int(received[0]):
        raise ValueError(f"splits must add up to the {int(received[0])} rows of the tensor. Received: {splits}")
    return _handle_on((tensor.clone(), received))
