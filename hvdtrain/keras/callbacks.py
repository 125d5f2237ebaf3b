"""Keras callbacks for training on several ranks: broadcast at the start, averaged metrics, learning rate warmup."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import keras

from hvdtrain.distributed import world
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.keras.backends import number
from hvdtrain.keras.training_state import build_optimizer
from hvdtrain.keras.variables import broadcast_model, sync_from_jax
from hvdtrain.system import scratch

Logs = dict[str, Any] | None


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Give every rank the root's weights and optimizer state as training begins.

    Random seeds and metric counts are not broadcast. The optimizer is built first, on every rank, so that a
    checkpoint that only the root has loaded reaches the others with all its state.

    Args:
        root_rank: rank whose values all ranks get.
        device: TensorFlow device; values travel through the host, so it must be empty.
        local_variables: a variable or several that are not broadcast.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        _refuse(device)
        self.root_rank, self.broadcast_done = root_rank, False
        several = isinstance(local_variables, Iterable) and not hasattr(local_variables, "assign")
        self._local_variables = [v for v in (local_variables if several else [local_variables]) if v is not None]

    def register_local_var(self, var: Any) -> None:
        """Leave `var` to each rank."""
        self._local_variables.append(var)

    def on_train_begin(self, logs: Logs = None) -> None:
        """Broadcast, if the model has its variables already."""
        if self.model.built and self.model.weights:
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Broadcast after the first step, if the model had no variables before it."""
        self._broadcast()

    def _broadcast(self) -> None:
        if self.broadcast_done:
            return
        sync_from_jax(self.model)
        build_optimizer(self.model)
        broadcast_model(self.model, None, self.root_rank, self._local_variables)
        self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):
    """Replace every metric in an epoch's logs by its mean over ranks, for later callbacks and for History.

    Put it before ReduceLROnPlateau, EarlyStopping, ModelCheckpoint or TensorBoard. If only some ranks have a metric, it
    is averaged over these.

    Args:
        device: TensorFlow device; numbers travel through the host, so it must be empty.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        _refuse(device)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Average `logs` in place, in one exchange."""
        ranks = DataRanks(world.current())
        if ranks.size == 1:
            return
        logs = {} if logs is None else logs
        mine: dict[str, float] = {}
        for name, value in sorted(logs.items()):
            with contextlib.suppress(TypeError, ValueError):  # no number
                mine[name] = float(value)
        # Names and values in one message: ranks with different names would otherwise wait for each other forever.
        logs_of_ranks = ranks.allgather_object(mine, name="logs")
        for name in sorted({name for values in logs_of_ranks for name in values}):
            values = [v[name] for v in logs_of_ranks if name in v]
            logs[name] = math.fsum(values) / len(values) if all(map(math.isfinite, values)) else sum(values)


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Set the learning rate to `initial_lr * multiplier` between two epochs.

    Args:
        initial_lr: learning rate that the multiplier multiplies.
        multiplier: function of the epoch; or a number m, which stands for m ** (epoch - start_epoch).
        start_epoch: first epoch that is adjusted, counted from 0.
        end_epoch: first epoch that no longer is; None for all.
        staircase: adjust at the first batch of every epoch; False: at every batch, with a fractional epoch.
        momentum_correction: when the rate changes, multiply momentum buffers, which contain the rate, by new / old rate
            (Goyal et al. 2017, "Accurate, Large Minibatch SGD").
        steps_per_epoch: batches an epoch; read from Keras if left out, or a ValueError if Keras does not know it.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr must be the learning rate at the start. Received: None")
        self.initial_lr = initial_lr
        self.multiplier = multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0

    def on_train_begin(self, logs: Logs = None) -> None:
        """Read the number of steps from Keras, if it is needed."""
        if self.staircase or self.steps_per_epoch:
            return
        steps = (self.params or {}).get("steps")
        if not steps:
            raise ValueError(f"Keras does not know an epoch's steps: pass steps_per_epoch. Received: steps={steps}")
        self.steps_per_epoch = int(steps)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Note the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Adjust the learning rate, from `start_epoch` to `end_epoch`."""
        if not self.start_epoch <= self.current_epoch < (self.end_epoch or math.inf) or (self.staircase and batch):
            return
        self._adjust(self.current_epoch + (0 if self.staircase else batch / float(self.steps_per_epoch or 1)))

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Add the learning rate to the logs, as "lr"."""
        if logs is not None:
            logs["lr"] = number(self.model.optimizer.learning_rate)

    def _adjust(self, epoch: float) -> None:
        sync_from_jax(self.model)
        optimizer = self.model.optimizer
        old, new = number(optimizer.learning_rate), self.initial_lr * self.multiplier(epoch)
        if new == old:
            return
        optimizer.learning_rate = new
        if self.momentum_correction and old > 0:
            # Keras compiles `momentum` into the step; to scale the buffers once has the same effect.
            for buffer in _momentum_buffers(getattr(optimizer, "inner_optimizer", optimizer)):
                buffer.assign(buffer * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raise the learning rate from `initial_lr / size` to `initial_lr` over the first epochs, batch by batch.

    lr(epoch) = initial_lr / size * (epoch * (size - 1) / warmup_epochs + 1): Goyal et al. 2017.

    Args:
        initial_lr: learning rate after the warmup, already scaled for all ranks.
        warmup_epochs: length of the warmup.
        momentum_correction: see `LearningRateScheduleCallback`.
        steps_per_epoch: batches an epoch; read from Keras if left out.
        verbose: 1 prints a line on rank 0 when the warmup ends.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # One step ahead, so that the last batch of the warmup has the full rate.
            epoch += 1.0 / float(self.steps_per_epoch or 1)
            size = DataRanks(world.current()).size
            return 1.0 / size * (epoch * (size - 1) / warmup_epochs + 1)

        options: dict[str, Any] = {"momentum_correction": momentum_correction, "steps_per_epoch": steps_per_epoch}
        super().__init__(initial_lr, multiplier, end_epoch=warmup_epochs, staircase=False, **options)
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Add the learning rate to the logs, and print a line when the warmup ends."""
        super().on_epoch_end(epoch, logs)
        if epoch == (self.end_epoch or 0) - 1 and self.verbose > 0 and world.current().is_root:
            print(f"\nEpoch {epoch + 1}: learning rate warmup ended at {number(self.model.optimizer.learning_rate):g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Save the best model so far in one file, written by rank 0.

    Args:
        monitor: metric by which models are compared; averaged over ranks if MetricAverageCallback comes first.
        verbose: as in keras.callbacks.ModelCheckpoint.
        save_weights_only: write ".weights.h5" instead of ".keras".
        mode: "auto", "min" or "max".
        save_freq: "epoch", or a number of batches.
        filepath: path of the file; may be set later, as attribute `filepath`. By default best.keras or best.weights.h5.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | None = None,
    ) -> None:
        filepath = filepath or ("best.weights.h5" if save_weights_only else "best.keras")
        options = {"save_weights_only": save_weights_only, "mode": mode, "save_freq": save_freq}
        super().__init__(filepath, monitor, verbose, save_best_only=True, **options)

    def _save_model(self, epoch: int, batch: int | None, logs: Logs) -> None:
        if world.current().is_root and not scratch.is_on():  # several writers would tear the file
            super()._save_model(epoch, batch, logs)


def _refuse(device: str) -> None:
    if device:
        raise ValueError(f"Values travel through the host; leave device out. Received: device={device!r}")


def _momentum_buffers(optimizer: Any) -> list[Any]:
    """Return the buffers that accumulate learning rate times gradient: SGD and RMSprop with momentum have them."""
    for kind, name in ((keras.optimizers.SGD, "momentums"), (keras.optimizers.RMSprop, "_momentums")):
        if isinstance(optimizer, kind) and optimizer.built and optimizer.momentum:
            return [b for b in getattr(optimizer, name) if b is not None]
    return []
