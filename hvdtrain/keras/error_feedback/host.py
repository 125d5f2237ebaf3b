"""Compression with error feedback on the TensorFlow and JAX backends: on the host, where steps call it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.distributed.buckets import fill_in_order
from hvdtrain.keras import basics, ops
from hvdtrain.keras.error_feedback.schemes import Array, ErrorFeedback, Ranks, Stages, Wait
from hvdtrain.keras.error_feedback.schemes import compressor_of as compressor_of
from hvdtrain.keras.reduction import GradientReduction, by_dtype

_BUCKET_BYTES = 25 * 2**20  # that are exchanged together, at most; a larger gradient alone


def start(
    compressor: ErrorFeedback, gradients: Sequence[Array], names: Sequence[str], name: str, how: GradientReduction
) -> Callable[[], list[Array]]:
    """Start to average gradients over ranks; return a function that waits for the means."""
    return _InBackground(functools.partial(_run, compressor, gradients, names, name, how)).result


def _run(
    compressor: ErrorFeedback, gradients: Sequence[Array], names: Sequence[str], name: str, how: GradientReduction
) -> list[Array]:
    """Return the means. All ranks start the same collectives in the same order."""
    ranks = Ranks(how.rank(), how.size(), functools.partial(ops.begin, process_set=how.process_set))
    factors = how.scales
    before = factors["prescale_factor"] * (ranks.size if how.op == basics.Sum else 1)
    results: list[Any] = [None] * len(gradients)
    in_flight: tuple[list[int], Stages, Wait] | None = None

    def finish() -> None:
        if in_flight is not None:
            bucket, stages, wait = in_flight
            for index, mean in zip(bucket, _finish(stages, wait), strict=True):
                results[index] = mean

    buckets = fill_in_order([each.nbytes for each in gradients], _BUCKET_BYTES)
    for number, bucket in enumerate(by_dtype(buckets, [each.dtype.name for each in gradients])):
        given, of_given = [gradients[index] for index in bucket], [names[index] for index in bucket]
        stages = compressor.exchange(
            given, of_given, ranks, f"{name}.{number}", before=before, after=factors["postscale_factor"]
        )
        with np.errstate(all="ignore"):  # of numbers that are not finite, which are found later
            wait = next(stages)
        finish()  # the bucket before, while this one's first collective is in flight
        in_flight = bucket, stages, wait
    finish()
    return results


def _finish(stages: Stages, wait: Wait) -> list[Array]:
    """Go through the collectives of an exchange, and return its result."""
    while True:
        received = wait()
        try:
            with np.errstate(all="ignore"):
                wait = stages.send(received)
        except StopIteration as end:
            means: list[Array] = end.value
            return means


class _InBackground(threading.Thread):
    """Runs a function that returns arrays, while steps compute. It does not keep a process alive."""

    def __init__(self, function: Callable[[], list[Array]]) -> None:
        super().__init__(name="hvdtrain-compression", daemon=True)
        self._function = function
        self._result: list[Array] = []
        self._error: Exception | None = None
        self.start()

    def run(self) -> None:
        """Call the function."""
        try:
            self._result = self._function()
        except Exception as error:  # noqa: BLE001 - raised by `result`
            self._error = error

    def result(self) -> list[Array]:
        """Wait, and return the result, or raise what the function raised."""
        self.join()
        if self._error is not None:
            raise self._error
        return self._result
