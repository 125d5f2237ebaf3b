"""Run the user's own Keras callbacks in the Trainer, unchanged."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from hvdtrain.callbacks.base import Callback, Logs, RunContext

# By callback, what it held when it was first wrapped: the user's own, which no checkpoint needs. One may be wrapped
# again after it has trained: by each elastic round, and by another fit.
_given: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


class KerasStyle(Callback):
    """Calls a Keras callback's hooks with the arguments that Keras would pass.

    `model.stop_training` ends the run after the epoch. Batch hooks get no logs: to read running metrics at every step
    would make a GPU wait. Give a callback that writes files (ModelCheckpoint, CSVLogger) on rank 0 only; that is safe
    if it calls no collective.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._given = self._values()
        try:
            self._given = _given.setdefault(callback, self._given)
        except TypeError:
            pass  # it has no weak references or no hash: only this wrapper knows it

    @property
    def name(self) -> str:
        """The Keras callback's class."""
        return type(self._callback).__name__

    def state(self) -> dict[str, Any]:
        """Return what the callback has changed: numbers such as `best` and `wait`, weights such as `best_weights`.

        Options stay the user's, and so do arrays that the user gave it, such as validation data.
        """
        changed: dict[str, Any] = {}
        for name, value in self._values().items():
            given = self._given.get(name)
            if not isinstance(value, list):
                changed |= {name: value} if given != value else {}
            elif not isinstance(given, list) or list(map(id, value)) != list(map(id, given)):
                changed |= {f"{name}.{index}": array for index, array in enumerate(value)}
        return changed

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        lists: dict[str, dict[int, Any]] = {}
        for name, value in state.items():
            attribute, _, index = name.partition(".")
            if attribute in vars(self._callback) and index:
                lists.setdefault(attribute, {})[int(index)] = value
            elif attribute in vars(self._callback):
                setattr(self._callback, attribute, value)
        for attribute, arrays in lists.items():
            setattr(self._callback, attribute, [arrays[index] for index in sorted(arrays)])

    def _values(self) -> dict[str, Any]:
        """Return the callback's numbers and lists of arrays. A list is copied: it may be filled in place."""
        found: dict[str, Any] = {}
        for name, value in vars(self._callback).items():
            if name.startswith("_"):
                continue
            if isinstance(value, bool | int | float | np.generic):
                found[name] = value.item() if isinstance(value, np.generic) else value
            elif isinstance(value, list) and value and all(map(_is_numeric, value)):
                found[name] = list(value)
        return found

    def on_fit_begin(self, trainer: RunContext) -> None:
        """Call set_params, set_model and on_train_begin."""
        trainer.model.stop_training = False
        self._callback.set_params({"verbose": 0, "epochs": trainer.epochs, "steps": trainer.steps_per_epoch})
        self._callback.set_model(trainer.model)
        self._callback.on_train_begin()

    def on_epoch_begin(self, trainer: RunContext, epoch: int) -> None:
        """Call on_epoch_begin."""
        self._callback.on_epoch_begin(epoch)

    def on_step_begin(self, trainer: RunContext, step: int) -> None:
        """Call on_train_batch_begin."""
        self._callback.on_train_batch_begin(step)

    def on_step_end(self, trainer: RunContext, step: int) -> None:
        """Call on_train_batch_end."""
        self._callback.on_train_batch_end(step)

    def on_epoch_end(self, trainer: RunContext, epoch: int, logs: Logs) -> None:
        """Call on_epoch_end; stop if it has set model.stop_training."""
        self._callback.on_epoch_end(epoch, logs)
        if trainer.model.stop_training:
            trainer.stop()

    def on_fit_end(self, trainer: RunContext) -> None:
        """Call on_train_end."""
        self._callback.on_train_end()


def as_callback(callback: Any) -> Callback:
    """Return `callback` itself; a Keras callback is wrapped."""
    if isinstance(callback, Callback):
        return callback
    if hasattr(callback, "set_model") and hasattr(callback, "on_train_batch_end"):
        return KerasStyle(callback)
    raise TypeError(
        f"A callback must be a hvdtrain.callbacks.Callback or a keras.callbacks.Callback. Received: {callback!r}"
    )


def _is_numeric(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.kind in "biuf"
