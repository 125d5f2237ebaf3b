"""How gradients are reduced on each of Keras's backends.

Every module here has the same functions, on lists of that backend's tensors:

    reduce_gradients(gradients, names, variables, how)   the same gradients on every rank; names and number are equal
                                                         on all of them, also in a graph that is traced again
    true_on_all_ranks(flag, name, how)                   a boolean scalar
    new_batch_weight()                                   a BatchWeight: `set`, `read`, `multiply`
    on_update_step(optimizer, function, gradients)       function(gradients), but only where weights change
    non_finite_flags(gradients)                          a function that returns one flag a gradient, as it is now
    may_update(optimizer, gradients)                     a boolean scalar: false if weights would become non-finite
    report_unless(finite, function, *flags)              function(arrays) on the host, unless finite
    wait_for_reports()                                   returns when the host has received all reports
    run_if(finite, update, skip)                         update() or skip(), which change variables
    fused_update(optimizer, step, gradient, ...)         updates a variable in one pass; false if it cannot
    untraced(function)                                   function, left alone by the backend's compiler
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
