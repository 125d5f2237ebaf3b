"""Learning rate against world size: scaled only when asked, with a warmup in steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

_FACTORS = {"none": lambda size: 1.0, "linear": float, "sqrt": math.sqrt}


class LearningRate:
    """The rate of each parameter group at each optimizer step.

    Linear scaling and gradual warmup are those of Goyal et al., "Accurate, Large Minibatch SGD" (2017): with k ranks
    the rate ramps from the base rate to k times it over the first epochs. Without scaling (or with one rank) there is
    no smaller rate to start from, so the ramp starts near zero.

    Args:
        base: the user's own rate of each parameter group.
        scaling: "none", "linear" (factor `size`) or "sqrt" (its root, after Krizhevsky 2014).
        size: number of ranks.
        warmup_epochs: length of the ramp; 0 for none.

    Raises:
        ValueError: unknown scaling or negative warmup_epochs.
    """

    def __init__(self, base: Sequence[float], *, scaling: str, size: int, warmup_epochs: float) -> None:
        check_options(scaling, warmup_epochs)
        self.base = tuple(base)
        self._scaling = scaling
        self._warmup_epochs = warmup_epochs
        self.scale_to(size)

    def scale_to(self, size: int) -> None:
        """Take on another number of ranks."""
        self._size = size
        self.factor = factor(self._scaling, size)

    @property
    def is_fixed(self) -> bool:
        """True when the user's rates are never touched."""
        return self.factor == 1.0 and not self._warmup_epochs

    def at(self, step: int, *, steps_per_epoch: int | None) -> list[float] | None:
        """Return each group's rate for global step `step`; None where there is nothing to set.

        After the ramp the rate is set once more and then left alone, so that schedules of the user's own keep working.
        """
        if self.is_fixed:
            return None
        # The Trainer refuses a warmup where an epoch's length is not known before it ends.
        ramp = max(1, math.ceil(self._warmup_epochs * (steps_per_epoch or 0)))
        if step >= ramp:
            return None
        start = 1.0 if self.factor > 1.0 else 0.0
        return [rate * (start + (self.factor - start) * (step + 1) / ramp) for rate in self.base]

    def describe(self, *, batch_size: int | None, accumulate: int) -> list[str]:
        """Return lines that tell the effective batch, and the rate or how to ask for a scaled one."""
        ranks = f"{self._size} rank{'s' if self._size > 1 else ''}"
        lines = []
        if batch_size and self._size * accumulate > 1:
            product = f"{batch_size} x {ranks}{f' x {accumulate} accumulated' if accumulate > 1 else ''}"
            lines.append(f"effective batch {batch_size * self._size * accumulate} samples ({product})")
        if self.factor != 1.0:
            lines += [f"lr {rate:g} -> {rate * self.factor:g} ({self._scaling}, {ranks})" for rate in self.base]
        elif self._size > 1 and self._scaling == "none":
            rates = ", ".join(f"{rate:g}" for rate in self.base)
            lines.append(f'lr {rates}, not scaled; lr_scaling="linear" or "sqrt" scales it to {ranks}')
        return lines


def factor(scaling: str, size: int) -> float:
    """Return what the rate is multiplied by on `size` ranks."""
    return float(_FACTORS[scaling](size))


def check_options(scaling: str, warmup_epochs: float) -> None:
    """Raise ValueError for an unknown scaling or a negative warmup."""
    if scaling not in _FACTORS:
        raise ValueError(f"lr_scaling must be one of {', '.join(_FACTORS)}. Received: lr_scaling={scaling!r}")
    if warmup_epochs < 0:
        raise ValueError(f"warmup_epochs must be >= 0. Received: warmup_epochs={warmup_epochs}")
