"""The two places of Keras that an optimizer cannot change from inside, patched when the first one is distributed.

Neither patch changes anything for models and optimizers that are not distributed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import keras

from hvdtrain.keras.optimizer import distributed_part

log = logging.getLogger("hvdtrain")


@functools.cache  # once a process
def patch_keras() -> None:
    """Let `LossScaleOptimizer` agree over ranks, and `Model.compile` know of distributed optimizers."""
    from keras.src.trainers.trainer import Trainer

    _patch(keras.optimizers.LossScaleOptimizer, "check_finite", _check_finite)
    _patch(Trainer, "compile", _compile)


def _patch(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, self, *args, **kwargs)

    setattr(owner, name, patched)


def _check_finite(original: Callable[..., Any], self: Any, grads: Any) -> Any:
    finite = original(self, grads)
    part = distributed_part(self)
    # Ranks must agree to skip: a rank that skips sends nothing, and the others would wait for it.
    return finite if part is None else part.finite_everywhere(finite, grads)


def _compile(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    # Horovod's documentation has this argument; Keras 3 no longer has it and does not need it.
    kwargs.pop("experimental_run_tf_function", None)
    original(self, *args, **kwargs)
    without_xla(self)


def without_xla(model: Any) -> None:
    """Turn XLA (TensorFlow) or torch.compile (torch) off for a model whose optimizer is distributed, and log it."""
    if keras.backend.backend() == "jax" or not getattr(model, "jit_compile", False):
        return
    if distributed_part(model.optimizer) is not None:
        model.jit_compile = False
        log.info("jit_compile True -> False: Horovod's operations do not compile with the step of %s", model.name)
