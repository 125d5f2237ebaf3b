"""Compression with error feedback: what a gradient has left out is added to the next gradient of its weight.

The torch backend uses the compressors of `hvdtrain.torch`. For TensorFlow and JAX `schemes` has the same formulas in
NumPy: gradients pass through the host. Both modules, `torch` and `host`, have the functions

    compressor_of(scheme)                               what compresses, and holds `memory`, a `Memory`
    start(compressor, gradients, names, name, how)      starts a mean over ranks; returns a function that waits for it
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
from numpy.typing import NDArray

from hvdtrain.distributed.compression import Scheme
from hvdtrain.keras.reduction import Compressor, GradientReduction


class ErrorFeedback(Compressor):
    """A scheme with the memory of one optimizer, for the gradients of some of its weights.

    A step's changes of the memory are kept when the next step begins, unless `refuse` was called before: so a compiled
    step need not say that it was taken.

    Args:
        scheme: equal on all ranks.
        names: of the weights, in the order of the gradients.
        shared: what compresses, to share its memory.
        on_host: True if arrays are NumPy's on each backend.
    """

    def __init__(self, scheme: Scheme, names: Sequence[str] = (), shared: Any = None, *, on_host: bool = False) -> None:
        self.scheme: Scheme = scheme
        self.name, self._names, self._on_host = str(scheme), tuple(names), on_host
        self._module = _module(on_host=on_host)
        self._compressor = self._module.compressor_of(scheme) if shared is None else shared

    @property
    def nbytes(self) -> int:
        """The bytes that it remembers."""
        return int(self._compressor.memory.nbytes)

    def of(self, names: Sequence[str]) -> ErrorFeedback:
        """Return a compressor for gradients of these weights, with the same memory."""
        self.know(names)
        return ErrorFeedback(self.scheme, names, self._compressor, on_host=self._on_host)

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, str | None]:
        """Return `tensor` as float32 or float64, in which errors are computed, and its dtype; None if that is it."""
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if dtype in ("float32", "float64"):
            return tensor, None
        return keras.ops.cast(tensor, "float32"), dtype

    def start(self, gradients: Sequence[Any], name: str, how: GradientReduction) -> Callable[[], list[Any]]:
        """Start to average gradients of all ranks; return a function that waits for the means, in their types.

        Exchanges follow one another: the next one starts after the wait for this one.

        Args:
            gradients: float32 or float64; the torch backend's tensors, or arrays on the host. They are not changed.
            name: of the collectives.
            how: the operation and its factors.
        """
        self._compressor.memory.commit()
        matrices = [g.reshape(matrix_shape(g.shape)) for g in gradients]
        wait = self._module.start(self._compressor, matrices, self._names, name, how)
        return lambda: [mean.reshape(g.shape) for mean, g in zip(wait(), gradients, strict=True)]

    def know(self, names: Iterable[str]) -> None:
        """Let `load` restore the errors of these weights, too."""
        self._compressor.memory.know(names)

    def refuse(self) -> None:
        """Undo the last exchange's changes of the memory: all ranks have refused the step."""
        self._compressor.memory.rollback()

    def reset(self) -> None:
        """Forget everything: ranks begin together, perhaps others than before."""
        self._compressor.memory.reset()

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what this rank remembers, named as in `rank_state`; between steps."""
        self._compressor.memory.commit()
        state: dict[str, NDArray[Any]] = self._compressor.memory.state()
        return state

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore what `state` returned, as far as it is there, for the weights that are known."""
        self._compressor.memory.load(arrays)


def matrix_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape (rows, columns) in which a gradient is compressed; that of a vector or a number as it is.

    The dimensions are divided where rows and columns are most even. Keras's kernels have their inputs first: a
    convolution's (3, 3, 64, 128) becomes (576, 128).
    """
    shape = tuple(shape)
    if len(shape) < 2:
        return shape
    cuts = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape))]
    return min(cuts, key=sum)


def _module(*, on_host: bool) -> Any:
    """Return the module here that serves NumPy's arrays, or Keras's backend."""
    name = "host" if on_host or keras.backend.backend() != "torch" else "torch"
    return importlib.import_module(f"hvdtrain.keras.error_feedback.{name}")
