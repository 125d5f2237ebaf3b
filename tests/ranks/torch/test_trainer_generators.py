"""Samplers and datasets with random generators of their own: ranks resume with the orders that rank 0 drew."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from stopping import StopAt, StoppedError
from torch.utils.data import DataLoader, Dataset, IterableDataset, SubsetRandomSampler

import hvdtrain
from hvdtrain.callbacks import Checkpoint

SAMPLES, BATCH, EPOCHS, STEPS = 22, 3, 3, 4  # steps of an epoch on two ranks


class Rows(Dataset):
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor([float(index), self.rng.random()], dtype=torch.float32)


class Stream(IterableDataset):
    def __init__(self):
        self.rng = np.random.default_rng(5)

    def __iter__(self):
        return (torch.tensor([float(i), 0.0]) for i in self.rng.permutation(SAMPLES).tolist())


def sampled(rank):  # each rank's generator is another one: rank 0's order counts
    sampler = SubsetRandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(rank))
    return DataLoader(Rows(rank), BATCH, sampler=sampler)


KINDS = {"sampler": sampled, "stream": lambda _: DataLoader(Stream(), BATCH)}


def train(world, data, callbacks=()):
    """Train on `data`; return each rank's samples by epoch."""
    seen = [[] for _ in range(EPOCHS)]

    def step(model, batch):
        seen[trainer.epoch] += batch.tolist()
        return hvdtrain.Loss(model(batch).square().mean())

    model = torch.nn.Linear(2, 1)
    trainer = hvdtrain.Trainer(model, optimizer=torch.optim.SGD(model.parameters(), 1e-4), step=step)
    try:
        trainer.fit(data, epochs=EPOCHS, batch_size=BATCH, callbacks=callbacks, progress=False, run_dir=None)
    except StoppedError:
        assert callbacks
    return world.allgather_object(seen)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stop", [STEPS, STEPS + 2])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_resume_with_the_order_of_a_run_that_never_stopped(world, shared_tmp_path, kind, stop):
    straight = train(world, KINDS[kind](world.rank))
    before = train(world, KINDS[kind](world.rank), [Checkpoint(shared_tmp_path, every_steps=1), StopAt(stop)])
    after = train(world, KINDS[kind](world.rank), [Checkpoint(shared_tmp_path, every_steps=1)])
    for epoch in range(EPOCHS):
        joined = [old[epoch] + new[epoch] for old, new in zip(before, after, strict=True)]
        assert joined == [rank[epoch] for rank in straight]
        assert sorted(row[0] for rank in straight for row in rank[epoch]) == list(range(SAMPLES))
