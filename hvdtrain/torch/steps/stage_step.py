"""Compute the batches of a pipeline: all its stages together, with the loss on the last one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdtrain.adapter import Loss
from hvdtrain.data.sources import Batch
from hvdtrain.torch.grid.pipeline import Stage
from hvdtrain.torch.ops.functions import broadcast_object
from hvdtrain.torch.reduction.loss_weights import Counted, LossWeights
from hvdtrain.torch.steps.compute import LossStep, ToDevice

Add = Callable[[Any, Any, torch.Tensor, Counted], None]  # to the metrics: outputs, targets, loss, what counts


class StageStep:
    """Trains and evaluates a `Stage`; only the last stage has outputs, losses and metrics.

    Args:
        stage: this rank's.
        step: computes the loss, on the last stage.
        to_device: moves a batch's arrays.
        add: adds a batch to the metrics.
    """

    def __init__(self, stage: Stage, step: LossStep, to_device: ToDevice, rank: int, add: Add) -> None:
        self._stage, self._step, self._to_device, self._rank, self._add = stage, step, to_device, rank, add

    def train(self, batches: Sequence[Batch], weights: LossWeights, scaled: Callable[..., torch.Tensor]) -> None:
        """Add the gradients of micro-batches, each by its weight, and count them in the metrics.

        Args:
            batches: micro-batches; the ranks of a replica have the same.
            weights: of the micro-batches.
            scaled: returns what is differentiated, of a loss and its factor.
        """
        counts = [index for index, batch in enumerate(batches) if batch.local_count and weights.counted[index].weight]
        inputs = [self._inputs(batches[index]) for index in counts]

        def loss_of(outputs: Any, number: int) -> torch.Tensor:
            index = counts[number]
            found = self._loss_of(outputs, batches[index])
            self._add(found.outputs, found.targets, found.mean, weights.counted[index])
            return scaled(found.mean, weights.factor(index))

        if counts:
            self._stage.run(inputs, loss_of)
        for index, batch in enumerate(batches):
            if batch.local_count and not weights.counted[index].weight:  # metrics and running statistics take all
                self.evaluate(batch, weights.counted[index])

    def evaluate(self, batch: Batch, counted: Counted) -> None:
        """Compute a batch without gradients, and count it in the metrics."""
        outputs = self._stage.outputs(self._inputs(batch))
        if self._stage.is_last:
            with torch.no_grad():
                found = self._loss_of(outputs, batch)
                self._add(found.outputs, found.targets, found.mean, counted)

    def predict(self, inputs: Any) -> Any:
        """Return the model's outputs, on all stages."""
        return self._stage.shared(self._stage.outputs(self._to_device(inputs)))

    def share(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the last stage's metrics, on all stages."""
        grid = self._stage.grid
        root = grid.rank_of(stage=grid.stages - 1)
        found: dict[str, float] = broadcast_object(metrics, root, "grid.metrics", grid.stages_set)
        return found

    @property
    def micro_batches(self) -> int:
        """The number of parts of a batch."""
        return self._stage.micro_batches

    @property
    def has_metrics(self) -> bool:
        """True on the last stage."""
        return self._stage.is_last

    def _inputs(self, batch: Batch) -> Any:
        return self._to_device(batch.inputs)

    def _loss_of(self, outputs: Any, batch: Batch) -> Loss:
        """Return the loss of a batch, a mean over it, unless the loss is a sum."""
        if batch.sample_weight is not None:
            raise ValueError(
                "A torch model takes (inputs, targets): weigh samples in your own loss. Received: a third item, "
                f"sample_weight, on rank {self._rank}"
            )
        with self._stage.within(batch.local_count):
            return self._step.of_outputs(outputs, batch)
