"""Take an optimizer's step on CPUs by torch's fused kernels: one pass over memory instead of one an operation.

By default torch's optimizers go through their parameters on CPUs one by one and operation by operation. `fused=True`
does the same arithmetic in one pass and leaves it to the user to say so. Here it is said for one step at a time, so
that parameter groups, and checkpoints of them, stay the user's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

FUSED = "HVDTRAIN_FUSED_UPDATE"

_KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # a subclass may do something else between operations
# In half precision the default rounds after each operation and the kernel once: they differ by more than rounding.
_DTYPES = (torch.float32, torch.float64)
# What a group says where its owner has chosen no implementation.
_UNDECIDED = {"fused": None, "foreach": None, "differentiable": False}


def applies_to(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether steps of this class of optimizer may be fused. HVDTRAIN_FUSED_UPDATE=0 says no."""
    return kind in _KINDS and os.environ.get(FUSED) != "0"


@contextmanager
def chosen(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within it, `optimizer.step` is fused in each group where that changes nothing beyond rounding.

    What is chosen follows from the parameters, their gradients' kinds and the optimizer's state alone, which are alike
    on all ranks: so are the bits of what comes out. It is chosen after all hooks have run, those of one rank too, which
    may exchange gradients; with a closure, which makes them during the step, nothing is.
    """
    groups: list[dict[str, Any]] = []

    def choose(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("closure") is None and all(each is None for each in args[1:]):
            groups.extend(group for group in optimizer.param_groups if _can_be_fused(optimizer, group))
        for group in groups:
            group["fused"] = True

    last = optimizer.register_step_pre_hook(choose)
    try:
        yield
    finally:
        last.remove()
        for group in groups:
            group["fused"] = None


def _can_be_fused(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    if any(group.get(name, "unknown") != value for name, value in _UNDECIDED.items()):
        return False
    if group.get("capturable") or isinstance(group["lr"], Tensor) or torch.get_default_dtype() != torch.float32:
        return False  # state would be made of another type, or kept in another place
    params = [param for param in group["params"] if param.grad is not None]
    kept = [optimizer.state.get(param, {}) for param in params]
    if len({len(state) for state in kept}) > 1:
        return False  # SGD's kernel takes momentum from all parameters or from none
    return all(_fits(param, state) for param, state in zip(params, kept, strict=True))


def _fits(param: Tensor, state: dict[str, Any]) -> bool:
    """Return whether the kernels, which go by addresses and ask for nothing, read these tensors as they are meant."""
    if param.dtype not in _DTYPES:
        return False
    for name, value in (("", param), ("gradient", param.grad), *state.items()):
        if type(value) not in (Tensor, Parameter) or value.layout is not torch.strided or not value.is_cpu:
            return False
        if value.dtype is not (torch.float32 if name == "step" else param.dtype) or not value.is_contiguous():
            return False
    return True
