"""LBFGS in the Trainer: all ranks search along one line, and train the weights of one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hvdtrain
import hvdtrain.torch as hvd
from hvdtrain.callbacks import Callback, Checkpoint

pytestmark = [pytest.mark.usefixtures("hvd"), pytest.mark.world_size(2, 3)]

BATCH = 3
LOSS = torch.nn.CrossEntropyLoss()


def data():
    """Return samples whose last step has one sample, on rank 0; some labels are ignored, all of rank 1's first."""
    random = np.random.default_rng(0)
    rows = hvd.size() * BATCH * 4 + 1
    x, y = random.normal(size=(rows, 4)), random.integers(0, 3, rows)
    order = hvdtrain.sampling.epoch_order(rows)
    y[order[1 : hvd.size() * BATCH : hvd.size()]] = -100
    y[order[-5]] = -100
    return x, y


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).double()


def lbfgs(net):
    return torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4, history_size=3, line_search_fn="strong_wolfe")


def own_step(net, batch):
    x, y = batch
    count = (y != -100).sum()
    mean = torch.nn.functional.cross_entropy(net(x), y, reduction="sum") / count.clamp(min=1)
    return hvdtrain.Loss(mean, count)


def trainer(net, **options):
    options = options or {"loss": LOSS}
    return hvdtrain.Trainer(net, optimizer=lbfgs(net), **options)


def one_process(net, x, y, *, rows, epochs):
    optimizer, evaluations = lbfgs(net), 0
    for epoch in range(epochs):
        order = hvdtrain.sampling.epoch_order(len(x), epoch=epoch)
        for chosen in np.split(order, range(rows, len(x), rows)):
            inputs, targets = torch.from_numpy(x[chosen]), torch.from_numpy(y[chosen])

            def closure(inputs=inputs, targets=targets):
                nonlocal evaluations
                evaluations += 1
                optimizer.zero_grad()
                loss = LOSS(net(inputs), targets)
                loss.backward()
                return loss

            optimizer.step(closure)
    return net, evaluations


@pytest.mark.parametrize("options", [{"loss": LOSS}, {"loss": LOSS, "accumulate": 2}, {"step": own_step}])
def test_lbfgs_equals_one_process(options, assert_same_on_all_ranks):
    (x, y), net = data(), model()
    trainer(net, **options).fit((x, y), epochs=2, batch_size=BATCH, progress=False)
    rows = hvd.size() * BATCH * options.get("accumulate", 1)
    alone, evaluations = one_process(model(), x, y, rows=rows, epochs=2)
    for one, other in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert_same_on_all_ranks(*net.parameters())
    assert evaluations > 4 * len(x) / rows  # the line was searched


def test_lbfgs_resumes_with_the_same_bits(shared_tmp_path):
    class Stop(Callback):
        def on_step_end(self, trainer, step):
            if trainer.global_step == 7:
                raise KeyboardInterrupt

    straight, resumed, saved = model(), model(), Checkpoint(shared_tmp_path, every_steps=6)
    options = {"epochs": 3, "batch_size": BATCH, "progress": False}
    trainer(straight).fit(data(), **options)
    with pytest.raises(KeyboardInterrupt):
        trainer(model()).fit(data(), callbacks=[saved, Stop()], **options)
    trainer(resumed).fit(data(), callbacks=[saved], **options)
    assert all(map(torch.equal, straight.parameters(), resumed.parameters()))


def test_ranks_whose_searches_differ_are_told_so():
    class Search(torch.optim.Optimizer):
        """Stands for a device whose arithmetic differs: rank 0 evaluates once more."""

        def step(self, closure):
            for _ in range(2 if hvd.rank() else 3):
                closure()

    net = model()
    optimizer = Search(net.parameters(), {"lr": 0.1})
    with pytest.raises(hvdtrain.errors.DesyncError, match="a different number of times"):
        hvdtrain.Trainer(net, optimizer=optimizer, loss=LOSS).fit(data(), batch_size=BATCH, progress=False)
