"""The reduction of gradients on each of Keras's backends.

Every module here has the same functions, on lists of that backend's tensors:

    reduce_gradients(gradients, names, variables, how)   the same gradients on every rank; names and number are equal
                                                         on all of them, also in a graph that is traced again
    true_on_all_ranks(flag, name, how)                   a boolean scalar
    BatchWeight()                                        what gradients are multiplied by: `set`, `read`, `multiply`
    on_update_step(optimizer, function, otherwise, ...)  function(gradients), but only where weights change
    non_finite_flags(gradients)                          a function that returns one flag a gradient, as it is now
    may_update(optimizer, gradients)                     a boolean scalar: false if weights would become non-finite
    report_unless(finite, function, *flags)              function(arrays) on the host, unless finite
    wait_for_reports()                                   returns when the host has received all reports
    run_if(finite, update, skip)                         update() or skip(), which change variables
    fused_update(optimizer, step, gradient, ...)         updates a variable in one pass; false if it cannot
    memory_in_use()                                      bytes in use on the GPU now, and at most; None without a GPU
    untraced(function)                                   function, left alone by the backend's compiler
    compiling_again(model)                               (block, warning): the block in which a step is compiled whose
                                                         activations backward computes again; why it cannot, or ""
    on_host(value)                                       a variable's or a tensor's value, of its memory on CPUs
    give(variable, array)                                assigns an array that nobody else uses
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from hvdtrain.system import large_arrays

Array = NDArray[Any]


def backend_module() -> Any:
    """Return the module here that serves Keras's backend; raises ValueError if there is none."""
    name = keras.backend.backend()
    if name not in ("tensorflow", "torch", "jax"):
        raise ValueError(f'Keras must run on "tensorflow", "torch" or "jax". Received: KERAS_BACKEND={name!r}')
    return importlib.import_module(f"hvdtrain.keras.backends.{name}")


def number(value: Any) -> float:
    """Return a scalar on the host."""
    return float(keras.ops.convert_to_numpy(value))


def room_for(variable: Any) -> Array:
    """Return where to write a value for `give`: in the variable's memory, if it may be changed there."""
    value = np.require(backend_module().on_host(variable), requirements="C")
    return value if value.flags.writeable else large_arrays.empty(value.shape, value.dtype)


class HostWeight:
    """The factor of a rank's gradients; a compiled step reads it each time it runs."""

    value = 1.0

    def set(self, value: float) -> None:
        """Set the weight of the steps from now on."""
        self.value = value

    def read(self) -> Any:
        """Return the weight as a scalar."""
        return self.value

    def multiply(self, gradients: Sequence[Any]) -> list[Any]:
        """Return `gradients` times the weight; exact zeros at weight 0, whatever they held."""
        weight, ops = self.read(), keras.ops
        return [ops.where(weight == 0, ops.zeros_like(g), g * ops.cast(weight, g.dtype)) for g in gradients]


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`: the backend runs Python as it is written."""
    return function


def compiling_again(model: Any) -> tuple[Callable[[], AbstractContextManager[Any]], str]:
    """Return a block that does nothing, and no warning: what is computed again stays so."""
    return nullcontext, ""


def fused_update(optimizer: Any, step: Any, gradient: Any, variable: Any, learning_rate: Any) -> bool:
    """Return False: torch updates all variables together, and XLA fuses updates."""
    return False


def on_update_step(optimizer: Any, function: Callable[..., Any], otherwise: Any, gradients: list[Any]) -> Any:
    """Return `function(gradients)`: Keras clips gradients in the branch that updates weights, and in no other."""
    return function(gradients)


def wait_for_reports() -> None:
    """Return at once: a step ends after its calls to the host."""
