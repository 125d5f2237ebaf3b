"""Labels that a loss ignores, and class weights: ranks weigh what they hold, and do not wait to know it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hvdtrain
import hvdtrain.torch as hvd
from hvdtrain.torch.losses import LossWeights

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
