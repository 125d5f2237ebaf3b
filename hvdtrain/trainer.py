"""The one loop that every framework shares.

The Trainer decides what happens and when: epochs, steps, learning rate, metrics, checkpoints, callbacks. `data` says
which samples a step holds, an adapter how a framework takes the step, World who the ranks are. Nothing here asks
which framework it has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain import agreement, checkpoint, learning_rate
from hvdtrain import resume as progress_of
from hvdtrain.adapter import Options, State, adapter_for, framework_of
from hvdtrain.callbacks.base import CallbackList
from hvdtrain.callbacks.keras_style import as_callback
from hvdtrain.callbacks.progress import ProgressLine
from hvdtrain.data import Batch, IndexedSource, Source, as_source, leaves, rebuild, tree_map
from hvdtrain.errors import HvdTrainError
from hvdtrain.world import SoloWorld, World, init

log = logging.getLogger("hvdtrain")

PRECISIONS = ("fp32", "bf16", "fp16")
COMPRESSIONS = ("none", "fp16", "bf16")


class History(dict[str, list[float]]):
    """A metric's name -> one float an epoch, equal on every rank.

    Besides the metrics it holds "samples_per_s", over all ranks, and "seconds", the slowest rank's training time.
    """

    def add(self, logs: dict[str, float]) -> None:
        """Append one epoch."""
        for name, value in logs.items():
            self.setdefault(name, []).append(float(value))


class Trainer:
    """Trains a torch.nn.Module or a keras.Model on all ranks.

    Every rank constructs it alike; weights and optimizer state are rank 0's from then on, and again when `fit` begins.
    Call `hvdtrain.init()` before making the model, so that it is made on this rank's GPU.

    Args:
        model: the model.
        optimizer: the framework's own optimizer over the model's parameters, or a Keras name. None for a Keras model
            that is already compiled.
        loss: the framework's own loss, a callable (outputs, targets) -> mean over the batch, or a Keras name.
        metrics: names ("accuracy") or the framework's own metrics; for torch also callables
            (outputs, targets) -> one value a sample.
        lr_scaling: "none", "linear" or "sqrt" in the number of ranks. Never applied unasked.
        warmup_epochs: epochs over which the learning rate ramps up, step by step.
        accumulate: batches whose gradients make one optimizer step.
        clip_norm: largest global norm of the reduced gradient; None for no clipping.
        precision: "fp32", "bf16" or "fp16" (with loss scaling) for the forward and backward pass.
        compression: "none", "fp16" or "bf16" for gradients on the wire.
        seed: order of the samples; equal on all ranks; by default `hvdtrain.init`'s, else 0. No framework's random
            state is touched.

    Attributes:
        model: as given.
        world: the ranks.
        history: what the current or last `fit` has recorded so far.
        epochs: how many epochs the current fit has.
        steps_per_epoch: optimizer steps, where known beforehand.

    Raises:
        ValueError: an option outside its range; a model without trainable parameters; an optimizer over others.
        TypeError: the model is of no known framework.
        DesyncError: the ranks' models differ; names the first parameter.
    """

    def __init__(
        self,
        model: Any,
        *,
        optimizer: Any = None,
        loss: Any = None,
        metrics: Sequence[Any] = (),
        lr_scaling: str = "none",
        warmup_epochs: float = 0,
        accumulate: int = 1,
        clip_norm: float | None = None,
        precision: str = "fp32",
        compression: str = "none",
        seed: int | None = None,
    ) -> None:
        _check_choice("precision", precision, PRECISIONS)
        _check_choice("compression", compression, COMPRESSIONS)
        _check_positive("accumulate", accumulate, int)
        if clip_norm is not None:
            _check_positive("clip_norm", clip_norm, float)
        learning_rate.check_options(lr_scaling, warmup_epochs)
        self.model = model
        self.world: World = init(framework_of(model))
        self.history = History()
        self.epochs = 0
        self.steps_per_epoch: int | None = None
        seed = int((self.world.seed or 0) if seed is None else seed)
        if seed < 0:
            raise ValueError(f"seed must be >= 0. Received: seed={seed}")
        self._config: dict[str, Any] = {
            "lr_scaling": lr_scaling, "warmup_epochs": float(warmup_epochs), "accumulate": int(accumulate),
            "clip_norm": clip_norm if clip_norm is None else float(clip_norm), "precision": precision,
            "compression": compression, "seed": seed,
        }  # fmt: skip
        agreement.require_equal(self._config, world=self.world, what="the Trainer's options")
        self._accumulate, self._seed = accumulate, seed
        self._adapter = adapter_for(
            model,
            optimizer=optimizer,
            loss=loss,
            metrics=metrics,
            options=Options(accumulate, clip_norm, precision, compression),
            world=self.world,
        )
        self._lr = learning_rate.LearningRate(
            self._adapter.learning_rates, scaling=lr_scaling, size=self.world.size, warmup_epochs=warmup_epochs
        )
        self._epochs_done = 0
        self._loaded = False  # a checkpoint, from which the next fit goes on
        self._in_epoch = False
        self._stop = False
        self._adapter.start()  # so that evaluate and predict, too, run one model and not each rank's own

    def fit(
        self,
        train: Any,
        *,
        validation: Any = None,
        epochs: int = 1,
        batch_size: int = 32,
        callbacks: Sequence[Any] = (),
        checkpoint_dir: str | None = None,
        resume: str = "auto",
        progress: bool = True,
    ) -> History:
        """Train, and return the metrics of each epoch.

        It begins with epoch 0, and goes on from a checkpoint only after `load` or with `checkpoint_dir`; weights and
        optimizer state are those the model has.

        Args:
            train: data, as `hvdtrain.data.as_source` describes; all ranks give the same and share it out.
            validation: data of the same kind, evaluated after each epoch into "val_" metrics.
            epochs: how many there are in all, those before a resumed checkpoint included.
            batch_size: samples a rank takes in a step; an optimizer step sees batch_size * size * accumulate.
            callbacks: `hvdtrain.callbacks` and, for a Keras model, Keras's own.
            checkpoint_dir: where a checkpoint is written after each epoch.
            resume: "auto" goes on from the newest whole checkpoint in checkpoint_dir; "never" starts anew, and moves
                those that are there into a folder "old-1", "old-2", ... beside the new ones.
            progress: print a line an epoch on rank 0.

        Raises:
            ValueError: no data, or an option outside its range.
            DesyncError: ranks were given different data or options, or ended with different weights.
        """
        _check_positive("epochs", epochs, int)
        _check_choice("resume", resume, ("auto", "never"))
        source = self._source(train, batch_size)
        batch_size, epochs = int(batch_size), int(epochs)
        held_out = None if validation is None else self._source(validation, batch_size)
        self.epochs = epochs
        self.steps_per_epoch = None if source.steps is None else -(-source.steps // self._accumulate)
        self._check_agreement(held_out, batch_size=batch_size)
        if checkpoint_dir and resume == "never":
            progress_of.set_aside(checkpoint_dir, world=self.world)
        elif checkpoint_dir and (newest := progress_of.newest_whole(checkpoint_dir, world=self.world)):
            self._restore(newest)
        if not self._loaded:
            self._epochs_done, self.history = 0, History()
        self._loaded, self._stop = False, False
        hooks = CallbackList([as_callback(each) for each in callbacks] + [ProgressLine()] * progress)
        self._adapter.start()
        if self.world.is_root:
            self._lr.announce(batch_size=batch_size, accumulate=self._accumulate)
        hooks.on_fit_begin(self)
        for epoch in range(self._epochs_done, epochs):
            if self.world.allreduce(np.array([self._stop], np.int32), "max", name="stop")[0]:
                break
            logs = self._run_epoch(source, held_out, epoch, hooks)
            self.history.add(logs)
            self._epochs_done = epoch + 1
            hooks.on_epoch_end(self, epoch, logs)
            if checkpoint_dir:
                self._save(checkpoint.epoch_directory(checkpoint_dir, epoch + 1))
        hooks.on_fit_end(self)
        if self.world.size > 1:
            agreement.require_equal_state(self._adapter.state(), world=self.world)
        return self.history

    def evaluate(self, data: Any, *, batch_size: int = 32) -> dict[str, float]:
        """Return the loss and metrics over all of `data`: exact over all ranks, no sample counted twice.

        A collective call: every rank makes it and gets the same numbers.

        Raises:
            HvdTrainError: it was called within an epoch of `fit`.
        """
        if self._in_epoch:
            raise HvdTrainError(
                "evaluate() was called in the middle of a training epoch, whose metrics it would mix with its own. "
                "Call it in on_epoch_end, or after fit."
            )
        return self._evaluate(self._source(data, batch_size))

    def predict(self, x: Any, *, batch_size: int = 32) -> Any:
        """Return the model's outputs for all of `x`, in input order, on every rank: arrays of shape (len(x), ...).

        Raises:
            TypeError: `x` can only be iterated, so it has no order that ranks could share.
        """
        if isinstance(x, tuple | list) and all(hasattr(leaf, "shape") for leaf in leaves(x)):
            x = (x,)  # several inputs, and no targets among them
        source = self._source(x, batch_size)
        if not isinstance(source, IndexedSource):
            raise TypeError(f"predict needs arrays or a map-style dataset. Received: {type(x).__name__}")
        shards: list[Any] = []
        indices: list[NDArray[np.int64]] = []
        for batch in source.epoch(0, shuffle=False):
            if batch.local_count and batch.indices is not None:
                shards.append(self._adapter.predict_step(batch.inputs))
                indices.append(batch.indices)
        if not shards:  # fewer samples than ranks: one sample tells the shape of what this rank has none of
            first = next(iter(as_source(x, batch_size=1, world=SoloWorld()).epoch(0, shuffle=False)))
            shards, indices = (
                [tree_map(lambda y: y[:0], self._adapter.predict_step(first.inputs))],
                [np.zeros(0, np.int64)],
            )
        order = self.world.allgather(np.concatenate(indices), name="predict.indices")
        return _join(shards, lambda local: self._in_order(local, order))

    def save(self, directory: str) -> None:
        """Write weights, optimizer state and options to `directory`; a collective call, rank 0 writes.

        Raises:
            CheckpointError: it could not be written.
        """
        self._save(directory)

    @classmethod
    def load(cls, directory: str, model: Any, **options: Any) -> Trainer:
        """Return a Trainer whose model and optimizer took on what `save` or `checkpoint_dir` wrote.

        Args:
            directory: one checkpoint. Rank 0 reads it; the others need not see its disk.
            model: a model of the same architecture.
            options: as for Trainer; those left out are the checkpoint's.

        Raises:
            CheckpointError: it is missing, damaged, or of another model (named tensor).
        """
        world = init(framework_of(model))
        config = progress_of.read_config(directory, world=world)
        trainer = cls(model, **{**config, **options})
        trainer._restore(directory)
        trainer._adapter.start()
        return trainer

    def state(self) -> State:
        """Return a copy of weights and optimizer state."""
        state = self._adapter.state()
        return State({name: np.array(array) for name, array in state.arrays.items()}, state.meta)

    def load_state(self, state: State) -> None:
        """Take on what `state` returned; to be called with the same on every rank."""
        self._adapter.load_state(state)

    def stop(self) -> None:
        """End the run after this epoch, on every rank; one rank's call is enough."""
        self._stop = True

    def _source(self, data: Any, batch_size: int) -> Source:
        return as_source(data, batch_size=batch_size, world=self.world, seed=self._seed)

    def _check_agreement(self, held_out: Source | None, *, batch_size: int) -> None:
        facts = {"epochs": self.epochs, "batch_size": batch_size, "validation": held_out is not None}
        agreement.require_equal(facts, world=self.world, what="fit")
        if not self._lr.is_fixed and self.steps_per_epoch is None and self._config["warmup_epochs"]:
            raise ValueError(
                "warmup_epochs needs data whose length is known. Received: data that can only be iterated. "
                "Use warmup_epochs=0, or data with a length."
            )

    def _run_epoch(self, source: Source, held_out: Source | None, epoch: int, hooks: CallbackList) -> dict[str, float]:
        hooks.on_epoch_begin(self, epoch)
        begin = time.perf_counter()
        self._in_epoch = True
        try:
            samples = self._train(source, epoch, hooks)
        except BaseException:
            # What this rank has counted must not reach the next epoch; the error under way is the one to show.
            with suppress(Exception):
                self._adapter.metrics(lambda local: local)
            raise
        finally:
            self._in_epoch = False
        if not samples:
            raise ValueError(
                f"train yielded no samples on any rank in epoch {epoch}. Give data that can be iterated anew."
            )
        times = np.zeros(self.world.size)  # a place for each rank: the sum of the metrics brings them along

        def reduce(vector: NDArray[np.float64]) -> NDArray[np.float64]:
            times[self.world.rank] = time.perf_counter() - begin  # here the device is done with the epoch
            total = self._reduce(np.concatenate([vector, times]))
            times[:] = total[len(vector) :]
            return total[: len(vector)]

        logs = self._adapter.metrics(reduce)
        seconds = float(times.max())
        self._adapter.settle()
        if held_out is not None:
            logs |= {f"val_{name}": value for name, value in self._evaluate(held_out).items()}
        return logs | {"samples_per_s": samples / seconds, "seconds": seconds}

    def _train(self, source: Source, epoch: int, hooks: CallbackList) -> int:
        """Take an epoch's optimizer steps; return the number of samples over all ranks."""
        samples = 0
        for step, batches in enumerate(_groups(source.epoch(epoch, shuffle=True), self._accumulate)):
            hooks.on_step_begin(self, step)
            self._set_learning_rate(epoch, step)
            self._adapter.train_step(batches)
            samples += sum(batch.global_count for batch in batches)
            hooks.on_step_end(self, step)
        return samples

    def _evaluate(self, source: Source) -> dict[str, float]:
        for batch in source.epoch(0, shuffle=False):
            self._adapter.eval_step(batch)
        return self._adapter.metrics(self._reduce)

    def _set_learning_rate(self, epoch: int, step: int) -> None:
        # Where an epoch's length is unknown there is no ramp, and any step but the first is past it.
        rates = self._lr.at(epoch * (self.steps_per_epoch or 1) + step, steps_per_epoch=self.steps_per_epoch)
        if rates is not None:
            self._adapter.learning_rates = rates

    def _reduce(self, vector: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.world.allreduce(vector, name="metrics")

    def _in_order(self, local: NDArray[Any], order: NDArray[np.int64]) -> NDArray[Any]:
        gathered = self.world.allgather(local, name="predict")
        result = np.empty_like(gathered)
        result[order] = gathered
        return result

    def _save(self, directory: Any) -> None:
        meta = {"config": self._config, "epochs_done": self._epochs_done, "history": self.history}
        progress_of.save(directory, self._adapter, meta, world=self.world)

    def _restore(self, directory: str) -> None:
        meta = progress_of.restore(directory, self._adapter, lr_factor=self._lr.factor, world=self.world)
        self._epochs_done, self.history = meta["epochs_done"], History(meta["history"])
        self._loaded = True


def _groups(batches: Iterator[Batch], count: int) -> Iterator[list[Batch]]:
    while group := list(islice(batches, count)):
        yield group


def _join(shards: Sequence[Any], finish: Any) -> Any:
    """Concatenate trees of arrays leaf by leaf, and finish each leaf."""
    if isinstance(shards[0], dict):
        return {key: _join([shard[key] for shard in shards], finish) for key in shards[0]}
    if isinstance(shards[0], tuple | list):
        return rebuild(shards[0], [_join(column, finish) for column in zip(*shards, strict=True)])
    return finish(np.concatenate(shards))


def _check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}. Received: {name}={value!r}")


def _check_positive(name: str, value: Any, kind: type) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, np.integer) if kind is int else (int, float))
        or value <= 0
    ):
        raise ValueError(
            f"{name} must be {'an int >= 1' if kind is int else 'a number > 0'}. Received: {name}={value!r}"
        )
