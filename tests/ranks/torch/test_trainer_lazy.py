"""Models with lazy modules: the first batch gives them shapes, and rank 0 their values."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss

import hvdtrain
import hvdtrain.torch as hvd

pytestmark = pytest.mark.usefixtures("hvd")

BATCH = 2


def rows(count):
    random = np.random.default_rng(0)
    return random.normal(size=(count, 4)).astype(np.float32), random.normal(size=(count, 1)).astype(np.float32)


def model():
    torch.manual_seed(hvd.rank())  # which rank 0's weights replace
    return torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.Tanh(), torch.nn.LazyLinear(1))


def built(count):
    """Return rank 0's model as its first batch builds it."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.Tanh(), torch.nn.LazyLinear(1))
    with torch.no_grad():
        net(torch.from_numpy(rows(count)[0]))
    return net


def make(net, **options):
    options.setdefault("loss", torch.nn.MSELoss())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return hvdtrain.Trainer(net, optimizer=optimizer, seed=0, **options)


def step(net, batch):
    return hvdtrain.Loss(mse_loss(net(batch[0]), batch[1]))


def values(net):
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])


def one_process(count, *, epochs):
    net = built(count)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, y = map(torch.from_numpy, rows(count))
    for epoch in range(epochs):
        order = hvdtrain.sampling.epoch_order(count, epoch=epoch)
        for start in range(0, count, hvd.size() * BATCH):
            chosen = order[start : start + hvd.size() * BATCH]
            optimizer.zero_grad()
            mse_loss(net(x[chosen]), y[chosen]).backward()
            optimizer.step()
    return values(net)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("options", [{}, {"loss": None, "step": step}])
@pytest.mark.parametrize("count", [1, 13])  # with one sample, the other ranks have none
def test_a_lazy_model_trains_as_one_process_does(count, options, assert_same_on_all_ranks):
    net = model()
    make(net, **options).fit(rows(count), epochs=2, batch_size=BATCH, progress=False)
    assert_same_on_all_ranks(values(net))
    torch.testing.assert_close(values(net), one_process(count, epochs=2), atol=2e-6, rtol=0)


@pytest.mark.world_size(2)
def test_a_lazy_model_is_evaluated_and_resumed_before_its_first_batch(tmp_path_factory, assert_same_on_all_ranks):
    folder = hvd.broadcast_object(str(tmp_path_factory.mktemp("lazy")), root_rank=0)
    net = model()
    trainer = make(net)
    loss = trainer.evaluate(rows(13), batch_size=BATCH)["loss"]
    x, y = map(torch.from_numpy, rows(13))
    with torch.no_grad():
        assert loss == pytest.approx(float(mse_loss(built(13)(x), y)), rel=1e-5)
    trainer.fit(rows(13), epochs=1, batch_size=BATCH, checkpoint_dir=folder, progress=False)
    first = values(copy.deepcopy(net))
    net = model()
    make(net).fit(rows(13), epochs=1, batch_size=BATCH, checkpoint_dir=folder, progress=False)
    assert torch.equal(values(net), first)  # nothing is left to train
    net = model()
    make(net).fit(rows(13), epochs=2, batch_size=BATCH, checkpoint_dir=folder, progress=False)
    assert_same_on_all_ranks(values(net))
    torch.testing.assert_close(values(net), one_process(13, epochs=2), atol=2e-6, rtol=0)


@pytest.mark.world_size(2)
def test_what_needs_shapes_before_the_first_batch_says_what_to_do():
    net = model()
    with pytest.raises(ValueError, match=r"predict .*Received: 0.weight of a lazy module.* Call the model once"):
        make(net).predict(rows(4)[0])
    with pytest.raises(ValueError, match=r"broadcast_parameters needs .* Call the model once on a batch"):
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    with pytest.raises(ValueError, match=r"DistributedOptimizer needs .* Call the model once on a batch"):
        hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
