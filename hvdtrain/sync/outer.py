"""An outer optimizer: it changes the weights that ranks agreed on last, by the mean of the ranks' changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from hvdtrain.adapter import WeightAccess


class Outer:
    """An outer optimizer for one part of the weights.

    With anchor a, equal on all ranks, and this rank's weights x, the mean change is d = mean(x - a). The velocity v
    becomes momentum * v + d, and the weights a + lr * (d + momentum * v): Nesterov's momentum in the form of
    torch.optim.SGD, for the gradient -d. With lr=1 and momentum=0, the weights become their mean.

    Without `keeps_anchor`, which is for lr=1 and momentum=0, it averages weights instead of changes, and needs no copy.

    A compression with error feedback sends C(x - a + e) in place of x - a, where e is what this rank has not sent
    before, and d is the mean of what ranks send (Basu et al., "Qsparse-local-SGD", 2019, with lr=1 and momentum=0;
    Thérien et al., "MuLoCo", 2025, for DiLoCo).
    """

    def __init__(self, access: WeightAccess, *, lr: float, momentum: float, keeps_anchor: bool) -> None:
        self.access = access
        self.velocity: list[Any] = []
        self.ends_after_step = 0  # the step after which the exchange in flight ends
        self._lr, self._momentum, self._keeps_anchor = lr, momentum, keeps_anchor
        self._anchor: list[Any] | None = None
        self._sent: list[Any] = []  # this rank's weights when the exchange in flight began
        self._wait: Callable[[], list[Any]] | None = None

    @property
    def in_flight(self) -> bool:
        """True if an exchange was started and is not finished."""
        return self._wait is not None

    def begin(self) -> None:
        """Note the weights that ranks agree on, before their first step alone."""
        if self._keeps_anchor:
            # Again each time: a callback may have changed the weights, and those in half precision are rounded.
            self._anchor = self.access.weights()

    def drop(self) -> None:
        """Drop an exchange in flight, of a `fit` that an error has ended; the velocity stays."""
        with suppress(Exception):  # wait: the operations' names and memory are needed again
            if self._wait is not None:
                self._wait()
        self._wait, self._sent = None, []

    def start(self, *, name: str, compression: str, keep: bool = False) -> None:
        """Start to average the change of the weights; with `keep`, for a `finish` some steps later."""
        changes = self.access.weights()
        self._sent = self.access.weights() if keep else []
        if self._anchor is not None:
            for change, anchor in zip(changes, self._anchor, strict=True):
                change -= anchor
        self._wait = self.access.mean(changes, name=name, compression=compression)

    def finish(self) -> None:
        """Wait, and take the outer step. What this rank has learned since `start` with `keep` is added to it."""
        if self._wait is None:
            return
        weights = self._advanced(self._wait())
        if self._sent:
            now = self.access.weights()
            for value, sent, new in zip(now, self._sent, weights, strict=True):
                value -= sent
                value += new
            weights = now
        self.access.set_weights(weights)
        self._wait, self._sent = None, []

    def _advanced(self, changes: Sequence[Any]) -> list[Any]:
        """Return the new weights that ranks agree on, and make them the anchor."""
        if self._anchor is None:
            return list(changes)
        if self._momentum and not self.velocity:
            self.velocity = [0.0 * change for change in changes]
        for index, (anchor, change) in enumerate(zip(self._anchor, changes, strict=True)):
            if self._momentum:
                velocity = self.velocity[index]
                velocity *= self._momentum
                velocity += change
                change += self._momentum * velocity
            if self._lr != 1.0:
                change *= self._lr
            anchor += change
        return self._anchor
