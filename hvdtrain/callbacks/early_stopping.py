"""Stop when a metric no longer improves."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.adapter import State
from hvdtrain.callbacks.base import Callback, Logs, RunContext
from hvdtrain.checkpoint.store import Mode, improves, sign
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.world import World

log = logging.getLogger("hvdtrain")


class EarlyStopping(Callback):
    """End the run once `monitor` has not improved for `patience` epochs.

    A metric of validation within epochs (`fit(validate_every=...)`) is judged after each validation, so that patience
    counts validations, and the run ends there. All ranks see the same metrics, so all end after the same step.

    Args:
        monitor: name of a metric in History.
        patience: epochs, or validations, without improvement that are tolerated; 0 stops at the first.
        min_delta: smallest change that counts as an improvement.
        mode: whether less or more is better; "auto" takes "min" for a loss or an error, else "max".
        restore_best: give the model the best weights, and the optimizer its state then, when `fit` ends, early or not.
            Checkpoints then hold two states, the present and the best, so that a longer run resumes from the present.

    Raises:
        ValueError: negative patience or min_delta, or an unknown mode.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        *,
        patience: int = 0,
        min_delta: float = 0.0,
        mode: Mode = "auto",
        restore_best: bool = False,
    ) -> None:
        if patience < 0 or min_delta < 0:
            raise ValueError(
                f"patience and min_delta must be >= 0. Received: patience={patience}, min_delta={min_delta}"
            )
        self._monitor, self._sign = monitor, sign(monitor, mode)
        self._patience, self._min_delta = patience, min_delta
        self._restore_best = restore_best
        self._reset()

    def _reset(self) -> None:
        self._best = -math.inf
        self._best_place = ""  # in words
        self._best_state: State | None = None
        self._holds_best = False  # the model has had no other weights since `_judged_at`
        self._since = 0  # judgements since the best
        self._judged_at = -1  # global step of the last one

    def on_fit_begin(self, trainer: RunContext) -> None:
        """Reset; a resumed run reads earlier epochs from the history, unless its checkpoint has more."""
        self._reset()
        self._trainer = trainer
        for epoch, value in enumerate(trainer.history.get(self._monitor, [])):
            self._improves(value, f"epoch {epoch + 1}")
        self._best_state = None
        # With validations within epochs, only the state in the checkpoint has them.
        if not getattr(trainer.history, "validations", ()):
            self._stop_if_exhausted()

    def on_validation_end(self, trainer: RunContext, logs: Logs) -> None:
        """Compare after a validation within an epoch."""
        if trainer.in_epoch and self._monitor in logs:
            self._judge(trainer, logs[self._monitor], f"step {trainer.global_step}")

    def on_epoch_end(self, trainer: RunContext, epoch: int, logs: Logs) -> None:
        """Compare, unless the epoch's last validation was compared."""
        if self._monitor not in logs:
            raise ValueError(f"monitor must be one of {sorted(logs)}. Received: monitor={self._monitor!r}")
        if self._judged_at != trainer.global_step:
            self._judge(trainer, logs[self._monitor], f"epoch {epoch + 1}")

    def on_training_end(self, trainer: RunContext) -> None:
        """Restore the best weights, unless the model has them."""
        if not (self._holds_best and self._judged_at == trainer.global_step):
            self._restore(trainer)

    def _restore(self, trainer: RunContext) -> None:
        if self._best_state is not None:
            trainer.load_state(self._best_state)
            self._holds_best = True

    def _judge(self, trainer: RunContext, value: float, place: str) -> None:
        self._judged_at, self._holds_best = trainer.global_step, False
        if self._improves(value, place):
            if self._restore_best:
                best = _settled(trainer) if trainer.in_epoch else trainer.state()
                # Without an update that is still to be made, as with sync=Delayed(): it would change the best weights.
                weights = {name: array for name, array in best.arrays.items() if name not in best.pending}
                self._best_state = replace(best, arrays=weights)
                self._holds_best = not best.pending
        elif self._stop_if_exhausted():
            if trainer.world.is_root:
                log.info("stop: %s has not improved since %s", self._monitor, self._best_place or "the beginning")
            self._restore(trainer)

    def _stop_if_exhausted(self) -> bool:
        """Stop the run when patience is exhausted, and return whether it is."""
        if self._since > self._patience:
            self._trainer.stop()
        return self._since > self._patience

    def state(self) -> dict[str, Any]:
        """Return the count of `patience`, the best value so far, and the best weights and optimizer state."""
        if self._judged_at < 0:
            return {}
        options = [self._monitor, self._sign, self._min_delta]
        best = self._best if math.isfinite(self._best) else None
        place = {"best": best, "place": self._best_place, "since": self._since, "judged_at": self._judged_at}
        weights = {} if self._best_state is None else {"meta": self._best_state.meta, **self._best_state.arrays}
        return {"options": options, **place, **weights}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore them, if this run has the same options."""
        if list(state.get("options", ())) != [self._monitor, self._sign, self._min_delta]:
            return
        self._best = -math.inf if state["best"] is None else state["best"]
        self._best_place, self._since, self._judged_at = state["place"], state["since"], state["judged_at"]
        if self._restore_best and "meta" in state:
            arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
            self._best_state = State(arrays, state["meta"], everywhere=True)
        self._stop_if_exhausted()

    def _improves(self, value: float, place: str) -> bool:
        """Return whether this is the best value so far, and store it."""
        if not improves(self._sign * value, self._best, min_delta=self._min_delta):
            self._since += 1
            return False
        self._best, self._best_place, self._since = self._sign * value, place, 0
        return True


def _settled(trainer: RunContext) -> State:
    """Return the state with what each rank changes by itself averaged, as an epoch's end does."""
    state, ranks = trainer.state(copy=False), DataRanks(trainer.world)
    averages: dict[str, NDArray[Any]] = {}
    for name in sorted(state.per_rank):
        array = np.asarray((state.arrays if name in state.arrays else state.part)[name])
        if array.dtype.kind == "f":
            averaged = ranks.allreduce(array.astype(np.float64), "mean", name="average_buffers")
        else:
            averaged = ranks.allreduce(array.astype(np.int64), "max", name="average_buffers")
        averages[name] = averaged.astype(array.dtype).reshape(array.shape)
    if trainer.world.grid is not None:
        averages = _of_all_parts(averages, state, trainer.world)
    copied = state.copied()
    return replace(copied, arrays={**copied.arrays, **averages})


def _of_all_parts(averages: dict[str, NDArray[Any]], state: State, world: World) -> dict[str, NDArray[Any]]:
    """Return the averages of all parts of a model that a Grid divides, each from the first rank that has it."""
    everyones = world.allgather_object(sorted(averages), name="averages.names")
    first = {name: rank for rank, names in reversed([*enumerate(everyones)]) for name in names}
    for name, rank in sorted(first.items()):
        kind = state.sharded[name].kind
        sent = averages[name] if rank == world.rank else np.zeros(kind.shape, kind.dtype)
        averages[name] = world.broadcast(sent, root=rank, name="averages")
    return averages
