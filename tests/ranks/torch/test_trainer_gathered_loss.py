"""A loss that compares samples, over the gathered rows of all ranks in a step of the user's own: as in one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

import hvdtrain
import hvdtrain.torch as hvd

pytestmark = pytest.mark.usefixtures("hvd")

BATCH = 4
OPTIONS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def multiply_gradient(value, factor):
    return value + (factor - 1) * (value - value.detach())


def compare(one, other, labels):
    """Return a contrastive loss of pairs, and a Dice loss over all rows and labels."""
    contrast = functional.cross_entropy(one @ other.T / 0.2, torch.arange(len(one)))
    chosen = one.softmax(1).gather(1, labels[:, None]).sum()
    return contrast + 1 - 2 * chosen / (one.softmax(1).sum() + len(one))


def embed(model, batch):
    first, second, labels = batch
    return torch.stack([functional.normalize(model(first), dim=1), model(second)], 1), labels


def entropy(pairs, labels):
    return functional.cross_entropy(pairs[:, 0], labels)


def step(model, batch):
    pairs, labels = embed(model, batch)
    loss = compare(*hvd.allgather(pairs).unbind(1), hvd.allgather(labels))
    loss = multiply_gradient(loss, hvd.size())
    # The mean of no samples is NaN.
    return hvdtrain.Loss(loss + entropy(pairs, labels) if len(labels) else loss + 0.0 * pairs.sum())


def named(model, batch):
    yield "all", step(model, batch)


def data(rows):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 6)).astype(np.float32)
    moved = x + 0.1 * random.normal(size=x.shape).astype(np.float32)
    labels = random.integers(0, 5, rows)
    return torch.utils.data.TensorDataset(*map(torch.from_numpy, (x, moved, labels)))


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))


def loader(rows, *, shuffle=True):
    return torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=shuffle)


def trainer_of(model, *, by_name=False, **options):
    optimizer = torch.optim.SGD(model.parameters(), **OPTIONS)
    options["step"] = named if by_name else step
    return hvdtrain.Trainer(model, optimizer={"all": optimizer} if by_name else optimizer, **options)


def one_process(rows, *, accumulate, clip_norm, epochs):
    """Return the model of one process, and the mean loss of its last epoch."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), **OPTIONS)
    whole = hvd.size() * BATCH
    for epoch in range(epochs):
        order = hvdtrain.sampling.epoch_order(len(rows), epoch=epoch)
        losses = []
        for start in range(0, len(rows), whole * accumulate):
            chosen = order[start : start + whole * accumulate]
            optimizer.zero_grad()
            for first in range(0, len(chosen), whole):
                part = chosen[first : first + whole]
                pairs, labels = embed(model, rows[part.tolist()])
                loss = compare(*pairs.unbind(1), labels) + entropy(pairs, labels)
                (loss * len(part) / len(chosen)).backward()
                losses.append(float(loss.detach()) * len(part))
            if clip_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
    return model, sum(losses) / len(rows)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("tail", [0, 1, 3])  # more samples than whole steps: with one, rank 0 alone has it
@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "clip_norm": 0.5}, {"by_name": True}])
def test_gathered_rows_train_the_weights_of_one_process(tail, options):
    rows = data(hvd.size() * BATCH * 3 + tail)
    model = net()
    history = trainer_of(model, **options).fit(loader(rows), epochs=2, progress=False, run_dir=None)
    how = {"accumulate": options.get("accumulate", 1), "clip_norm": options.get("clip_norm")}
    expected, loss = one_process(rows, epochs=2, **how)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)
    assert history["all_loss" if "by_name" in options else "loss"][-1] == pytest.approx(loss, rel=1e-5)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("by_name", [False, True])
def test_evaluation_takes_a_rank_without_samples_along(by_name):
    rows = data(2 * BATCH * 2 + 1)
    trainer = trainer_of(net(), by_name=by_name)
    [found] = [value for name, value in trainer.evaluate(loader(rows, shuffle=False)).items() if name.endswith("loss")]
    losses = []
    for first in range(0, len(rows), 2 * BATCH):
        part = rows[first : first + 2 * BATCH]
        with torch.no_grad():
            pairs, labels = embed(net(), part)
            losses += [float(compare(*pairs.unbind(1), labels) + entropy(pairs, labels))] * len(labels)
    assert found == pytest.approx(sum(losses) / len(rows), rel=1e-5)


@pytest.mark.world_size(2)
def test_a_run_resumed_before_the_tail_calls_step_on_all_ranks(shared_tmp_path):
    rows = data(2 * BATCH * 2 + 1)
    straight, model = net(), net()
    trainer_of(straight).fit(loader(rows), epochs=2, progress=False, run_dir=None)
    saved = [hvdtrain.callbacks.Checkpoint(shared_tmp_path, every_steps=2)]
    trainer_of(net()).fit(loader(rows), epochs=1, steps=2, callbacks=saved, progress=False, run_dir=None)
    trainer_of(model).fit(loader(rows), epochs=2, callbacks=saved, progress=False, run_dir=None)
    assert all(map(torch.equal, model.parameters(), straight.parameters()))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("options", [{"accumulate": 2, "cutoff": 0.75}, {"micro_batch": "auto"}])
def test_options_that_cannot_have_collectives_in_a_step_are_refused(options):
    with pytest.raises(ValueError, match="Collectives in a step need all ranks"):
        trainer_of(net(), **options).fit(loader(data(32)), progress=False, run_dir=None)
