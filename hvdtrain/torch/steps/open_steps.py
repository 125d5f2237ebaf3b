"""Steps that close before every rank is done (`Trainer(cutoff=...)`): this rank's batches of them.

`reduction.cut` closes them, and averages what ranks have contributed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hvdtrain.adapter import Fault, OpenStep, Options
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.recorder import recorder
from hvdtrain.distributed.world import World
from hvdtrain.torch.reduction.cut import CutExchange
from hvdtrain.torch.reduction.loss_weights import Counted
from hvdtrain.torch.steps.attempt import Attempt
from hvdtrain.torch.steps.metrics import Totals
from hvdtrain.torch.steps.update import Update

Forward = Callable[..., tuple[Tensor, Counted]]


class OpenSteps:
    """Takes a rank's open steps, with one optimizer.

    Args:
        forward: (batch, what counts of it as far as it is known) -> (its mean loss, what counts); adds to the metrics.
    """

    def __init__(
        self, model: nn.Module, update: Update, totals: Totals, forward: Forward, world: World, options: Options
    ) -> None:
        self._update, self._forward, self._world, self._options = update, forward, world, options
        self._attempt = Attempt(model, totals)
        self._dense_only = update.exchanges.dense_only("cutoff", instead="leave out cutoff")
        self._exchange: CutExchange | None = None
        self._losses: list[Tensor] = []

    def take(self, step: OpenStep) -> Fault | None:
        """Contribute to a step while it is open, then apply the mean; return why all ranks refused it, or None."""
        update = self._update
        if self._exchange is None:
            named = {parameter: update.name_of(parameter) or "" for parameter in update.parameters}
            self._exchange = CutExchange(named, update.exchanges.used.compressor, self._options, self._world)
            self._exchange.start()
        exchange, self._losses = self._exchange, []
        exchange.check(update.parameters)
        expected = update.begin_open(step.samples)
        exchange.open(step, expected=expected)
        while exchange.is_open and len(step.batches) < step.planned[DataRanks(self._world).rank]:
            if not self._compute(exchange, step):
                break
        mean = exchange.wait()
        step.counts = mean.counts
        is_cut = bool((mean.counts < step.whole).any())
        if update.step_with_mean(mean.gradients, mean.weight, mean.samples, is_cut=is_cut):
            return None
        loss = float(torch.stack(self._losses).mean()) if self._losses else float("nan")
        return Fault(update.drop_gradients(), update.name_of(mean.fault), loss, list(step.batches))

    def _compute(self, exchange: CutExchange, step: OpenStep) -> bool:
        """Compute a batch and contribute it. If the step has closed meanwhile, undo what it changed; return False."""
        update, weights = self._update, self._update.weights
        recorder.ended("compute")
        batch = step.read()
        recorder.ended("data")
        if not exchange.is_open:
            return False
        self._attempt.begin(draws=True)
        loss, counted = self._forward(batch, weights.count(batch))
        weights.counted.append(counted)
        if counted.weight:
            update.backward(loss, weights.factor(-1))
            self._dense_only.check(update.parameters)
        if exchange.contribute(counted.weight, batch.local_count):
            self._losses.append(loss.detach())
            step.contribute()
            return True
        # Undo it: a run that repeats this one's record does not compute this batch in this step.
        self._attempt.repeat()
        update.optimizer.zero_grad()
        return False

    def end(self) -> None:
        """End the thread. A collective, unless a rank has failed or Horovod was shut down, which ends it too."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.end()

    def abandon(self) -> None:
        """End the threads of all ranks: this rank takes no further step."""
        if self._exchange is not None:
            self._exchange.fail()
