"""Compute the batches of a pipeline: all its stages together, with the loss on the last one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hvdtrain.adapter import Loss
from hvdtrain.data.sources import Batch
from hvdtrain.torch.grid.pipeline import Stage, check_inputs
from hvdtrain.torch.ops.functions import broadcast_object
from hvdtrain.torch.reduction.loss_weights import Counted, LossWeights
from hvdtrain.torch.steps.compute import LossStep, ToDevice, move, sum_of_nothing
from hvdtrain.torch.steps.equal_rows import EqualRows

Add = Callable[[Any, Any, torch.Tensor, Counted], None]  # to the metrics: outputs, targets, loss, what counts


class StageStep:
    """Trains and evaluates a `Stage`; only the last stage has outputs, losses and metrics.

    Args:
        stage: this rank's.
        step: computes the loss, on the last stage.
        to_device: moves a batch's arrays.
        add: adds a batch to the metrics.

    Raises:
        ValueError: on all ranks, if no stage has parameters that can be trained.
    """

    def __init__(self, stage: Stage, step: LossStep, to_device: ToDevice, rank: int, add: Add) -> None:
        self._stage, self._step, self._to_device, self._rank, self._add = stage, step, to_device, rank, add
        self._rows = EqualRows(stage.grid)
        trains = any(parameter.requires_grad for parameter in stage.parameters())
        if not stage.grid.world.allreduce(np.array([trains], np.int32), "max", name="grid.trains")[0]:
            raise ValueError(f"No stage of the model has trainable parameters. Received: {stage.grid}")

    def train(self, batches: Sequence[Batch], weights: LossWeights, scaled: Callable[..., torch.Tensor]) -> None:
        """Add the gradients of micro-batches, each by its weight, and count them in the metrics.

        Args:
            batches: micro-batches; the ranks of a replica have the same.
            weights: of the micro-batches.
            scaled: returns what is differentiated, of a loss and its factor.
        """
        inputs = [self._inputs(batch) for batch in batches]
        samples = [batch.local_count for batch in batches]
        rows = self._rows.agree(inputs, samples, [each.weight for each in weights.counted])
        trained = [index for index, each in enumerate(rows) if each.most and each.is_weighed]

        def loss_of(outputs: Any, number: int) -> torch.Tensor:
            index = trained[number]
            if not samples[index]:
                return scaled(sum_of_nothing(outputs))
            found = self._count(outputs, batches[index], weights.counted[index])
            if not weights.counted[index].weight:  # the mean of no labels is NaN, and its gradient is zero
                return scaled(sum_of_nothing(outputs))
            return scaled(found.mean, weights.factor(index))

        if trained:
            filled = [self._rows.fill(inputs[index], samples[index], rows[index].most) for index in trained]
            self._stage.run(filled, loss_of)
        for index, batch in enumerate(batches):
            if rows[index].most and not rows[index].is_weighed:  # metrics and running statistics take all
                self._evaluate(inputs[index], rows[index].most, batch, weights.counted[index])

    def evaluate(self, batch: Batch, counted: Counted) -> None:
        """Compute a batch without gradients, and count it in the metrics."""
        inputs = self._inputs(batch)
        (rows,) = self._rows.agree([inputs], [batch.local_count], [counted.weight])
        if rows.most:
            self._evaluate(inputs, rows.most, batch, counted)

    def _evaluate(self, inputs: Any, rows: int, batch: Batch, counted: Counted) -> None:
        outputs = self._stage.outputs(self._rows.fill(inputs, batch.local_count, rows))
        if self._stage.is_last and batch.local_count:
            with torch.no_grad():
                self._count(outputs, batch, counted)

    def _count(self, outputs: Any, batch: Batch, counted: Counted) -> Loss:
        """Return the loss of the samples among these rows, and count both in the metrics."""
        found = self._loss_of(move(lambda each: each[: batch.local_count], outputs), batch)
        self._add(found.outputs, found.targets, found.mean, counted)
        return found

    def predict(self, inputs: Any) -> Any:
        """Return the model's outputs, on all stages."""
        inputs = self._to_device(inputs)
        check_inputs(inputs)
        count = len(inputs)
        (rows,) = self._rows.agree([inputs], [count], [0.0])
        outputs = self._stage.shared(self._stage.outputs(self._rows.fill(inputs, count, rows.most)))
        return move(lambda each: each[:count], outputs)

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
        inputs = self._to_device(batch.inputs)
        if batch.local_count:
            check_inputs(inputs)
        return inputs

    def _loss_of(self, outputs: Any, batch: Batch) -> Loss:
        """Return the loss of a batch, a mean over it, unless the loss is a sum."""
        if batch.sample_weight is not None:
            raise ValueError(
                "A torch model takes (inputs, targets): weigh samples in your own loss. Received: a third item, "
                f"sample_weight, on rank {self._rank}"
            )
        with self._stage.within(batch.local_count):
            return self._step.of_outputs(outputs, batch)
