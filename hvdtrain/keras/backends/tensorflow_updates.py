"""Weight updates on TensorFlow with one operation per variable.

Keras writes an update as arithmetic operations, which XLA fuses. But XLA does not compile a step with Horovod's
operations. Without XLA, each operation of an update reads and writes whole variables: 17 of an MLP's 53 ms with SGD,
46 ms with Adam. TensorFlow has kernels for the usual optimizers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

Tensor = Any


def fused_update(
    optimizer: Any, step: Callable[..., None], gradient: Tensor, variable: Any, learning_rate: Any
) -> bool:
    """Update `variable` and its slots in one pass, if TensorFlow has an operation for the rule of `step`.

    That is the optimizer's `update_step`, if it is that of Keras's SGD or Adam. Return whether there was one; if not,
    nothing has changed.
    """
    # Keyed by the method: AdamW has Adam's, and a user's subclass with another `update_step` is not changed.
    rule = getattr(step, "__func__", step)
    if rule is keras.optimizers.SGD.update_step:
        kinds = [optimizer.momentums] if optimizer.momentum else []
    elif rule is keras.optimizers.Adam.update_step and not optimizer.amsgrad:
        kinds = [optimizer._momentums, optimizer._velocities]
    else:
        return False
    position = optimizer._get_variable_index(variable)
    plain: list[Any] = [_plain(v) for v in (variable, *(kind[position] for kind in kinds))]
    if any(p is None for p in plain) or len({p.dtype for p in plain}) > 1 or not isinstance(gradient, tf.Tensor):
        return False

    def number(value: Any) -> Tensor:
        return keras.ops.cast(value, plain[0].dtype.name)

    target, *slots = (p.handle for p in plain)
    rate, gradient = number(learning_rate), number(gradient)
    if rule is keras.optimizers.Adam.update_step:
        steps = number(optimizer.iterations + 1)
        beta_1, beta_2 = number(optimizer.beta_1), number(optimizer.beta_2)
        tf.raw_ops.ResourceApplyAdam(
            var=target,
            m=slots[0],
            v=slots[1],
            beta1_power=tf.pow(beta_1, steps),
            beta2_power=tf.pow(beta_2, steps),
            lr=rate,
            beta1=beta_1,
            beta2=beta_2,
            epsilon=number(optimizer.epsilon),
            grad=gradient,
            use_locking=True,
        )
    elif slots:
        tf.raw_ops.ResourceApplyKerasMomentum(
            var=target,
            accum=slots[0],
            lr=rate,
            grad=gradient,
            momentum=number(optimizer.momentum),
            use_locking=True,
            use_nesterov=optimizer.nesterov,
        )
    else:
        tf.raw_ops.ResourceApplyGradientDescent(var=target, alpha=rate, delta=gradient, use_locking=True)
    return True


def _plain(variable: Any) -> Any | None:
    """Return the tf.Variable of `variable`; None where tf.distribute has several of it, or the dtype is narrow."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    plain = isinstance(value, tf.Variable) and not tf.distribute.has_strategy() and hasattr(value, "handle")
    return value if plain and value.dtype in (tf.float32, tf.float64) else None
