"""Take an optimizer's step by torch's fused kernels: one pass over memory instead of one an operation.

Sums of products are rounded once, not twice, and on a GPU Adam's bias corrections are float32, so torch does it only on
request. Here it is requested for one step at a time: parameter groups, and checkpoints of them, stay the user's. The
kernels do not raise tensors' versions, by which torch finds a backward pass through weights that have changed since its
forward pass; so this module raises them. On GPUs only if the host runs ahead of them (`gpu_path`): no GPU has run it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hvdtrain.distributed import gpu_path

FUSED = "HVDTRAIN_FUSED_UPDATE"

_KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # a subclass may do something else between operations
# In half precision the default rounds after each operation and the kernel once: they differ by more than rounding.
_DTYPES = (torch.float32, torch.float64)
_GPU = "cuda"
# What a group says where its owner has chosen no implementation.
_UNDECIDED = {"fused": None, "foreach": None, "differentiable": False}


def applies_to(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether steps of this class of optimizer may be fused. HVDTRAIN_FUSED_UPDATE=0 says no."""
    return kind in _KINDS and os.environ.get(FUSED) != "0"


@contextmanager
def chosen(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within it, `optimizer.step` is fused in each group where that changes nothing beyond rounding.

    The choice follows from parameters, gradients' kinds and state alone, alike on all ranks. It is made after all
    hooks, which may exchange gradients; with a closure, which makes them during the step, nothing is fused.
    """
    groups: list[dict[str, Any]] = []

    def choose(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("closure") is None and all(each is None for each in args[1:]):
            groups.extend(group for group in optimizer.param_groups if _can_be_fused(optimizer, group))
        for group in groups:
            group["fused"] = True
            _move_counts(optimizer, group["params"])

    last = optimizer.register_step_pre_hook(choose)
    try:
        yield
    finally:
        last.remove()
        for group in groups:
            group["fused"] = None
        torch.autograd.graph.increment_version(
            [param for group in groups for param in group["params"] if param.grad is not None]
        )


def _can_be_fused(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    if any(group.get(name, "unknown") != value for name, value in _UNDECIDED.items()):
        return False
    if group.get("capturable") or isinstance(group["lr"], Tensor) or torch.get_default_dtype() != torch.float32:
        return False  # state would be created with another type, or on another device
    params = [param for param in group["params"] if param.grad is not None]
    states = [optimizer.state.get(param, {}) for param in params]
    if len({len(state) for state in states}) > 1:
        return False  # SGD's kernel takes momentum from all parameters or from none
    return all(_fits(param, state) for param, state in zip(params, states, strict=True))


def _fits(param: Tensor, state: dict[str, Any]) -> bool:
    """Return whether the kernels, which check nothing, read these tensors correctly from their memory."""
    on_gpu = not param.is_cpu
    if param.dtype not in _DTYPES or (on_gpu and not (param.device.type == _GPU and gpu_path.is_async())):
        return False
    for name, value in (("", param), ("gradient", param.grad), *state.items()):
        if type(value) not in (Tensor, Parameter) or value.layout is not torch.strided:
            return False
        if value.dtype is not (torch.float32 if name == "step" else param.dtype):
            return False
        if on_gpu and name != "step":  # which is moved there
            if value.device != param.device or not _is_laid_out(value, param):
                return False
        elif not value.is_contiguous() or not (on_gpu or value.is_cpu):
            return False
    return True


def _is_laid_out(value: Tensor, param: Tensor) -> bool:
    """Return whether `value` fills its memory in the order in which the parameter fills its own."""
    channels_last = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
    return value.stride() == param.stride() and (channels_last or value.is_contiguous())


def _move_counts(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> None:
    """Put steps' counts where the kernels of a GPU read them; those of a loaded checkpoint are on the host."""
    for param in params if params and not params[0].is_cpu else ():
        count = optimizer.state.get(param, {}).get("step")
        if isinstance(count, Tensor) and count.device != param.device:
            optimizer.state[param]["step"] = count.to(param.device)
