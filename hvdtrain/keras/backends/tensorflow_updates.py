"""Weight updates on TensorFlow with one operation per variable.

Keras writes an update as arithmetic operations, which XLA fuses. But XLA does not compile a step with Horovod's
operations. Without XLA, each operation of an update reads and writes whole variables: 17 of an MLP's 53 ms with SGD,
46 ms with Adam. TensorFlow has kernels for the usual optimizers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

Tensor = Any


def fused_update(
    optimizer: Any, step: Callable[..., None], gradient: Tensor, variable: Any, learning_rate: Any
) -> bool:
    """Update `variable` and its slots in one pass, if TensorFlow has an operation for the rule of `step`.

    Args:
        optimizer: a built Keras optimizer.
        step: its `update_step`; other rules than those of Keras's SGD and Adam are left to it.
        gradient: of `variable`.
        variable: a Keras or TensorFlow variable.
        learning_rate: scalar.

    Returns:
        Whether `variable` was updated; if not, nothing has changed.
    """
    rule = _RULES.get(getattr(step, "__func__", step))
    target = _plain(variable)
    if rule is None or target is None or not isinstance(gradient, tf.Tensor):
        return False
    position = optimizer._get_variable_index(variable)
    number = functools.partial(keras.ops.cast, dtype=target.dtype.name)
    return rule(optimizer, target, position, number(gradient), number(learning_rate), number)


def _plain(variable: Any) -> Any | None:
    """Return the tf.Variable of `variable`; None where tf.distribute has several of it, or the dtype is narrow."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    plain = isinstance(value, tf.Variable) and not tf.distribute.has_strategy() and hasattr(value, "handle")
    return value if plain and value.dtype in (tf.float32, tf.float64) else None


# A rule takes the optimizer, the tf.Variable, its position, gradient and learning rate, and a function that casts to
# the variable's dtype; it returns whether it updated the variable.


def _sgd(optimizer: Any, target: Any, position: int, gradient: Tensor, rate: Tensor, number: Any) -> bool:
    if optimizer.momentum == 0:
        tf.raw_ops.ResourceApplyGradientDescent(var=target.handle, alpha=rate, delta=gradient, use_locking=True)
        return True
    slot = _plain(optimizer.momentums[position])
    if slot is None or slot.dtype != target.dtype:
        return False
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=target.handle,
        accum=slot.handle,
        lr=rate,
        grad=gradient,
        momentum=number(optimizer.momentum),
        use_locking=True,
        use_nesterov=optimizer.nesterov,
    )
    return True


def _adam(optimizer: Any, target: Any, position: int, gradient: Tensor, rate: Tensor, number: Any) -> bool:
    slots = [_plain(kind[position]) for kind in (optimizer._momentums, optimizer._velocities)]
    if optimizer.amsgrad or any(slot is None or slot.dtype != target.dtype for slot in slots):
        return False
    first, second = slots
    steps = number(optimizer.iterations + 1)
    tf.raw_ops.ResourceApplyAdam(
        var=target.handle,
        m=first.handle,  # type: ignore[union-attr]
        v=second.handle,  # type: ignore[union-attr]
        beta1_power=tf.pow(number(optimizer.beta_1), steps),
        beta2_power=tf.pow(number(optimizer.beta_2), steps),
        lr=rate,
        beta1=number(optimizer.beta_1),
        beta2=number(optimizer.beta_2),
        epsilon=number(optimizer.epsilon),
        grad=gradient,
        use_locking=True,
    )
    return True


# Keyed by the method: AdamW has Adam's, and a user's subclass with another `update_step` is not changed.
_RULES: dict[Any, Callable[..., bool]] = {
    keras.optimizers.SGD.update_step: _sgd,
    keras.optimizers.Adam.update_step: _adam,
}
