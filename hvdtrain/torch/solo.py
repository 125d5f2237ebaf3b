"""horovod.torch's primitives for one process, so that a script runs where Horovod is not installed.

Same names and results as horovod.torch at size 1; a handle is a number whose result is there at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from hvdtrain.distributed import world
from hvdtrain.errors import HvdTrainError


class HorovodInternalError(RuntimeError):
    """A collective failed; elastic training recovers from it."""


class ProcessSet:
    """A set of ranks that run collectives together; alone, rank 0 is all there is.

    Args:
        ranks_or_comm: the ranks.

    Raises:
        ValueError: not a list of whole numbers.
    """

    process_set_id: int | None = None
    mpi_comm = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        ranks = list(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"ProcessSet takes a list of ranks. Received: {ranks_or_comm!r}")
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """Return the number of ranks in the set; None before it is registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's rank in the set; None before it is registered."""
        return None if self.process_set_id is None else 0

    def included(self) -> bool:
        """Return whether this process is in the set."""
        return 0 in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([0])
global_process_set.process_set_id = 0

# None: neither init nor shutdown was called; then hvdtrain.init() counts.
_initialized: bool | None = None
_results: dict[int, Any] = {}
_handles = itertools.count()
_set_ids = itertools.count(1)


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Note that the run began; there is nobody to meet."""
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


def _number(value: int) -> int:
    if not is_initialized():
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return value


def size() -> int:
    """Return 1."""
    return _number(1)


def rank() -> int:
    """Return 0."""
    return _number(0)


local_size = cross_size = size
local_rank = cross_rank = rank


def is_homogeneous() -> bool:
    """Return True: one host, one rank."""
    return True


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Register a process set.

    Raises:
        ValueError: it names ranks that do not exist.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.ranks != [0]:
        raise ValueError(f"There is one process, rank 0. Received: ranks={process_set.ranks}")
    process_set.process_set_id = next(_set_ids)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set; return whether there was one to forget."""
    if not process_set.process_set_id:
        return False
    process_set.process_set_id = None
    return True


def _no() -> bool:
    return False


mpi_threads_supported = mpi_enabled = mpi_built = gloo_enabled = gloo_built = _no
nccl_built = ddl_built = ccl_built = cuda_built = rocm_built = _no


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Do nothing: no communication, no timeline."""


def stop_timeline() -> None:
    """Do nothing."""


def _keep(result: Any) -> int:
    _number(0)
    handle = next(_handles)
    _results[handle] = result
    return handle


def poll(handle: int) -> bool:
    """Return True: results are there at once."""
    return True


def synchronize(handle: int) -> Any:
    """Return the result, once; None afterwards."""
    return _results.pop(handle, None)


def _scaled(tensor: Tensor, prescale_factor: float, postscale_factor: float) -> Tensor:
    factor = prescale_factor * postscale_factor
    return tensor.clone() if factor == 1.0 else (tensor * factor).to(tensor.dtype)


def allreduce_async(
    tensor: Tensor, average: Any = None, name: Any = None, op: Any = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: Any = None,
) -> int:  # fmt: skip
    """Return a handle on a scaled copy of `tensor`."""
    return _keep(_scaled(tensor, prescale_factor, postscale_factor))


def allreduce_async_(
    tensor: Tensor, average: Any = None, name: Any = None, op: Any = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: Any = None,
) -> int:  # fmt: skip
    """Scale `tensor` in place and return a handle on it."""
    if prescale_factor * postscale_factor != 1.0:
        tensor.detach().copy_(_scaled(tensor, prescale_factor, postscale_factor))
    return _keep(tensor)


def grouped_allreduce_async_(tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> int:
    """`allreduce_async_` for each tensor, under one handle."""
    return _keep(tuple(synchronize(allreduce_async_(t, *args, **kwargs)) for t in tensors))


def allgather_async(tensor: Tensor, name: Any = None, process_set: Any = None) -> int:
    """Return a handle on a copy of `tensor`."""
    return _keep(tensor.clone())


def grouped_allgather_async(tensors: Sequence[Tensor], name: Any = None, process_set: Any = None) -> int:
    """Return a handle on copies of `tensors`."""
    return _keep(tuple(t.clone() for t in tensors))


def broadcast_async_(tensor: Tensor, root_rank: int, name: Any = None, process_set: Any = None) -> int:
    """Return a handle on `tensor`.

    Raises:
        ValueError: the root is not rank 0.
    """
    if root_rank != 0:
        raise ValueError(f"There is one process, rank 0. Received: root_rank={root_rank}")
    return _keep(tensor)


def alltoall_async(tensor: Tensor, splits: Any = None, name: Any = None, process_set: Any = None) -> int:
    """Return a handle on (copy of `tensor`, number of rows)."""
    received = torch.tensor([tensor.shape[0] if tensor.dim() else 1], dtype=torch.int32)
    if splits is not None and int(torch.as_tensor(splits).sum()) != int(received[0]):
        raise ValueError(f"splits must add up to the {int(received[0])} rows of the tensor. Received: {splits}")
    return _keep((tensor.clone(), received))


def reducescatter_async(
    tensor: Tensor, name: Any = None, op: Any = None, process_set: Any = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """Return a handle on a scaled copy of `tensor`."""
    return _keep(_scaled(tensor, prescale_factor, postscale_factor))


def grouped_reducescatter_async(
    tensors: Sequence[Tensor], name: Any = None, op: Any = None, process_set: Any = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """`reducescatter_async` for each tensor, under one handle."""
    return _keep(tuple(_scaled(t, prescale_factor, postscale_factor) for t in tensors))


def join(device: int = -1) -> int:
    """Return 0: the last rank to join is the only one."""
    return _number(0)


def barrier(process_set: Any = None) -> None:
    """Return at once."""
    _number(0)
