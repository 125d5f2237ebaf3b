"""A Keras model's weights and optimizer state in flat arrays, which ranks that step alone average now and then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from hvdtrain.distributed.gradient_memory import CHANGE
from hvdtrain.distributed.recorder import recorder
from hvdtrain.distributed.world import World
from hvdtrain.keras.backends import number
from hvdtrain.keras.error_feedback import ErrorFeedback
from hvdtrain.keras.model_optimizers import all_optimizers
from hvdtrain.keras.reduction import GradientReduction, identity
from hvdtrain.keras.training_state import assign, copies, weights_by_name

Array = NDArray[Any]


class WeightAccess:
    """See `hvdtrain.adapter.WeightAccess`. Arrays are NumPy's: values pass through the host, once in many steps.

    Args:
        model: the model.
        world: the ranks.
        changes: compresses changes of the weights, if the compression has a memory.
    """

    def __init__(self, model: keras.Model, world: World, changes: ErrorFeedback | None = None) -> None:
        self._model, self._world, self._changes = model, world, changes

    def agree(self) -> None:
        """Make counters the largest of any rank, and loss scales the smallest."""
        _, counters = self._state()
        scales = [each.dynamic_scale for each in all_optimizers(self._model) if hasattr(each, "dynamic_scale")]
        sign = np.array([-1.0 if any(v is scale for scale in scales) else 1.0 for v in counters])
        mine = np.array([number(v) for v in counters]) * sign
        agreed = self._world.allreduce(mine, "max", name="weights") * sign
        dtypes = [keras.backend.standardize_dtype(v.dtype) for v in counters]
        assign(counters, [value.astype(dtype) for value, dtype in zip(agreed, dtypes, strict=True)])

    def parts(self, number: int) -> list[WeightAccess]:
        """Return a list of this object only: to divide an exchange would not make it faster."""
        return [self]

    def identities(self) -> list[int]:
        """Return the ids of the trained weights; they change when a weight is frozen or unfrozen."""
        return [id(v) for v in self._model.trainable_variables]

    def weights(self) -> list[Array]:
        """Return the weights that are trained, flat."""
        return _flat(self._model.trainable_variables)

    def set_weights(self, arrays: Sequence[Array]) -> None:
        """Replace them."""
        _unflatten(arrays, self._model.trainable_variables)

    def moments(self) -> list[Array]:
        """Return momentum, Adam's averages, moving averages of weights, flat."""
        return _flat(self._state()[0])

    def set_moments(self, arrays: Sequence[Array]) -> None:
        """Replace them."""
        _unflatten(arrays, self._state()[0])

    def mean(self, arrays: Sequence[Array], *, name: str, compression: str) -> Callable[[], list[Array]]:
        """Average over all ranks at once; Horovod cannot add up bfloat16, so of types only float16 sends less."""
        if self._changes is not None and compression == self._changes.name:
            return self._mean_of_changes(self._changes, arrays, name)
        wire = np.float16 if compression == "fp16" else None
        with recorder.waiting():
            found = [
                self._world.allreduce(each if wire is None else each.astype(wire), "mean", name=f"{name}.{index}")
                for index, each in enumerate(arrays)
            ]
        means = [mean.astype(each.dtype) for mean, each in zip(found, arrays, strict=True)]
        return lambda: means

    def _mean_of_changes(self, changes: ErrorFeedback, arrays: Sequence[Array], name: str) -> Callable[[], list[Array]]:
        names = {identity(v): f"{CHANGE}{name}" for name, v in weights_by_name(self._model).items()}
        groups = list(_groups(self._model.trainable_variables).values())
        parts = [part for array, same in zip(arrays, groups, strict=True) for part in _parts(array, same)]
        compressor = changes.of([names[identity(v)] for same in groups for v in same])
        with recorder.waiting():
            means = compressor.start(parts, name, GradientReduction())()
        for part, mean in zip(parts, means, strict=True):
            part[...] = mean
        return lambda: list(arrays)

    def to_host(self, array: Array) -> Array:
        """Return the array."""
        return array

    def from_host(self, array: Array, like: Array) -> Array:
        """Return a copy of the array."""
        return array.astype(like.dtype)

    def _state(self) -> tuple[list[Any], list[Any]]:
        """Return the optimizers' variables that have values for weights, and those that count or scale.

        Without gradients that are being accumulated, which are zeros between steps.
        """
        optimizers = all_optimizers(self._model)
        inner = [getattr(each, "inner_optimizer", each) for each in optimizers]
        sums = {id(v) for each in inner for v in getattr(each, "_accumulated_gradients", None) or ()}
        found = {id(v): v for each in optimizers for v in each.variables if id(v) not in sums}
        # Also the momentum of a scalar weight is a scalar.
        names = ("_learning_rate", "dynamic_scale")
        numbers = {id(getattr(each, name, None)) for each in [*optimizers, *inner] for name in names}
        is_moment = {i: "float" in keras.backend.standardize_dtype(v.dtype) for i, v in found.items()}
        moments = [v for i, v in found.items() if is_moment[i] and i not in numbers]
        return moments, [v for i, v in found.items() if not is_moment[i] or i in numbers]


def _groups(variables: Sequence[Any]) -> dict[str, list[Any]]:
    """Return variables by the type in which they are sent: their own, halves as float32."""
    groups: dict[str, list[Any]] = {}
    for variable in variables:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        groups.setdefault(dtype if dtype == "float64" else "float32", []).append(variable)
    return groups


def _flat(variables: Sequence[Any]) -> list[Array]:
    return [
        np.concatenate([value.reshape(-1).astype(dtype) for value in copies(same)])
        for dtype, same in _groups(variables).items()
    ]


def _unflatten(arrays: Sequence[Array], variables: Sequence[Any]) -> None:
    for array, same in zip(arrays, _groups(variables).values(), strict=True):
        assign(same, _parts(array, same))


def _parts(array: Array, variables: Sequence[Any]) -> list[Array]:
    """Return views of a flat array, of the shapes of variables."""
    ends = np.cumsum([int(np.prod(v.shape)) for v in variables])[:-1]
    return [part.reshape(v.shape) for part, v in zip(np.split(array, ends), variables, strict=True)]
