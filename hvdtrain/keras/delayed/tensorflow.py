"""The gradient of one step in variables: its reduction is a part of the next step's graph that depends on nothing else.

TensorFlow runs independent parts of a graph at the same time, so the reduction takes place during forward and backward.
Between steps nothing is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.keras.backends.tensorflow import reduce_unwatched, untracked, watched
from hvdtrain.keras.reduction import GradientReduction, identity

Pairs = list[tuple[Any, Any]]

_NOTHING, _OWN, _MEAN = range(3)


class InFlight:
    """See `hvdtrain.keras.delayed`. Sparse gradients become dense."""

    def __init__(self) -> None:
        with tf.device("/CPU:0"):
            self._kind = untracked(_NOTHING, tf.int64)  # of what the variables hold; equal on all ranks
        self._held: dict[int, Any] = {}  # a variable for each weight's gradient
        self._valid: set[int] = set()  # weights whose gradient was kept in the last graph that was traced, or is a mean
        self._means: list[Any] = []  # weights of these means
        self._last: tuple[list[Any], Callable[..., list[Any]]] = [], list  # weights of the last graph, their reduction
        self._reduce: Any = None  # the same reduction as a graph of its own, once it was needed

    def swap(
        self, gradients: Sequence[Any], names: Sequence[str], variables: Sequence[Any], how: GradientReduction
    ) -> tuple[list[Any], Any]:
        """Keep the gradients; return the mean of those of the step before, and False if there are none."""
        held = self._holders(variables)
        gradients = [tf.convert_to_tensor(g) for g in gradients]

        def reduce(beside: Sequence[Any] = ()) -> list[Any]:
            own = [each.read_value() for each in held]
            is_own = tf.equal(self._kind.read_value(), _OWN)

            def mean() -> list[Any]:
                if how.active():
                    return reduce_unwatched(own, names, variables, how)
                return [g * how.factor for g in own]

            def collective() -> list[Any]:  # the mean of equal means is not always equal to them
                return tf.cond(is_own, mean, lambda: [tf.identity(g) for g in own])  # type: ignore[no-any-return]

            return watched(collective, own, lambda: tuple(names), beside=beside) if how.active() else collective()

        there = self._kind.read_value() > _NOTHING
        means = reduce(gradients)
        for each, gradient in zip(held, gradients, strict=True):
            each.assign(gradient, read_value=False)
        self._kind.assign(_OWN, read_value=False)
        self._last, self._reduce = (list(variables), reduce), None
        return means, there

    def launch(self) -> None:
        """Do nothing: the reduction is a part of the next step."""

    def mean(self) -> Pairs | None:
        """Return the mean gradient, of variables; a collective."""
        if int(self._kind) == _OWN:
            variables, reduce = self._last
            if self._reduce is None:  # in a graph, which sums in the order of the step's
                self._reduce = tf.function(reduce, autograph=False).get_concrete_function()
            self.put(list(zip(variables, self._reduce(), strict=True)))
        return self.restored()

    def restored(self) -> Pairs | None:
        """Return the gradient if it is a mean already."""
        if int(self._kind) != _MEAN:
            return None
        return [(v, self._held[identity(v)].read_value()) for v in self._means]

    def put(self, pairs: Pairs | None) -> None:
        """Keep these means; None drops the gradient."""
        self._kind.assign(_NOTHING if pairs is None else _MEAN)
        if pairs is None:
            return
        self._means = [v for v, _ in pairs]
        # A weight that was frozen has no gradient.
        for each in self._held.values():
            each.assign(tf.zeros_like(each))
        for each, (_, value) in zip(self._holders(self._means), pairs, strict=True):
            each.assign(tf.cast(value, each.dtype))

    def _holders(self, variables: Sequence[Any]) -> list[Any]:
        """Return the variables that hold these weights' gradients; zeros for a weight that had none."""
        ids = [identity(v) for v in variables]
        with tf.init_scope():
            for each, variable in zip(ids, variables, strict=True):
                if each not in self._held:
                    self._held[each] = untracked(tf.zeros(variable.shape, variable.dtype), variable.dtype)
                elif each not in self._valid:
                    self._held[each].assign(tf.zeros_like(self._held[each]))
        self._valid = set(ids)
        return [self._held[each] for each in ids]
