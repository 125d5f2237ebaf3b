"""Average over all samples what a user's train_step or test_step returns besides the results of metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from hvdtrain.keras.metrics import scalars
from hvdtrain.keras.overrides import STEPS, overrides

log = logging.getLogger("hvdtrain")

_NAMES = "sum.logs."
_COMPARED = 3  # steps: after one, a running mean is the step's own
# A metric that the step does not update is 0. Under its own name, a running mean may be in half precision.
_TOLERANCE, _TOLERANCE_OF_OTHERS = 1e-2, 1e-5


class OwnLogs:
    """Averages the values that are no metric's result, each weighed by its batch's samples.

    Keras reports such values of the last batch. A returned value is the result of a metric if it has been equal to it
    in the first steps, on every rank; the metric may have another name. It is not where the step returns {"loss": loss}
    and does not update the tracker of the loss.
    """

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self.is_used = overrides(model, *STEPS)
        self._metrics: list[str] = []  # names of results; ranks have the same
        self._warned = False
        self.clear()

    def clear(self) -> None:
        """Reset the sums."""
        self._cells: dict[
            str, NDArray[np.float64]
        ] = {}  # sum, samples, and steps in which it was not metric i's result
        self._steps = 0

    def add(self, logs: Mapping[str, Any], samples: int) -> None:
        """Add what a step returned for a batch; without samples, its names alone."""
        if not self.is_used:
            return
        results: dict[str, float] = {}
        if self._steps < _COMPARED:
            self._steps += bool(samples)
            results = scalars(self._model.get_metrics_result())
            self._metrics = sorted(results)
        for name, value in scalars(dict(logs)).items():
            cell = self._cells.setdefault(name, np.zeros(2 + len(self._metrics)))
            if samples:
                cell[:2] += (value * samples, samples)
            if samples and results:
                cell[2:] += [not _is_result(name, value, each, results[each]) for each in self._metrics]

    @property
    def numbers(self) -> NDArray[np.float64]:
        """The numbers to add up over ranks, which have the same names."""
        return np.concatenate([np.zeros(0), *(self._cells[name] for name in sorted(self._cells))])

    def results(self, of_metrics: Mapping[str, float], numbers: NDArray[np.float64]) -> dict[str, float]:
        """Return what the step's names stand for over all ranks.

        Args:
            of_metrics: the results of the model's metrics over all ranks.
            numbers: the sum of all ranks' `numbers`.
        """
        if not self._cells:
            return dict(of_metrics)
        cells = numbers.reshape(len(self._cells), -1)
        found, plain = {}, []
        for name, (total, count, *differed) in zip(sorted(self._cells), cells, strict=True):
            same = [
                each for each, times in zip(self._metrics, differed, strict=True) if not times and each in of_metrics
            ]
            if same and count:
                found[name] = of_metrics[name if name in same else same[0]]
            elif count:
                found[name] = float(total / count)
                plain.append(name)
        if plain and not self._warned:
            self._warned = True
            log.info(
                "%s's step returns %s, which no metric of the model holds: it is averaged over batches, weighed by "
                "their samples. That is exact for a mean over samples. Keep others in a keras.metrics.Metric, as an "
                "attribute of the model, and return its result().",
                self._model.name,
                ", ".join(plain),
            )
        return found

    def snapshot(self) -> Callable[[], None]:
        """Return a function that undoes what is added from now on."""
        cells, steps = {name: cell.copy() for name, cell in self._cells.items()}, self._steps

        def restore() -> None:
            self._cells, self._steps = cells, steps

        return restore

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        """Return what this rank has counted, for its part of a checkpoint."""
        if not self._cells:
            return {}
        names = [*sorted(self._cells), "", *self._metrics]
        return {_NAMES + "|".join(names): self.numbers}

    def load(self, held: Mapping[str, NDArray[Any]]) -> None:
        """Restore what `arrays` returned."""
        for key, numbers in held.items():
            if key.startswith(_NAMES):
                names = key.removeprefix(_NAMES).split("|")
                end = names.index("")
                cells = np.array(numbers, np.float64).reshape(end, -1)
                self._cells, self._metrics = dict(zip(names[:end], cells, strict=True)), names[end + 1 :]
                self._steps = _COMPARED


def _is_result(name: str, value: float, metric: str, result: float) -> bool:
    if name == metric:
        return bool(np.isclose(value, result, rtol=_TOLERANCE, atol=1e-6, equal_nan=True))
    return value != 0 and bool(np.isclose(value, result, rtol=_TOLERANCE_OF_OTHERS, atol=0))
