"""A model's weights and optimizers on all ranks: broadcast at the start, and gradients averaged in each backward."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import hvdtrain.torch as hvd
from hvdtrain.torch.ops import names


def broadcast_weights(module: nn.Module) -> None:
    """Give all ranks rank 0's parameters and buffers, those that a state_dict leaves out included."""
    hvd.broadcast_parameters([*names.parameters(module), *names.buffers(module)], root_rank=0)


def distribute(
    optimizer: Any, named: Sequence[tuple[str, Any]], others: Sequence[Optimizer], options: dict[str, Any]
) -> Any:
    """Return an optimizer whose gradients are averaged, with rank 0's state and options.

    Raises:
        TypeError: it is no optimizer of torch's kind.
        ValueError: one of `others` has one of its parameters.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"Horovod reduces for torch.optim.Optimizer. Received: {type(optimizer).__name__}")
    own = {id(parameter) for parameter in names.parameters_of(optimizer)}
    if any(id(each) in own for other in others for each in names.parameters_of(other)):
        raise ValueError(
            f"Two optimizers have a parameter in common, whose gradient would be averaged by both. Received: "
            f"{type(optimizer).__name__} on rank {hvd.rank()}. Give each parameter to one optimizer."
        )
    distributed = hvd.DistributedOptimizer(optimizer, named_parameters=named, **options)
    hvd.broadcast_optimizer_state(distributed, root_rank=0)
    return distributed


def average(optimizers: Sequence[Any]) -> None:
    """Replace the gradients of a backward pass by their means over ranks. A collective.

    Of several optimizers, only those whose gradients the pass has made on one rank or more.
    """
    if len(optimizers) > 1:
        made = torch.tensor([each._hvd_reducer.is_in_flight for each in optimizers], dtype=torch.int32, device="cpu")
        on_a_rank = hvd.allreduce(made, op=hvd.Max, name="lightning.optimizers").tolist()
        optimizers = [each for each, flag in zip(optimizers, on_a_rank, strict=True) if flag]
    for each in optimizers:
        each.synchronize()


def checked(
    closure: Callable[[], Any], optimizer: Any, optimizers: Sequence[Any], *, weight: float = 1.0
) -> Callable[[], Any]:
    """Return the closure of a step, after which all ranks have the same gradients, and LBFGS the same loss.

    The closure raises RuntimeError, on all ranks, for gradients that were made past the strategy's `backward`.
    """

    @functools.wraps(closure)
    def evaluate() -> Any:
        loss = closure()
        if any(each._hvd_reducer.is_in_flight for each in optimizers):
            raise RuntimeError(
                "loss.backward() passes by Lightning: its gradients are not averaged before a clipping or a hook sees "
                f"them. Call self.manual_backward(loss). Received on rank {hvd.rank()}"
            )
        if isinstance(optimizer, torch.optim.LBFGS) and isinstance(loss, Tensor):  # else ranks search along other lines
            share = loss.detach() * weight if weight else torch.zeros_like(loss)
            return hvd.allreduce(share, name="lightning.closure")
        return loss

    return evaluate


@contextmanager
def kept_local(optimizers: Sequence[Any]) -> Iterator[None]:
    """Within it, backward passes add to this rank's gradients; the next pass after it sends their sum."""
    for each in optimizers:
        each.set_backward_passes_per_step(sys.maxsize)
    try:
        yield
    finally:
        for each in optimizers:
            each.set_backward_passes_per_step(1)


@contextmanager
def averaged_already(optimizers: Sequence[Any]) -> Iterator[None]:
    """Within it, an optimizer's step averages nothing."""
    with ExitStack() as stack:
        for each in optimizers:
            stack.enter_context(each.skip_synchronize())
        yield


def release(optimizers: Sequence[Any]) -> None:
    """Drop a step that an error has ended, and let backward send nothing any more; no collective."""
    for each in optimizers:
        each._hvd_reducer.forget()
        each._hvd_reducer.detach()
