"""horovod.torch's primitives for one process. A handle is a function that returns the result.

Horovod's need `init`; for these, `hvdtrain.torch.ops.engine.native` asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
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
from hvdtrain.torch.ops import whole_numbers


class HorovodInternalError(RuntimeError):
    """A collective failed; elastic training recovers from it."""


# None: neither init nor shutdown was called; then hvdtrain.init() counts.
_initialized: bool | None = None


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


def is_initialized() -> bool:
    """Return whether `init`, or `hvdtrain.init`, was called."""
    if _initialized is not None:
        return _initialized
    try:
        world.current()
    except HvdTrainError:
        return False
    return True


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


size = local_size = cross_size = _always(1)
rank = local_rank = cross_rank = join = _always(0)  # the last rank to join is the only one
barrier = _always(None)
is_homogeneous = poll = _always(True)
mpi_threads_supported = mpi_enabled = mpi_built = gloo_enabled = gloo_built = _always(False)
nccl_built = ddl_built = ccl_built = cuda_built = rocm_built = _always(False)
start_timeline = stop_timeline = _always(None)  # no communication, no timeline

# Operations, with those of Horovod's arguments that change a result where there is one rank.


def synchronize(handle: Callable[[], Any]) -> Any:
    """Return the result."""
    return handle()


def _handle_on(result: Any) -> Callable[[], Any]:
    return lambda: result


def _for_each(operation: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return an operation on one tensor as Horovod's asynchronous one, and its grouped form."""
    return (
        lambda tensor, *args, **options: _handle_on(operation(tensor, *args, **options)),
        lambda tensors, **options: _handle_on(tuple(operation(t, **options) for t in tensors)),
    )


def _scaled(tensor: Tensor, prescale_factor: float = 1.0, postscale_factor: float = 1.0, **_: Any) -> Tensor:
    factor = prescale_factor * postscale_factor
    if factor == 1.0:
        return tensor.clone()
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor * factor
    return whole_numbers.times(tensor, factor)


def _scale(tensor: Tensor, **options: Any) -> Tensor:
    if options.get("prescale_factor", 1.0) * options.get("postscale_factor", 1.0) != 1.0:
        tensor.detach().copy_(_scaled(tensor, **options))
    return tensor


def _broadcast(tensor: Tensor, root_rank: int, **_: Any) -> Tensor:
    if root_rank != 0:
        raise ValueError(f"There is one process, rank 0. Received: root_rank={root_rank}")
    return tensor


def _exchanged(tensor: Tensor, splits: Any = None, **_: Any) -> tuple[Tensor, Tensor]:
    received = torch.tensor([tensor.shape[0] if tensor.dim() else 1], dtype=torch.int32, device="cpu")
    if splits is not None and int(torch.as_tensor(splits, device="cpu").sum()) != int(received[0]):
        raise ValueError(f"splits must add up to the {int(received[0])} rows of the tensor. Received: {splits}")
    return tensor.clone(), received


allreduce_async_, grouped_allreduce_async_ = _for_each(_scale)
reducescatter_async, grouped_reducescatter_async = _for_each(_scaled)
allgather_async, grouped_allgather_async = _for_each(lambda tensor, **_: tensor.clone())
broadcast_async_, _ = _for_each(_broadcast)
alltoall_async, _ = _for_each(_exchanged)
