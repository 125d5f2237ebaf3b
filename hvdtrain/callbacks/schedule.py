"""Step the user's own learning rate scheduler, and save its state in checkpoints."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from hvdtrain.callbacks.base import Callback, Logs, RunContext


class Schedule(Callback):
    """Call a torch.optim.lr_scheduler's `step` after every epoch or every optimizer step.

    Steps that nan_policy="skip" or the loss scaling of precision="fp16" leaves out do not count.
    Its state is part of checkpoints. Do not combine it with the Trainer's lr_scaling and warmup_epochs: most schedulers
    compute from the rate that they were made with. Pass a Keras schedule to the optimizer as its learning rate instead.

    Args:
        scheduler: over the optimizer that the Trainer was given.
        every: "epoch" or "step".
        monitor: a metric that `step` is called with, for ReduceLROnPlateau; only with "epoch".

    Raises:
        TypeError: it has no `step` and `state_dict`.
        ValueError: another `every`, or a `monitor` that History does not have.
    """

    def __init__(
        self, scheduler: Any, *, every: Literal["epoch", "step"] = "epoch", monitor: str | None = None
    ) -> None:
        if not callable(getattr(scheduler, "step", None)) or not callable(getattr(scheduler, "state_dict", None)):
            raise TypeError(f"scheduler must be a torch.optim.lr_scheduler. Received: {scheduler!r}")
        if every not in ("epoch", "step") or (every == "step" and monitor is not None):
            raise ValueError(
                f'every must be "epoch" or "step", and monitor goes with "epoch". Received: every={every!r}, '
                f"monitor={monitor!r}"
            )
        self._scheduler, self._every, self._monitor = scheduler, every, monitor

    def on_step_end(self, trainer: RunContext, step: int) -> None:
        """Step if `every` is "step", and the optimizer did."""
        if self._every == "step" and trainer.step_taken:
            self._scheduler.step()

    def on_epoch_end(self, trainer: RunContext, epoch: int, logs: Logs) -> None:
        """Step if `every` is "epoch"."""
        if self._every != "epoch":
            return
        if self._monitor is None:
            self._scheduler.step()
        elif self._monitor in logs:
            self._scheduler.step(logs[self._monitor])
        else:
            raise ValueError(f"monitor must be one of {sorted(logs)}. Received: monitor={self._monitor!r}")

    def state(self) -> dict[str, Any]:
        """Return the scheduler's state."""
        return dict(_without_tensors(self._scheduler.state_dict()))

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore it; the optimizer's state has the rates themselves."""
        self._scheduler.load_state_dict(_with_tensors(state, self._scheduler.state_dict()))


def _without_tensors(value: Any) -> Any:
    """Return a scheduler's state with numbers for tensors: a rate may be one, and every rate computed from it."""
    if hasattr(value, "new_tensor"):
        return value.tolist()
    if type(value) is dict:
        return {key: _without_tensors(each) for key, each in value.items()}
    return [_without_tensors(each) for each in value] if type(value) is list else value


def _with_tensors(value: Any, here: Any) -> Any:
    """Return a saved state with tensors where the scheduler's own state, `here`, has them."""
    if hasattr(here, "new_tensor"):
        return here.new_tensor(value)
    if type(value) is dict and type(here) is Counter:  # milestones; a checkpoint of 0.1.0 has strings
        return Counter({int(key): times for key, times in value.items()})
    if type(value) is dict and type(here) is dict:
        return {key: _with_tensors(each, here.get(key)) for key, each in value.items()}
    if type(value) is list and type(here) is list and len(value) == len(here):
        return [_with_tensors(*pair) for pair in zip(value, here, strict=True)]
    return value
