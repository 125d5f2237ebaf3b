"""The gradient of one step on its way: what the torch and JAX backends have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.distributed.recorder import recorder

Pairs = list[tuple[Any, Any]]
Wait = Callable[[], list[Any]]


class Handle:
    """Holds the gradient of one step: first ready to be sent, then in flight, then as its mean."""

    def __init__(self) -> None:
        self._variables: Sequence[Any] = ()
        self._start: Callable[[], Wait] | None = None
        self._wait: Wait | None = None
        self._mean: Pairs | None = None

    def keep(self, variables: Sequence[Any], start: Callable[[], Wait]) -> None:
        """Keep the gradients of these variables, which `start` starts to reduce."""
        self._variables, self._start = variables, start

    def launch(self) -> None:
        """Start to reduce what is kept."""
        if self._start is not None:
            self._wait, self._start = self._start(), None

    def mean(self) -> Pairs | None:
        """Wait for the mean, and keep it; return it by variable."""
        if self._wait is not None:
            with recorder.waiting():
                self._mean = list(zip(self._variables, self._wait(), strict=True))
            self._wait = None
        return self._mean

    def restored(self) -> Pairs | None:
        """Return the gradient if it is a mean already."""
        return self._mean

    def put(self, pairs: Pairs | None) -> None:
        """Keep these means; None drops the gradient. Wait for a reduction in flight, whose names are needed again."""
        if self._wait is not None:
            with contextlib.suppress(Exception):  # of a fit that an error has ended
                self._wait()
        self._start = self._wait = None
        self._mean = pairs
