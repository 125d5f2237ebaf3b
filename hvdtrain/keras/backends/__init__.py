"""How gradients are reduced on each of Keras's backends.

Every module here has the same functions, on lists of that backend's tensors:

    reduce_gradients(gradients, names, variables, how)   the same gradients on every rank
    everywhere(flag, name, how)                          a boolean scalar: true on all ranks
    LocalWeight                                          a number that compiled steps read anew each time
    on_update_step(optimizer, function, gradients)       function(gradients), but only where weights change
    not_finite_now(gradients)                            what returns, later, a flag a gradient as it is now
    may_update(optimizer, gradients)                     a boolean scalar: no weight changes unless all are finite
    tell_unless(finite, function, *flags)                function(arrays) on the host, unless finite
    take_if(finite, take, leave)                         take() or leave(), which change variables
    wait_until_told()                                    returns when the host has heard all
    fused_update(optimizer, step, gradient, ...)         takes the step in one pass; false if it cannot
    untraced(function)                                   function, kept as it is by the backend's compiler
    refuse_compiler()                                    raises where a collective could not run
"""

from __future__ import annotations

import importlib
from typing import Any

import keras


def backend_module() -> Any:
    """Return the module here that serves Keras's backend.

    Raises:
        ValueError: Keras runs on a backend without Horovod.
    """
    name = keras.backend.backend()
    if name not in ("tensorflow", "torch", "jax"):
        raise ValueError(f'Keras must run on "tensorflow", "torch" or "jax". Received: KERAS_BACKEND={name!r}')
    return importlib.import_module(f"hvdtrain.keras.backends.{name}")
