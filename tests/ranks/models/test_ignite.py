"""pytorch-ignite's own backend for Horovod: it trains and measures on ranks as in one process."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it imports what torch 2.13 deprecates
    import ignite.distributed as idist
    from ignite.distributed.comp_models.horovod import _HorovodDistModel
    from ignite.engine import Engine, Events
    from ignite.metrics import Accuracy, Loss

pytestmark = pytest.mark.world_size(2, 3)

BATCH, EPOCHS = 4, 3


def data(samples):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(samples, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1) > 2.5).long())


def linear(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(5, 2, dtype=torch.float64)


def train(model, optimizer, loader):
    loss = torch.nn.CrossEntropyLoss()

    def step(engine, batch):
        optimizer.zero_grad()
        found = loss(model(batch[0]), batch[1])
        found.backward()
        optimizer.step()
        return found.item()

    engine = Engine(step)
    if hasattr(loader.sampler, "set_epoch"):
        engine.add_event_handler(Events.EPOCH_STARTED, lambda: loader.sampler.set_epoch(engine.state.epoch - 1))
    engine.run(loader, max_epochs=EPOCHS)
    evaluator = Engine(lambda engine, batch: (model(batch[0]).detach(), batch[1]))
    for name, metric in {"accuracy": Accuracy(), "loss": Loss(loss)}.items():
        metric.attach(evaluator, name)
    return evaluator.run(loader).metrics


def test_ignites_horovod_backend_trains_and_measures_as_one_process(world, monkeypatch):
    samples = 2 * BATCH * world.size  # which ranks and batches divide: ignite repeats samples otherwise
    idist.initialize("horovod")
    try:
        assert (idist.backend(), idist.get_world_size(), idist.get_rank()) == ("horovod", world.size, world.rank)
        assert isinstance(idist.utils._model, _HorovodDistModel)
        model = idist.auto_model(linear(world.rank))
        optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
        loader = idist.auto_dataloader(data(samples), batch_size=BATCH * world.size, shuffle=False)
        assert len(loader) == 2
        found = train(model, optimizer, loader)
        assert idist.all_reduce(torch.tensor(world.rank + 1.0)).item() == sum(range(1, world.size + 1))
    finally:
        # Horovod stays: other tests use it.
        monkeypatch.setattr(idist.utils._model, "finalize", lambda: None)
        idist.finalize()
    alone = linear(0)
    plain = torch.optim.SGD(alone.parameters(), lr=0.5, momentum=0.9)
    expected = train(alone, plain, DataLoader(data(samples), batch_size=BATCH * world.size))
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    assert found == pytest.approx(expected, abs=1e-6)  # ignite adds up metrics in float32
