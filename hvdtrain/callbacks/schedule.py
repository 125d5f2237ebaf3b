"""Step the user's own learning rate scheduler, and save its state in checkpoints."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any, Literal

from hvdtrain.callbacks.base import Callback, Logs, RunContext
from hvdtrain.callbacks.schedule_beginning import Beginning, length, with_tensors, without_tensors
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.launch_environment import count_ranks

log = logging.getLogger("hvdtrain")


class Schedule(Callback):
    """Call a torch.optim.lr_scheduler's `step` after every epoch or every optimizer step.

    Steps that nan_policy="skip" or the loss scaling of precision="fp16" leaves out do not count.
    Its state is part of checkpoints. Do not combine it with the Trainer's lr_scaling and warmup_epochs: most schedulers
    compute from the rate that they were made with. Pass a Keras schedule to the optimizer as its learning rate instead.

    A run that resumes with another schedule, such as one for the steps of another number of ranks, continues at the
    same place of the epoch, with the rates that the new schedule has there.

    Args:
        scheduler: over the optimizer that the Trainer was given. Or a function that gets how often `fit` will call
            `step`, on this number of ranks, and returns the scheduler; each fit calls it once.
        every: "epoch" or "step".
        monitor: a metric that `step` is called with, for ReduceLROnPlateau; only with "epoch".

    Raises:
        TypeError: it has no `step` and `state_dict`, and is no function that returns such an object.
        ValueError: another `every`, or a `monitor` that History does not have; in `fit`, a function where the number of
            steps is not known.
    """

    sets_learning_rate = True

    def __init__(
        self,
        scheduler: Any | Callable[[int], Any],
        *,
        every: Literal["epoch", "step"] = "epoch",
        monitor: str | None = None,
    ) -> None:
        if every not in ("epoch", "step") or (every == "step" and monitor is not None):
            raise ValueError(
                f'every must be "epoch" or "step", and monitor goes with "epoch". Received: every={every!r}, '
                f"monitor={monitor!r}"
            )
        self._every, self._monitor = every, monitor
        self._make = None if _is_scheduler(scheduler) or isinstance(scheduler, type) else scheduler
        self._beginning: Beginning | None = None
        self._trainer: RunContext | None = None
        self._position = 0  # calls of `step` since the beginning
        self._is_compared = False
        if not callable(self._make):
            self._use(scheduler)

    def _use(self, scheduler: Any) -> None:
        if not _is_scheduler(scheduler):
            raise TypeError(
                "scheduler must be a torch.optim.lr_scheduler, or a function (steps) -> scheduler. "
                f"Received: {scheduler!r}"
            )
        self._scheduler, self._position = scheduler, 0
        self._beginning = Beginning(scheduler)

    def on_setup(self, trainer: RunContext) -> None:
        """Make the scheduler, if a function was given."""
        self._trainer, self._is_compared = trainer, False
        if self._make is None:
            return
        times = self._times()
        if times is None:
            raise ValueError(
                "Schedule(function) needs to know how many steps fit takes. Received: data whose length is not known, "
                f"or seconds alone, with epochs={trainer.epochs!r}. Give fit(steps=...), or a scheduler"
            )
        if self._beginning is not None:  # another fit, or another number of ranks: a scheduler begins with these rates
            self._beginning.restore()
        self._use(self._make(times))

    def _times(self) -> int | None:
        """Return how often `fit` calls `step`, in all; None if that is not known."""
        trainer = self._trainer
        if trainer is None:
            return None
        total, per_epoch = trainer.total_steps, trainer.steps_per_epoch
        if self._every == "step":
            return total
        return trainer.epochs if total is None or per_epoch is None else -(-total // per_epoch)

    def on_epoch_begin(self, trainer: RunContext, epoch: int) -> None:
        """Say at the beginning if the scheduler is not made for as many steps as fit takes."""
        known, times = length(self._scheduler), self._times()
        if not self._is_compared and None not in (known, times) and known != times and trainer.world.is_root:
            name, ranks = type(self._scheduler).__name__, count_ranks(DataRanks(trainer.world).size)
            line = (
                f"Schedule: {name} is made for {known} {self._every}s, and fit takes {times} on {ranks}. "
                f"Schedule(lambda steps: {name}(...)) gives the scheduler fit's number"
            )
            trainer.decisions.append(line)
            log.warning("%s", line)
        self._is_compared = True

    def on_step_end(self, trainer: RunContext, step: int) -> None:
        """Step if `every` is "step", and the optimizer did."""
        if self._every == "step" and trainer.step_taken:
            self._step()

    def on_epoch_end(self, trainer: RunContext, epoch: int, logs: Logs) -> None:
        """Step if `every` is "epoch"."""
        if self._every != "epoch":
            return
        if self._monitor is None:
            self._step()
        elif self._monitor in logs:
            self._step(logs[self._monitor])
        else:
            raise ValueError(f"monitor must be one of {sorted(logs)}. Received: monitor={self._monitor!r}")

    def _step(self, *values: float) -> None:
        self._scheduler.step(*values)
        self._position += 1

    def state(self) -> dict[str, Any]:
        """Return the scheduler's state, and the settings that it was made with."""
        if self._beginning is None:
            return {}
        return {
            "scheduler": dict(without_tensors(self._scheduler.state_dict())),
            "made": self._beginning.made,
            "rates": self._beginning.rates,
            "position": self._position,
            "steps_per_epoch": self._trainer and self._trainer.steps_per_epoch,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore it; the optimizer's state has the rates themselves."""
        if self._beginning is None:
            raise TypeError("Schedule(function) has no scheduler before fit. Received: load_state before fit")
        position, own = state.get("position", 0), self._beginning.rates
        before = state.get("rates", own)
        takes_own = self._trainer is not None and "lr" in self._trainer.config.get("override", ()) and before != own
        is_same = state.get("made", self._beginning.made) == self._beginning.made
        if (is_same and not takes_own) or self._monitor is not None:
            self._beginning.rates = before
            if before != own:
                self._note(
                    f"it computes from lr {_words(before)}, the checkpoint's, not from the script's {_words(own)}; "
                    'fit(override=["lr"]) takes the script\'s'
                )
            saved = state.get("scheduler", state)  # a checkpoint of 0.1.0 has the scheduler's state alone
            self._scheduler.load_state_dict(with_tensors(saved, self._scheduler.state_dict()))
            self._position = position
            return
        self._beginning.restore()
        self._position = 0
        with warnings.catch_warnings():  # torch's, that the optimizer has not stepped yet
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(position if is_same else self._moved(position, state["steps_per_epoch"])):
                self._step()
        self._note(
            f"the scheduler is another one than the checkpoint's, which had taken {position} {self._every}s: it "
            f"continues as if it had taken {self._position}, from lr {_words(own)}"
        )

    def _note(self, text: str) -> None:
        if self._trainer is not None and self._trainer.world.is_root:
            self._trainer.decisions.append(f"Schedule: {text}")
            log.info("Schedule: %s", text)

    def _moved(self, position: int, before: int | None) -> int:
        """Return the position after as much of the data, on this number of ranks; `before` were the steps an epoch."""
        trainer = self._trainer
        now = None if trainer is None else trainer.steps_per_epoch
        if self._every == "epoch" or trainer is None or not now or not before or trainer.epochs is None:
            return position
        # Where a number of steps ends the run, those before the checkpoint count, whatever number of ranks took them.
        return round(position * now / before) if trainer.total_steps == trainer.epochs * now else position


def _words(rates: list[float]) -> str:
    return ", ".join(f"{rate:g}" for rate in rates)


def _is_scheduler(value: Any) -> bool:
    has_methods = callable(getattr(value, "step", None)) and callable(getattr(value, "state_dict", None))
    return has_methods and not isinstance(value, type)
