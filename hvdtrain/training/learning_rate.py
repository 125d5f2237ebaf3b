"""Scale the learning rate by world size, if requested, with a warmup in steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvdtrain.distributed.launch_environment import count_ranks

FACTORS = {"none": lambda size: 1.0, "linear": float, "sqrt": math.sqrt}


class LearningRate:
    """The rate of each parameter group at each optimizer step.

    Linear scaling and gradual warmup follow Goyal et al., "Accurate, Large Minibatch SGD" (2017): with k ranks the rate
    rises from the base rate to k times the base rate over the first epochs; "sqrt" scaling is Krizhevsky's (2014).
    Without scaling, or with one rank, the ramp starts near zero.
    """

    def __init__(self, base: Sequence[float], *, scaling: str, size: int, warmup_epochs: float) -> None:
        self.base = tuple(base)
        self._scaling = scaling
        self._warmup_epochs = warmup_epochs
        self.scale_to(size)

    def scale_to(self, size: int) -> None:
        """Scale to another number of ranks."""
        self._size = size
        self.factor = factor(self._scaling, size)

    @property
    def is_fixed(self) -> bool:
        """True if the user's rates never change."""
        return self.factor == 1.0 and not self._warmup_epochs

    def check(self, steps_per_epoch: int | None) -> None:
        """Raise ValueError if the rate warms up over epochs whose length is not known."""
        if self._warmup_epochs and steps_per_epoch is None:
            raise ValueError(
                "warmup_epochs needs data whose length is known. Received: data that can only be iterated. "
                "Use warmup_epochs=0, or data with a length."
            )

    def at(self, step: int, *, steps_per_epoch: int | None) -> list[float] | None:
        """Return each group's rate for global step `step`; None if the rate must not be set.

        The ramp's last step sets the scaled rate. Later steps set none, so that the user's own schedules still work.
        """
        if self.is_fixed:
            return None
        ramp = max(1, math.ceil(self._warmup_epochs * (steps_per_epoch or 0)))
        if step >= ramp:
            return None
        start = 1.0 if self.factor > 1.0 else 0.0
        return [rate * (start + (self.factor - start) * (step + 1) / ramp) for rate in self.base]

    def describe(
        self, *, batch_size: int | None, accumulate: int, rates: Sequence[float], scheduled: bool = False
    ) -> list[str]:
        """Return log lines: the effective batch, and how the rate is scaled or can be scaled.

        `rates` are the present ones, and `scheduled` is true if a callback changes them.
        """
        ranks = count_ranks(self._size)
        lines = []
        if batch_size and self._size * accumulate > 1:
            product = f"{batch_size} x {ranks}{f' x {accumulate} accumulated' if accumulate > 1 else ''}"
            lines.append(f"effective batch {batch_size * self._size * accumulate} samples ({product})")
        if self.factor != 1.0:
            lines += [f"lr {rate:g} -> {rate * self.factor:g} ({self._scaling}, {ranks})" for rate in self.base]
        elif self._size > 1 and self._scaling == "none":
            now = ", ".join(f"{rate:g}" for rate in rates)
            advice = f'not scaled; lr_scaling="linear" or "sqrt" scales it to {ranks}'
            lines.append(f"lr {now}, {f'which a schedule changes; not scaled to {ranks}' if scheduled else advice}")
        return lines


def factor(scaling: str, size: int) -> float:
    """Return the factor of the rate on `size` ranks."""
    return float(FACTORS[scaling](size))
