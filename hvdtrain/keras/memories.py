"""What is remembered of a model's gradients, and of changes of its weights, by compression with error feedback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
from numpy.typing import NDArray

from hvdtrain.distributed.gradient_memory import CHANGE
from hvdtrain.keras.backends import backend_module
from hvdtrain.keras.error_feedback import ErrorFeedback
from hvdtrain.keras.model_optimizers import other_optimizers
from hvdtrain.keras.optimizer import distributed_part
from hvdtrain.keras.reduction import identity, resolve
from hvdtrain.keras.training_state import weights_by_name


class Memories:
    """The memories of a model's optimizers, and one of changes of its weights; none without error feedback.

    Attributes:
        changes: compresses what ranks that step alone exchange; None without error feedback.
    """

    def __init__(self, model: keras.Model, parts: Sequence[Any], compression: str) -> None:
        self._model, self._parts = model, parts
        scheme = resolve(compression).scheme
        self.changes = None if scheme is None else ErrorFeedback(scheme, on_host=True)

    def __bool__(self) -> bool:
        return bool(self._found)

    @property
    def _found(self) -> list[ErrorFeedback]:
        found = [part._hvd_memory for part in self._parts] + [self.changes]
        return [memory for memory in found if memory is not None]

    def name_weights(self) -> None:
        """Name the weights of a built model as checkpoints do: another process may number them otherwise."""
        weights = weights_by_name(self._model).items()
        if self.changes is not None:
            self.changes.know(f"{CHANGE}{name}" for name, _ in weights)
        for prefix, each in {"": self._model.optimizer, **other_optimizers(self._model)}.items():
            part: Any = distributed_part(each)
            part._hvd_name_weights({identity(v): f"{prefix}.{name}".lstrip(".") for name, v in weights})

    def state(self) -> dict[str, NDArray[Any]]:
        """Return what this rank remembers, named as in `rank_state`, when no exchange is in flight."""
        if self:
            backend_module().wait_for_reports()
        return {name: array for memory in self._found for name, array in memory.state().items()}

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore what `state` returned, as far as it is there."""
        for memory in self._found:
            memory.load(arrays)

    def reset(self) -> None:
        """Forget everything, when no exchange is in flight."""
        for memory in self._found:
            memory.reset()
