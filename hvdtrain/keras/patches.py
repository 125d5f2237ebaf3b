"""The two places of Keras that an optimizer cannot reach from inside, opened when the first one is distributed.

Both change nothing for models and optimizers that are not distributed.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import keras

log = logging.getLogger("hvdtrain")


def patch_keras() -> None:
    """Let `LossScaleOptimizer` agree over ranks, and `Model.compile` know of distributed optimizers. Idempotent."""
    from keras.src.trainers.trainer import Trainer

    if not hasattr(keras.optimizers.LossScaleOptimizer.check_finite, "_hvdtrain"):
        _open_check_finite(keras.optimizers.LossScaleOptimizer)
    if not hasattr(Trainer.compile, "_hvdtrain"):
        _open_compile(Trainer)


def _open_check_finite(loss_scale_optimizer: Any) -> None:
    original = loss_scale_optimizer.check_finite

    @functools.wraps(original)
    def check_finite(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        agree = getattr(self.inner_optimizer, "finite_everywhere", None)
        # Ranks must agree to skip: the one that skips sends nothing, and the others would wait for it.
        if agree is not None:
            finite = agree(finite)
            self.inner_optimizer.report_scaling(finite, grads)
        return finite

    check_finite._hvdtrain = True  # type: ignore[attr-defined]
    loss_scale_optimizer.check_finite = check_finite


def _open_compile(trainer: Any) -> None:
    original = trainer.compile

    @functools.wraps(original)
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Horovod's documentation told everybody to pass this; Keras 3 no longer has it, and no longer needs it.
        kwargs.pop("experimental_run_tf_function", None)
        result = original(self, *args, **kwargs)
        without_xla(self)
        return result

    compile._hvdtrain = True  # type: ignore[attr-defined]
    trainer.compile = compile


def without_xla(model: Any) -> None:
    """Turn XLA (TensorFlow) or torch.compile (torch) off for a model whose optimizer is distributed, and say so."""
    from hvdtrain.keras.optimizer import distributed_part

    if keras.backend.backend() == "jax" or not getattr(model, "jit_compile", False):
        return
    if distributed_part(model.optimizer) is None:
        return
    model.jit_compile = False
    log.info("jit_compile %s: Horovod's operations do not compile with the step of %s", "True -> False", model.name)
