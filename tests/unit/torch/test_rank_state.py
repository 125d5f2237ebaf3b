"""What ranks hold of a torch model of their own, on another number of ranks."""

from __future__ import annotations

import torch

from hvdtrain.distributed import rank_state
from hvdtrain.torch.steps import training_state


def test_batch_normalization_of_two_ranks_resumes_on_one():
    models = [torch.nn.BatchNorm1d(2) for _ in range(2)]
    for value, model in enumerate(models):
        model(torch.full((4, 2), float(value)))
    held = rank_state.combine([training_state.rank_state(model) for model in models], rank=0, size=1)
    training_state.set_rank_state(held, alone := torch.nn.BatchNorm1d(2))
    assert alone.num_batches_tracked == 1
    torch.testing.assert_close(alone.running_mean, (models[0].running_mean + models[1].running_mean) / 2)
