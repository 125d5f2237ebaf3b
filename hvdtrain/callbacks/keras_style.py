"""Let the user's own Keras callbacks run in the Trainer's loop, unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hvdtrain.callbacks.base import Callback, Logs

if TYPE_CHECKING:
    from hvdtrain.trainer import Trainer


class KerasStyle(Callback):
    """Calls a Keras callback's hooks with what Keras would pass it.

    `model.stop_training` ends the run after the epoch. Batch hooks get no logs: reading running metrics at every step
    would make a GPU wait. A callback that writes files (ModelCheckpoint, CSVLogger) is the user's to guard: give it on
    rank 0 alone, which is safe as long as it calls no collective.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._given = self._numbers()

    @property
    def name(self) -> str:
        """The Keras callback's class."""
        return type(self._callback).__name__

    def state(self) -> dict[str, Any]:
        """Return what the callback has changed: numbers such as `best` and `wait`, weights such as `best_weights`.

        Options stay the user's.
        """
        numbers = {name: value for name, value in self._numbers().items() if self._given.get(name) != value}
        return numbers | {
            f"{name}.{index}": array
            for name, value in vars(self._callback).items()
            if not name.startswith("_") and isinstance(value, list)
            if all(isinstance(array, np.ndarray) for array in value)
            for index, array in enumerate(value)
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Set them again."""
        lists: dict[str, dict[int, Any]] = {}
        for name, value in state.items():
            attribute, _, index = name.partition(".")
            if attribute not in vars(self._callback):
                continue
            if index:
                lists.setdefault(attribute, {})[int(index)] = value
            else:
                setattr(self._callback, attribute, value)
        for attribute, arrays in lists.items():
            setattr(self._callback, attribute, [arrays[index] for index in sorted(arrays)])

    def _numbers(self) -> dict[str, Any]:
        return {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in vars(self._callback).items()
            if not name.startswith("_") and isinstance(value, bool | int | float | np.generic)
        }

    def on_fit_begin(self, trainer: Trainer) -> None:
        """Give the callback its model and parameters, then on_train_begin."""
        trainer.model.stop_training = False
        self._callback.set_params({"verbose": 0, "epochs": trainer.epochs, "steps": trainer.steps_per_epoch})
        self._callback.set_model(trainer.model)
        self._callback.on_train_begin()

    def on_epoch_begin(self, trainer: Trainer, epoch: int) -> None:
        """Pass on."""
        self._callback.on_epoch_begin(epoch)

    def on_step_begin(self, trainer: Trainer, step: int) -> None:
        """Pass on as on_train_batch_begin."""
        self._callback.on_train_batch_begin(step)

    def on_step_end(self, trainer: Trainer, step: int) -> None:
        """Pass on as on_train_batch_end."""
        self._callback.on_train_batch_end(step)

    def on_epoch_end(self, trainer: Trainer, epoch: int, logs: Logs) -> None:
        """Pass on, then heed model.stop_training."""
        self._callback.on_epoch_end(epoch, logs)
        if trainer.model.stop_training:
            trainer.stop()

    def on_fit_end(self, trainer: Trainer) -> None:
        """Pass on as on_train_end."""
        self._callback.on_train_end()


def as_callback(callback: Any) -> Callback:
    """Return `callback` itself, or a Keras callback made to fit.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(callback, Callback):
        return callback
    if hasattr(callback, "set_model") and hasattr(callback, "on_train_batch_end"):
        return KerasStyle(callback)
    raise TypeError(
        f"A callback must be a hvdtrain.callbacks.Callback or a keras.callbacks.Callback. Received: {callback!r}"
    )
