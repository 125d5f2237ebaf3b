"""Start a reduction of tensors over ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hvdtrain.torch.ops import engine
from hvdtrain.torch.ops.engine import Adasum, Average, Handle, Sum
from hvdtrain.torch.ops.wire import arrived, from_real, to_reduce


@dataclass(frozen=True)
class Reduction:
    """The arguments that all forms of Horovod's allreduce share, under Horovod's names."""

    op: int = Average
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0
    process_set: Any = None

    def send(self, tensor: Tensor, name: str) -> Any:
        """Start the reduction of one tensor in place; return Horovod's handle."""
        return engine.native().allreduce_async_(tensor, name=name, **vars(self))


def active_ranks_async(name: str) -> Handle:
    """Count the ranks that have not joined: each sends a one; for a rank that joined, Horovod sends a zero."""
    one = torch.ones(1, dtype=torch.float32, device="cpu")  # float16 counts to 2048 only
    part = engine.native().allreduce_async_(one, name=f"{name}.active", op=Sum)
    return Handle([part], lambda total: round(float(total)), name)


def submit(
    tensors: Sequence[Tensor], how: Reduction, name: str, *, in_place: bool = False, counted: bool = True
) -> Handle:
    """Start one reduction of `tensors`, grouped if there are several; the handle gives a list of tensors.

    For a mean with `counted`, the sum is divided by the number of ranks that have not joined; else the caller does it.
    """
    if how.op == Adasum:
        check_adasum(tensors[0])
    if how.op not in (Average, Sum) and any(tensor.is_complex() for tensor in tensors):
        raise TypeError(
            "Complex numbers can be averaged and added up only. Received: another op. Use torch.view_as_real."
        )
    tensors, wires = list(map(arrived, tensors)), []
    for tensor in tensors:
        sent = to_reduce(tensor)
        wires.append(sent if in_place or sent.data_ptr() != tensor.data_ptr() else sent.clone())
    # Horovod multiplies a sum by a rounded 1/size and cuts: 49 ones on 49 ranks would have the integer mean 0.
    whole_numbers = how.op == Average and not any(sent.is_floating_point() for sent in wires)
    sent_as = replace(how, op=Sum) if whole_numbers else how
    if len(wires) == 1:
        parts = [sent_as.send(wires[0], name)]
    else:
        parts = [engine.native().grouped_allreduce_async_(wires, name=name, **vars(sent_as))]
    expected = how.process_set.size()
    if counted and how.op == Average and engine.is_global(how.process_set) and expected > 1:
        parts.append(active_ranks_async(name))

    def finish(_: Any, active: int = expected) -> list[Tensor]:
        results = []
        for tensor, received in zip(tensors, wires, strict=True):
            if whole_numbers:
                received.copy_(torch.div(received, active, rounding_mode="trunc"))
            elif active != expected:
                received.mul_(expected / active)
            if not in_place:
                results.append(from_real(received, tensor.dtype))
                continue
            if received.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(from_real(received, tensor.dtype))
            results.append(tensor)
        return results

    return Handle(parts, finish, name)


def gather_equal_async(tensor: Tensor, name: str, process_set: Any) -> Any:
    """Start an allgather of tensors of one shape; return Horovod's handle.

    The memory for a result on a GPU is made here: else Horovod's thread makes it later, and the GPU waits for all that
    the host has sent by then.
    """
    native = engine.native()
    horovods = sys.modules.get(f"{native.__name__}.mpi_ops") if _is_on_gpu(tensor) else None
    if horovods is None:  # on a CPU, or in one process without Horovod
        return native.allgather_async(tensor, name=name, process_set=process_set)
    gathered = tensor.new_empty((process_set.size() * len(tensor), *tensor.shape[1:]))
    return horovods._allgather_async(tensor, gathered, name, process_set)


def _is_on_gpu(tensor: Tensor) -> bool:
    return tensor.is_cuda


def check_adasum(tensor: Tensor) -> None:
    """Raise ValueError where Horovod has no Adasum, which needs MPI on GPUs too; Horovod fails after it has sent."""
    native = engine.native()
    if native.size() > 1 and not native.mpi_enabled():
        raise ValueError(
            f"Adasum needs MPI. Received: a tensor on {tensor.device}, and Gloo as data plane on rank {native.rank()}. "
            "Launch with `horovodrun --mpi`, or use op=Average."
        )
