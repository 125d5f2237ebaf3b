"""Short batches of a prepared loop: scaled in the loader's order, refused in another."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hvdtrain.data.sources import Batch
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.prepare import PreparedLoader


class Steps:
    """Rank 0 of 2 in a pass over 10 samples a rank and 3 of the last step, of which it has 1 or 2."""

    def __init__(self, mine=1):
        self.steps, self._mine = 3, mine

    def epoch(self, epoch, *, shuffle):
        counts = [(4, 8), (4, 8), (self._mine, 3)]
        return (Batch(item=[torch.ones(mine, 2)], local_count=mine, global_count=held) for mine, held in counts)


@pytest.fixture
def loaders(monkeypatch):
    """Return a model, and two loaders that it trains on."""
    monkeypatch.setattr("hvdtrain.torch.prepare.average_buffers", lambda buffers, world: None)
    model, world = torch.nn.Linear(2, 1, bias=False), SimpleNamespace(rank=0, size=2, data_set=None)
    plain = DataLoader(TensorDataset(torch.ones(1, 2)), batch_size=4)
    return model, *(PreparedLoader(plain, Steps(mine), model, world) for mine in (1, 2))


def gradient(model, *batches):
    model.zero_grad()
    sum(model(x).mean() for (x,) in batches).backward()
    return float(model.weight.grad[0, 0])


def test_the_gradients_of_a_short_batch_weigh_its_samples(loaders):
    model, first, second = loaders
    for _ in range(2):
        assert [gradient(model, batch) for batch in first] == [1.0, 1.0, pytest.approx(2 / 3)]
        model.eval()
        for batch in second:  # a validation, within which nothing has a gradient
            model(batch[0])
        model.train()
    for batch in first:
        for _ in range(2):
            gradient(model, batch)
        with torch.no_grad():
            list(second)
    gradient(model, next(iter(first)))  # a first batch alone is whole


def broken(model, loader, other):
    yield "list", lambda: [gradient(model, batch) for batch in list(loader)]
    yield "prefetch", lambda: [gradient(model, batch) for batch, _ in itertools.pairwise([*loader, None])]
    yield "by one", lambda: by_one(model, iter(loader))
    yield "zip", lambda: [gradient(model, *pair) for pair in zip(loader, other, strict=True)]
    yield "sum", lambda: summed(model, loader)
    yield "after", lambda: gradient(model, *loader)


def by_one(model, batches):
    ahead = next(batches)
    for batch in batches:
        gradient(model, ahead)
        ahead = batch
    gradient(model, ahead)


def summed(model, loader):
    seen = []
    for batch in loader:
        seen.append(batch)
        if len(seen) == len(loader):
            gradient(model, *seen)


@pytest.mark.parametrize("case", range(6))
def test_another_order_is_refused_where_a_batch_is_short(loaders, case):
    model, first, second = loaders
    _, loop = list(broken(model, first, second))[case]
    with pytest.raises(HvdTrainError, match=r"weighs the gradients of a short batch.*on rank 0.*drop_last"):
        loop()


def test_a_pass_that_counts_batches_leaves_the_next_one_alone(loaders):
    model, first, second = loaders
    assert sum(1 for _ in second) == 3
    assert [gradient(model, batch) for batch in first] == [1.0, 1.0, pytest.approx(2 / 3)]
