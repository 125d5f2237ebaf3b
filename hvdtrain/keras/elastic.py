"""Elastic training with Keras 3: a state that survives ranks that come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from hvdtrain.distributed.elastic import ObjectState, ShardedObjectState, State, run_fn
from hvdtrain.keras import basics, ops
from hvdtrain.keras.callbacks import Logs
from hvdtrain.keras.optimizer import distributed_part
from hvdtrain.keras.shards import Slot
from hvdtrain.keras.shards.commits import commits_of
from hvdtrain.keras.training_state import assign, build_optimizer, copies
from hvdtrain.keras.variables import broadcast_model, sync_from_jax

__all__ = [
    "CommitStateCallback", "KerasState", "ObjectState", "State", "UpdateBatchStateCallback", "UpdateEpochStateCallback",
    "run",
]  # fmt: skip


class VariablesPart:
    """The variables of a state, as `ObjectState` saves, restores and synchronizes its parts.

    `variables` returns them, and `share` gives every rank rank 0's values.
    """

    def __init__(self, variables: Callable[[], list[Any]], share: Callable[[], None]) -> None:
        self._variables, self.sync = variables, share
        self.save()

    def save(self) -> None:
        """Copy the values to host memory."""
        self._values = copies(self._variables())

    def restore(self) -> None:
        """Restore the values that were saved last."""
        assign(self._variables(), self._values)

    def reset(self) -> None:
        """Do nothing: values do not depend on the ranks there are."""


class KerasState(ShardedObjectState):
    """A model, its optimizer and further values, which an elastic run saves, restores and synchronizes.

    If the optimizer's state is in shards, `save`, `commit` and `sync` are collectives: each rank keeps its parts, and a
    copy of those of a rank on another host. `sync` then raises LostShardError, on every rank, if no rank has a part.

    Args:
        model: built keras.Model; one that is not is a ValueError.
        optimizer: None means the one it was compiled with. Built here if it is not yet.
        attributes: values to synchronize, such as epoch=0 and batch=0; they become attributes.
    """

    def __init__(self, model: Any, optimizer: Any = None, **attributes: Any) -> None:
        if not model.built:
            raise ValueError(f"{model.name} has no weights yet. Call model.build(input_shape), or fit it for one step.")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else model.optimizer
        build_optimizer(model, self.optimizer)
        sync_from_jax(model)
        self._parts = [VariablesPart(self._variables, self._share)]
        super().__init__(
            commits_of(lambda: self._of_optimizer),
            bcast_object=ops.broadcast_object,
            get_rank=basics.rank,
            **attributes,
        )

    def _share(self) -> None:
        """Give every rank rank 0's values, and compile steps again for the ranks there are now."""
        sync_from_jax(self.model)
        part = distributed_part(self.optimizer)
        if part is not None and part._hvd_how.active():
            part.agree_on_model()  # new ranks need the names under which gradients travel
            self.model.train_function = None
        broadcast_model(self.model, self.optimizer)

    def save(self) -> None:
        """Copy everything to host memory."""
        sync_from_jax(self.model)
        super().save()

    def sync(self) -> None:
        """Take rank 0's state, and save copies of it."""
        sync_from_jax(self.model)
        super().sync()

    @property
    def _of_optimizer(self) -> list[Any]:
        return [] if self.optimizer is None else list(self.optimizer.variables)

    def _variables(self) -> list[Any]:
        """Return all variables but the parts of a sharded state."""
        return [*self.model.weights, *(v for v in self._of_optimizer if not isinstance(v, Slot))]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `func(state, ...)` so that it is started again from the last commit whenever ranks come or go."""
    return run_fn(func, reset)


def reset() -> None:
    """Leave the former ranks, and join the present ranks; all of them call it."""
    basics.shutdown()
    basics.init()


class CommitStateCallback(keras.callbacks.Callback):
    """Commit `state`, a KerasState, every `batches_per_commit` batches, and after every epoch."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Logs = None) -> None:
        """Start counting: ranks that just joined start here."""
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Commit after every `batches_per_commit` batches."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.state.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Commit."""
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Count the epoch's finished batches in `state.batch`, across resets; 0 again when the epoch ends.

    `state` is a KerasState made with batch=0. After a reset, pass steps_per_epoch less `state.batch` to fit: Keras 3
    fixes the number of steps before a callback can change it.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state, self.first = state, state.batch

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Note where this part of the epoch begins: Keras counts its batches from 0."""
        self.first = self.state.batch

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Count the batch."""
        self.state.batch = self.first + batch + 1

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Start over."""
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Count finished epochs in `state.epoch`, across resets; `state` is a KerasState made with epoch=0."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state, self.initial_epoch = state, state.epoch

    def on_train_begin(self, logs: Logs = None) -> None:
        """Note where this call of fit begins: Keras counts from 0 each time."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Count the epoch."""
        self.state.epoch = self.initial_epoch + epoch + 1
