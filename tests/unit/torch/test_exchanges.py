"""What the exchanges of one process keep, and what they ask of a step."""

from __future__ import annotations

import numpy as np
import torch

from hvdtrain.distributed.world import SoloWorld
from hvdtrain.torch.reduction.alone import Alone
from hvdtrain.torch.reduction.exchange import Made
from hvdtrain.torch.reduction.loss_weights import LossWeights


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)


def test_one_process_does_not_keep_which_gradients_ranks_have_packed() -> None:
    exchange = Alone(optimizer())
    exchange.packed = np.array([1, 0], np.uint8)
    assert exchange.packed is None


def test_only_a_delayed_exchange_asks_for_the_loss_scale_on_which_a_gpu_would_wait() -> None:
    asked: list[bool] = []

    def scale() -> float:
        asked.append(True)
        return 1.0

    Alone(optimizer()).finish(Made(LossWeights(torch.nn.MSELoss(), SoloWorld()), scale, lambda: None))
    assert not asked
