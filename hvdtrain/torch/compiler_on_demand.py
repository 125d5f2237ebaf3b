"""Load torch.compile's front end when something is compiled, not when the first optimizer is made.

torch's optimizers tell torch._dynamo not to trace some of their methods, and import it for that: 80 MiB and most of a
second for every rank, compiled or not (measured with torch 2.13 on a CPU). As long as nothing else has imported it
there is nobody to tell.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

ON_DEMAND = "HVDTRAIN_COMPILER_ON_DEMAND"

_DYNAMO = "torch._dynamo"
_installed = False

_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")  # torch._disable_dynamo wraps them
_STEP_WRAPPER = "_use_grad"  # and torch.optim.optimizer._use_grad_for_differentiable the built-in optimizers' step


def install() -> bool:
    """Let torch's optimizers do without the compiler until it is there; return whether they do.

    Changes torch.optim's classes, once. HVDTRAIN_COMPILER_ON_DEMAND=0 leaves them alone, and so does a process that has
    loaded the compiler.
    """
    global _installed
    if os.environ.get(ON_DEMAND) == "0" or _DYNAMO in sys.modules:
        return False
    if _installed:
        return True
    _installed = True
    base = torch.optim.Optimizer
    for name in _METHODS:
        method = getattr(base, name)
        if hasattr(method, "__wrapped__"):
            setattr(base, name, _on_demand(method, _as_it_is))
    for kind in vars(torch.optim).values():
        step = vars(kind).get("step") if isinstance(kind, type) else None
        if step is not None and hasattr(step, "__wrapped__") and step.__code__.co_name == _STEP_WRAPPER:
            kind.step = _on_demand(step, _with_gradients_as_asked)
    return True


def _on_demand(method: Callable[..., Any], without: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method`, calling what it wraps through `without` as long as there is no compiler."""
    body = method.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(body)
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _DYNAMO in sys.modules:
            return method(self, *args, **kwargs)
        return without(body, self, *args, **kwargs)

    return called


def _as_it_is(body: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    return body(self, *args, **kwargs)


def _with_gradients_as_asked(body: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.set_grad_enabled(self.defaults["differentiable"]):
        return body(self, *args, **kwargs)
