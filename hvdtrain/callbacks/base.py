"""The base class of callbacks, a list of callbacks, and the run as they see it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdtrain.adapter import ShardedArray, State
from hvdtrain.checkpoint import typed_json
from hvdtrain.checkpoint.store import Store
from hvdtrain.distributed.world import World
from hvdtrain.telemetry.interval import Interval

Logs = dict[str, float]


@dataclass(frozen=True)
class RunId:
    """Identifies a run. Every rank has it, because rank 0 may die first.

    Attributes:
        id: unique among runs.
        name: a name for people: HVDTRAIN_RUN_NAME, or script and time.
        resumed: whether an earlier attempt may have logged under this id.
    """

    id: str
    name: str
    resumed: bool = False


@dataclass(frozen=True, eq=False)
class CheckpointOptions:
    """The folder of a run's checkpoints, and when one is due; `hvdtrain.callbacks.Checkpoint` explains each option."""

    store: Store
    every_epochs: int
    every_steps: int | None
    best: str | None
    background: bool
    frozen: bool = True
    built: dict[str, str] = field(default_factory=dict)  # digests of frozen weights as the script has built them

    @property
    def schedule(self) -> dict[str, Any]:
        """The options that must be equal on all ranks, because saving is a collective."""
        return {"every_epochs": self.every_epochs, "every_steps": self.every_steps, "best": self.best}

    def is_due(self, global_step: int, validated: Logs) -> bool:
        """Return whether a checkpoint is due after this step, and after a validation there, if `validated` has one."""
        if validated and self.best is not None and self.best.startswith("val_") and self.best not in validated:
            raise ValueError(f"best must be one of {sorted(validated)}. Received: best={self.best!r}")
        return self.best in validated or (self.every_steps is not None and global_step % self.every_steps == 0)

    def is_due_after(self, epoch: int, logs: Logs) -> bool:
        """Return whether a checkpoint is due after this epoch; ValueError if it has no metric `best`."""
        if self.best is not None and self.best not in logs:
            raise ValueError(f"best must be one of {sorted(logs)}. Received: best={self.best!r}")
        return bool(self.every_epochs) and (epoch + 1) % self.every_epochs == 0


class RunContext(Protocol):
    """A run in progress, equal on all ranks except for `world`; the Trainer is one."""

    model: Any
    world: World
    epochs: int | None
    hosts: list[str]
    steps_per_epoch: int | None

    @property
    def decisions(self) -> list[str]:
        """Log lines on what the run has decided; a callback may append to them."""

    @property
    def config(self) -> dict[str, Any]:
        """The arguments of the Trainer and of `fit`, as JSON."""

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps that epochs and steps allow `fit`, those before a checkpoint included; None if unknown.

        After a resume on another number of ranks: what this number of ranks would take from the beginning.
        """

    @property
    def global_step(self) -> int:
        """Optimizer steps since training began; those before a checkpoint count."""

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0."""

    @property
    def step(self) -> int:
        """Optimizer steps of the current epoch so far."""

    @property
    def in_epoch(self) -> bool:
        """True if steps of the current epoch are left: a validation comes within epochs and at their ends."""

    @property
    def step_taken(self) -> bool:
        """False in `on_step_end` of a step that nan_policy="skip" or loss scaling left out; equal on all ranks.

        With LocalSGD and DiLoCo each rank skips alone: it is False when all ranks know that one of them has refused a
        step, and what loss scaling skips counts. It may make a GPU wait if the optimizer is fused and precision="fp16".
        """

    @property
    def in_sync(self) -> bool:
        """True if ranks hold equal weights: always, except between two synchronizations of a strategy (`sync`)."""

    @property
    def learning_rate(self) -> float:
        """The first parameter group's present learning rate; it may make a GPU wait."""

    @property
    def history(self) -> Mapping[str, list[float]]:
        """The metrics of each epoch so far."""

    @property
    def memory(self) -> Mapping[str, float | None]:
        """Bytes of this rank in a step at most, by what takes them; see `Trainer.memory`."""

    @property
    def run(self) -> RunId | None:
        """The run's identity; None before the first `fit`."""

    def local_metrics(self) -> Logs:
        """Return this rank's running metrics of the epoch or the validation set. It makes a GPU wait; no collective."""

    def stop(self, *, within_epoch: bool = False) -> None:
        """End the run after this epoch or the next validation, on every rank. One rank's call is enough.

        With within_epoch=True, in a hook of a step, it ends after this step in one process, on several ranks about a
        second later.
        """

    def state(self, *, copy: bool = True) -> State:
        """Return weights and optimizer state; call it on every rank. With copy=False, the next step may change them."""

    def load_state(self, state: State) -> None:
        """Restore what `state` returned. Call it with the same state on every rank."""

    def repair(self) -> None:
        """Broadcast the root's weights and optimizer state. A collective."""

    def save_checkpoint(self, options: CheckpointOptions) -> None:
        """Save the current state to the folder of these options, or that of the next synchronization. A collective."""


class Callback:
    """Override what you need; every method does nothing by default.

    Callbacks run on every rank. Metrics in `logs` are equal on all ranks, so all ranks take the same decisions on them.
    Guard I/O with `trainer.world.is_root`. To end the run after the current epoch, or after the next validation within
    it, call `trainer.stop()` on one rank or more.
    """

    checkpoint: CheckpointOptions | None = None  # of a `Checkpoint`
    # Whether it gives the model other weights for validation: then its on_validation_end comes before the others'.
    swaps_weights = False
    sets_learning_rate = False  # whether it changes the optimizer's learning rate during the run
    takes_parts = False  # whether `load_state` takes `ShardedArray`s: on a Grid it gets one for each saved array

    @property
    def name(self) -> str:
        """The callback's name in checkpoints: its class's name."""
        return type(self).__name__

    def on_setup(self, trainer: RunContext) -> None:
        """Run once, when the numbers of epochs and steps are known, before a run resumes; no collective."""

    def on_fit_begin(self, trainer: RunContext) -> None:
        """Run once, when weights are equal on all ranks and before the first epoch."""

    def on_epoch_begin(self, trainer: RunContext, epoch: int) -> None:
        """Run before the first step of an epoch; epochs count from 0."""

    def on_step_begin(self, trainer: RunContext, step: int) -> None:
        """Run before an optimizer step; steps count from 0 in each epoch."""

    def on_step_end(self, trainer: RunContext, step: int) -> None:
        """Run after an optimizer step."""

    def on_interval(self, trainer: RunContext, interval: Interval) -> None:
        """Run about once a second, after the same step on all ranks; `interval` describes the last steps."""

    def on_validation_begin(self, trainer: RunContext) -> None:
        """Run before `fit` evaluates a validation set, on every rank."""

    def on_validation_step_begin(self, trainer: RunContext, step: int) -> None:
        """Run before a batch of a validation set; steps count from 0 in each set."""

    def on_validation_step_end(self, trainer: RunContext, step: int) -> None:
        """Run after a batch of a validation set."""

    def on_validation_end(self, trainer: RunContext, logs: Logs) -> None:
        """Run after `fit` has evaluated a validation set; `logs` has its metrics, such as "val_loss"."""

    def on_epoch_end(self, trainer: RunContext, epoch: int, logs: Logs) -> None:
        """Run after training and validation of an epoch, or of the part after which `fit` ends within one.

        `logs` has the metrics of the epoch, as in History.
        """

    def on_training_end(self, trainer: RunContext) -> None:
        """Run once, after the last checkpoint: weights that are loaded here are those with which `fit` ends."""

    def on_fit_end(self, trainer: RunContext) -> None:
        """Run once, after the last epoch, when the model holds its final weights."""

    def close(self) -> None:
        """Close open resources. Runs on each rank when fit ends, also after an error."""

    def state(self) -> dict[str, Any]:
        """Return state for checkpoints; rank 0's state is saved.

        It holds numbers, strings, None, lists, tuples, dicts and Counters, which come back as they were, and arrays. An
        array must be a direct value of the dict, and later steps must not change it. It may be a `ShardedArray`.
        """
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned, on every rank; called after on_fit_begin of a resumed run."""


def without_arrays(states: Sequence[Sequence[Any]]) -> tuple[list[list[Any]], dict[str, NDArray[Any]]]:
    """Split what `CallbackList.states` returned into JSON values and named arrays; CheckpointError if it is neither.

    An array of which ranks hold parts is in neither: see `parts_of`.
    """
    plain = []
    for name, state in states:
        rest = {key: value for key, value in state.items() if not isinstance(value, np.ndarray | ShardedArray)}
        plain.append([name, typed_json.encode(rest, f"{name}.state()")])
    return plain, dict(_named(states, np.ndarray))


def parts_of(states: Sequence[Sequence[Any]]) -> dict[str, ShardedArray]:
    """Return the arrays of which ranks hold parts, by their names as in `without_arrays`."""
    return dict(_named(states, ShardedArray))


def _named(states: Sequence[Sequence[Any]], kind: Any) -> Iterator[tuple[str, Any]]:
    for index, (_, state) in enumerate(states):
        yield from ((f"{index}.{key}", value) for key, value in state.items() if isinstance(value, kind))


def with_arrays(plain: Sequence[Sequence[Any]], arrays: Mapping[str, Any]) -> list[list[Any]]:
    """Undo `without_arrays` and `parts_of`."""
    states = [[name, typed_json.decode(state)] for name, state in plain]
    for name, array in arrays.items():
        index, _, key = name.partition(".")
        states[int(index)][1][key] = array
    return states


def _whole(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with whole arrays; a collective if ranks gather one."""
    return {key: each.gather(True) if isinstance(each, ShardedArray) else each for key, each in state.items()}


class CallbackList:
    """The callbacks of a fit, in order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = tuple(callbacks)
        self._closed = False

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._callbacks)

    def states(self) -> list[list[Any]]:
        """Return [class name, state] of each callback that has a state."""
        named = [[each.name, each.state()] for each in self._callbacks]
        return [[name, state] for name, state in named if state]

    def load_states(self, states: Sequence[Sequence[Any]], *, world: World) -> None:
        """Restore each callback's state, found by class name; several of one class by their order.

        A collective where a Grid divides the model: ranks gather the arrays that a callback on any rank takes whole.
        """
        names = {each.name for each in self._callbacks if not each.takes_parts}
        if world.grid is not None:
            names = set(chain(*world.allgather_object(sorted(names), name="callbacks")))
        left = [[name, _whole(state) if name in names else state] for name, state in states]
        for callback in self._callbacks:
            found = next((each for each in left if each[0] == callback.name), None)
            if found is not None:
                left.remove(found)
                callback.load_state(found[1])

    def close(self) -> None:
        """Close each callback, once."""
        if not self._closed:
            self._closed = True
            for callback in self._callbacks:
                callback.close()
