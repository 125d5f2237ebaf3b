"""Gradients of weights that torch has divided over ranks: replicas average their parts after backward."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.recorder import recorder
from hvdtrain.distributed.world import World
from hvdtrain.torch.ops import divided
from hvdtrain.torch.ops.names import parameters_of
from hvdtrain.torch.reduction.exchange import Applied, Exchange, Made
from hvdtrain.torch.reduction.weighted_mean import WeightedMean


class Divided(Exchange):
    """Averages over the replicas what torch has reduced within each; see `Grid.average_gradients`.

    torch's fully_shard makes a gradient of a shard in backward, by no hook that could send it.
    """

    def __init__(self, optimizer: Any, world: World) -> None:
        self._optimizer, self._world = optimizer, world

    def finish(self, made: Made) -> Applied:
        """Average over replicas; the weights of losses are those of all ranks that have data of their own."""
        weights, parameters = made.weights, parameters_of(self._optimizer)
        total = weights.weight
        with recorder.waiting():
            self._world.grid.average_gradients(parameters)
            if total is not None:
                total = float(DataRanks(self._world).allreduce(np.array([total]), name="grid.weights")[0])
        if (factor := WeightedMean((), total, weights.expected).correction()) != 1.0:
            for each in parameters:
                if each.grad is not None:
                    divided.local(each.grad).mul_(factor)
        weights.learn(total)
        return Applied(total == 0, weights.expected / total if total else 1.0)
