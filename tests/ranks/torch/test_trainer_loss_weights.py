"""Labels that a loss ignores, and class weights: ranks weigh what they hold, and do not wait to know it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hvdtrain
import hvdtrain.torch as hvd
from hvdtrain.torch.reduction.loss_weights import LossWeights

pytestmark = pytest.mark.usefixtures("hvd")

BATCH, STEPS = 4, 6
OPTIONS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def labelled(seed, *, share_ignored, classes=3, places=()):
    random = np.random.default_rng(seed)
    rows = hvd.size() * BATCH * STEPS - 1
    x = random.normal(size=(rows, 4, *places)).astype(np.float32)
    y = random.integers(0, classes, size=(rows, *places))
    return x, np.where(random.random(y.shape) < share_ignored, -100, y)


def net(places=()):
    torch.manual_seed(0)
    return torch.nn.Conv2d(4, 3, 1) if places else torch.nn.Linear(4, 3)


def one_process(x, y, loss, *, accumulate, clip_norm, places):
    alone = net(places)
    plain = torch.optim.SGD(alone.parameters(), **OPTIONS)
    order = hvdtrain.sampling.epoch_order(len(x))
    rows = hvd.size() * BATCH * accumulate
    for start in range(0, len(x), rows):
        chosen = order[start : start + rows]
        if (y[chosen] == -100).all():
            continue
        plain.zero_grad()
        loss(alone(torch.from_numpy(x[chosen])), torch.from_numpy(y[chosen])).backward()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(alone.parameters(), clip_norm)
        plain.step()
    return alone


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("share_ignored", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("class_weights", [None, [0.01, 2.0, 0.5]])
@pytest.mark.parametrize(("accumulate", "clip_norm", "places"), [(1, None, ()), (2, 0.1, ()), (1, 0.1, (2, 3))])
def test_ignored_labels_and_class_weights_equal_one_process(
    share_ignored, class_weights, accumulate, clip_norm, places
):
    x, y = labelled(1, share_ignored=share_ignored, places=places)
    loss = torch.nn.CrossEntropyLoss(weight=None if class_weights is None else torch.tensor(class_weights))
    model = net(places)
    optimizer = torch.optim.SGD(model.parameters(), **OPTIONS)
    trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=loss, accumulate=accumulate, clip_norm=clip_norm)
    history = trainer.fit((x, y), batch_size=BATCH, progress=False)
    alone = one_process(x, y, loss, accumulate=accumulate, clip_norm=clip_norm, places=places)
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=0)
    assert np.isfinite(history["loss"]).all()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("share_ignored", [0.0, 0.2])
def test_the_sum_of_labels_costs_no_exchange_of_its_own(monkeypatch, share_ignored):
    asked = []
    ask = LossWeights._exchange
    monkeypatch.setattr(LossWeights, "_exchange", lambda self, weight: asked.append(weight) or ask(self, weight))
    x, y = labelled(2, share_ignored=share_ignored)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss())
    trainer.fit((x, y), epochs=2, batch_size=BATCH, progress=False)
    assert len(asked) == 1  # in the first step, when nothing is known yet


def first(outputs, _):
    return outputs[:, 0]


def ignored_on_rank_1():
    """Return samples of two steps, the first of which has no label that counts on rank 1."""
    x, y = labelled(3, share_ignored=0.0)
    order = hvdtrain.sampling.epoch_order(rows := 2 * hvd.size() * BATCH)
    y[order[1 : hvd.size() * BATCH : hvd.size()]] = -100
    return x[:rows], y[:rows]


@pytest.mark.world_size(2)
def test_samples_without_labels_count_in_metrics_and_statistics():
    x, y = ignored_on_rank_1()
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4, affine=False), net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss(), metrics=[first])
    history = trainer.fit((x, y), batch_size=BATCH, progress=False)
    assert int(model[0].num_batches_tracked) == 2
    order = hvdtrain.sampling.epoch_order(len(x))
    shares = [order[rank + begin : begin + 2 * BATCH : 2] for begin in (0, 2 * BATCH) for rank in range(2)]
    with torch.no_grad():
        seen = torch.cat(
            [torch.nn.functional.batch_norm(torch.from_numpy(x[s]), None, None, training=True) for s in shares]
        )
        assert history["first"][0] == pytest.approx(float(model[1](seen)[:, 0].mean()), abs=1e-6)
        found = trainer.evaluate((x, y), batch_size=2)["first"]
        assert found == pytest.approx(float(model.eval()(torch.from_numpy(x))[:, 0].mean()), abs=1e-6)


@pytest.mark.world_size(2)
def test_samples_without_labels_count_in_synchronized_statistics():
    x, y = ignored_on_rank_1()
    ours, alone = (torch.nn.Sequential(net(), norm(3)) for norm in (hvd.SyncBatchNorm, torch.nn.BatchNorm1d))
    optimizer = torch.optim.SGD(ours.parameters(), **OPTIONS)
    hvdtrain.Trainer(ours, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss()).fit(
        (x, y), batch_size=BATCH, progress=False
    )
    plain, order = torch.optim.SGD(alone.parameters(), **OPTIONS), hvdtrain.sampling.epoch_order(len(x))
    for chosen in np.split(order, 2):
        plain.zero_grad()
        torch.nn.CrossEntropyLoss()(alone(torch.from_numpy(x[chosen])), torch.from_numpy(y[chosen])).backward()
        plain.step()
    for (name, one), other in zip(ours.state_dict().items(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
