"""Run the user's own Keras callbacks in the Trainer, unchanged."""

from __future__ import annotations

import logging
import sys
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from hvdtrain.callbacks.base import Callback, Logs, RunContext

log = logging.getLogger("hvdtrain")

# By callback, what it held when it was first wrapped: the user's own, which no checkpoint needs. One may be wrapped
# again after it has trained: by each elastic round, and by another fit.
_given: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()

# Keras's own callbacks whose only effect are files: they run on rank 0.
_WRITERS = ("CSVLogger", "ModelCheckpoint", "RemoteMonitor", "TensorBoard")

# What Keras's own callbacks count in private attributes. Others are private because they belong to one process.
_COUNTS = (
    "_batches_seen_since_last_saving",  # ModelCheckpoint
    "_last_batch_seen",
    "_ema_weights_in_model",  # SwapEMAWeights
    "_global_train_batch",  # TensorBoard
    "_global_test_batch",
)

# Keras's own callbacks that give the model other weights from on_test_begin to on_test_end.
_SWAPPERS = ("SwapEMAWeights",)

# Keras's own callbacks that set the learning rate by a plan.
_SCHEDULES = ("LearningRateScheduler",)

_STOPPED = "model.stop_training"  # among a callback's values: it ended the run


class KerasStyle(Callback):
    """Calls a Keras callback's hooks in the order and with the arguments of Keras's `fit`.

    The logs of an epoch and of a validation set are exact over all ranks. The logs of a batch are this rank's running
    results. They are read only for a callback that has a hook for the end of batches, because reading makes a GPU wait.
    `model.stop_training` on one rank ends the run on all. Keras's own callbacks that write files run on rank 0. A
    callback of yours runs on every rank.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self.sets_learning_rate = _is_kerass_own(type(callback), _SCHEDULES)
        self.swaps_weights = _is_kerass_own(type(callback), _SWAPPERS)
        self._given = self._values()
        self._trainer: RunContext | None = None
        self._is_silent = False  # another rank writes the files
        self._last_logs: Logs = {}
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
        for name, value in _changed(self._given, self._values()).items():
            if isinstance(value, list):
                changed |= {f"{name}.{index}": array for index, array in enumerate(value)}
            else:
                changed[name] = value
        if self._trainer is not None and self._trainer.model.stop_training:
            changed[_STOPPED] = True
        return changed

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        lists: dict[str, dict[int, Any]] = {}
        for name, value in state.items():
            attribute, _, index = name.partition(".")
            if attribute in self._options:  # in a checkpoint of an earlier version
                continue
            if attribute in vars(self._callback) and index:
                lists.setdefault(attribute, {})[int(index)] = value
            elif attribute in vars(self._callback):
                setattr(self._callback, attribute, value)
        for attribute, arrays in lists.items():
            setattr(self._callback, attribute, [arrays[index] for index in sorted(arrays)])
        if state.get(_STOPPED) and self._trainer is not None:
            if self._trainer.world.is_root and not self._trainer.model.stop_training:  # the first of several
                log.info("nothing is left to train: a callback had set model.stop_training when this run was saved")
            self._trainer.model.stop_training = True
            self._trainer.stop()

    @property
    def _options(self) -> tuple[str, ...]:
        """Options of the user that the callback itself changes: Keras negates min_delta once it knows the direction."""
        return ("min_delta",) if hasattr(self._callback, "monitor_op") else ()

    def _values(self) -> dict[str, Any]:
        """Return the callback's numbers and lists of arrays. A list is copied: it may be filled in place."""
        found: dict[str, Any] = {}
        for name, value in vars(self._callback).items():
            if (name.startswith("_") and name not in _COUNTS) or name in self._options:
                continue
            if isinstance(value, bool | int | float | np.generic):
                found[name] = value.item() if isinstance(value, np.generic) else value
            elif isinstance(value, list) and value and all(map(_is_numeric, value)):
                found[name] = list(value)
        return found

    def on_fit_begin(self, trainer: RunContext) -> None:
        """Call set_params, set_model and on_train_begin."""
        self._trainer, self._last_logs = trainer, {}
        self._is_silent = not trainer.world.is_root and _is_kerass_own(type(self._callback), _WRITERS)
        trainer.model.stop_training = False
        epochs = sys.maxsize if trainer.epochs is None else trainer.epochs  # which Keras's callbacks calculate with
        self._call("set_params", {"verbose": 0, "epochs": epochs, "steps": trainer.steps_per_epoch})
        self._call("set_model", trainer.model)
        before = self._values()
        self._call("on_train_begin", {})
        # What it sets there it sets in each process, such as its rank: only later changes are the run's.
        self._given.update(_changed(before, self._values()))

    def on_epoch_begin(self, trainer: RunContext, epoch: int) -> None:
        """Call on_epoch_begin."""
        self._call("on_epoch_begin", epoch, {})

    def on_step_begin(self, trainer: RunContext, step: int) -> None:
        """Call on_train_batch_begin."""
        self._call("on_train_batch_begin", step, logs={})

    def on_step_end(self, trainer: RunContext, step: int) -> None:
        """Call on_train_batch_end with this rank's running results; stop if it has set model.stop_training."""
        self._call("on_train_batch_end", step, logs=self._batch_logs("on_train_batch_end", "on_batch_end"))
        if trainer.model.stop_training:
            trainer.stop(within_epoch=True)

    def on_validation_begin(self, trainer: RunContext) -> None:
        """Call on_test_begin."""
        self._call("on_test_begin", {})

    def on_validation_step_begin(self, trainer: RunContext, step: int) -> None:
        """Call on_test_batch_begin."""
        self._call("on_test_batch_begin", step, logs={})

    def on_validation_step_end(self, trainer: RunContext, step: int) -> None:
        """Call on_test_batch_end with this rank's running results."""
        self._call("on_test_batch_end", step, logs=self._batch_logs("on_test_batch_end"))

    def on_validation_end(self, trainer: RunContext, logs: Logs) -> None:
        """Call on_test_end."""
        self._call("on_test_end", {name.removeprefix("val_"): value for name, value in logs.items()})

    def on_epoch_end(self, trainer: RunContext, epoch: int, logs: Logs) -> None:
        """Call on_epoch_end; stop if it has set model.stop_training."""
        self._last_logs = logs
        self._call("on_epoch_end", epoch, logs)
        if trainer.model.stop_training:
            trainer.stop()

    def on_fit_end(self, trainer: RunContext) -> None:
        """Call on_train_end."""
        self._call("on_train_end", self._last_logs)

    def _call(self, hook: str, *arguments: Any, **options: Any) -> None:
        if not self._is_silent:
            getattr(self._callback, hook)(*arguments, **options)

    def _batch_logs(self, *hooks: str) -> Logs:
        """Return the logs of a batch, if the callback has one of these hooks; they are empty for any other."""
        if self._trainer is None or self._is_silent:
            return {}
        own = [each for each in (getattr(self._callback, hook) for hook in hooks) if not hasattr(each, "_is_default")]
        frequencies = {getattr(self._callback, name, None) for name in ("save_freq", "update_freq")}
        if "epoch" in frequencies:  # Keras's own hook then reads nothing at the end of a batch
            own = [each for each in own if not getattr(each, "__module__", "").startswith("keras.")]
        return self._trainer.local_metrics() if own else {}


def as_callback(callback: Any) -> Callback:
    """Return `callback` itself; a Keras callback is wrapped."""
    if isinstance(callback, Callback):
        return callback
    if any(_is_kerass_own(base, ("BackupAndRestore",)) for base in type(callback).__mro__):
        raise ValueError(
            "BackupAndRestore restores weights, but not the position in the data, random states or callbacks, and each "
            "rank would write the same files. Use fit(checkpoint_dir=...), which resumes a run as if it had never "
            "stopped. Received: BackupAndRestore in callbacks"
        )
    if hasattr(callback, "set_model") and hasattr(callback, "on_train_batch_end"):
        return KerasStyle(callback)
    kind = callback if isinstance(callback, type) else type(callback)
    is_scheduler = hasattr(callback, "step") and hasattr(callback, "get_last_lr")  # torch's
    advice = f". Give hvdtrain.callbacks.Schedule({kind.__name__}(...)), which steps it" if is_scheduler else ""
    raise TypeError(
        "A callback must be a hvdtrain.callbacks.Callback or a keras.callbacks.Callback. Received: "
        f"{callback!r}{advice}"
    )


def _changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the values that are other ones than before; a list is the same one if it holds the same arrays."""

    def comparable(value: Any) -> Any:
        return list(map(id, value)) if isinstance(value, list) else value

    return {n: v for n, v in after.items() if n not in before or comparable(before[n]) != comparable(v)}


def _is_kerass_own(kind: type, names: tuple[str, ...]) -> bool:
    return kind.__module__.startswith("keras.") and kind.__name__ in names


def _is_numeric(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.kind in "biuf"
