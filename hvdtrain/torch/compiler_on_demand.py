"""Load torch.compile's front end when something is compiled, not when the first optimizer is made.

torch's optimizers tell torch._dynamo not to trace some of their methods, and import it for that: 69 MiB and 1.1 s of
processor time for every rank, compiled or not (torch 2.13, CPU). While it is not imported, there is nothing to tell.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

ON_DEMAND = "HVDTRAIN_COMPILER_ON_DEMAND"

_DYNAMO = "torch._dynamo"
_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")  # torch._disable_dynamo wraps them
_STEP_WRAPPER = "_use_grad"  # and torch.optim.optimizer._use_grad_for_differentiable the built-in optimizers' step


def install() -> bool:
    """Let torch's optimizers work without the compiler until it is imported; return whether they do.

    Changes torch.optim's classes, once. HVDTRAIN_COMPILER_ON_DEMAND=0 leaves them alone, and so does a process that has
    loaded the compiler.
    """
    if os.environ.get(ON_DEMAND) == "0" or _DYNAMO in sys.modules:
        return False
    _change_optimizers()
    return True


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
