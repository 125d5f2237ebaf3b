"""A step of the user's own: ranks with unequal counts take the step of one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

import hvdtrain
import hvdtrain.torch as hvd
from hvdtrain.torch.reduction.loss_weights import LossWeights

pytestmark = pytest.mark.usefixtures("hvd")

BATCH = 3
OPTIONS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


class Tagger(torch.nn.Module):
    def __init__(self, *, norm=False):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 5)
        self.norm = hvd.SyncBatchNorm(5) if norm else torch.nn.Identity()
        self.head = torch.nn.Linear(5, 4)

    def forward(self, ids, labels=None):  # both: (batch, length)
        hidden = self.embed(ids).transpose(1, 2)
        return self.head(self.norm(hidden).transpose(1, 2))


def token_loss(logits, labels):
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def step(model, batch):
    count = (batch["labels"] != -100).sum()
    logits = model(**batch)
    mean = token_loss(logits, batch["labels"]) / count.clamp(min=1)
    return hvdtrain.Loss(mean, count, outputs=logits.flatten(0, 1), targets=batch["labels"].flatten())


class Sentences(torch.utils.data.Dataset):
    """Sentences of 1 to 9 tokens; those of `nothing` have no labels."""

    def __init__(self, rows, *, nothing=()):
        random = np.random.default_rng(0)
        self.ids = [torch.from_numpy(random.integers(1, 11, size=1 + row * 5 % 9)) for row in range(rows)]
        self.labels = [ids % 4 for ids in self.ids]
        for row in nothing:
            self.labels[row] = torch.full_like(self.ids[row], -100)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, row):
        return {"ids": self.ids[row], "labels": self.labels[row]}


def padded(rows):
    pads = {"ids": 0, "labels": -100}
    return {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=pad)
        for name, pad in pads.items()
    }


def loader(rows):
    return torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True, collate_fn=padded)


def tagger(**options):
    torch.manual_seed(0)
    return Tagger(**options)


def make(model, **options):
    options.setdefault("step", step)
    return hvdtrain.Trainer(model, optimizer=torch.optim.SGD(model.parameters(), **OPTIONS), **options)


def one_process(rows, *, accumulate=1, clip_norm=None, epochs=1):
    model = tagger()
    optimizer = torch.optim.SGD(model.parameters(), **OPTIONS)
    for epoch in range(epochs):
        order = hvdtrain.sampling.epoch_order(len(rows), epoch=epoch)
        for start in range(0, len(rows), chunk := hvd.size() * BATCH * accumulate):
            batch = padded([rows[int(row)] for row in order[start : start + chunk]])
            optimizer.zero_grad()
            step(model, batch).mean.backward()
            if clip_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            optimizer.step()
    return model


def assert_equal(model, other, atol=1e-6):
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=atol, rtol=0)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(("accumulate", "clip_norm"), [(1, None), (2, 0.1)])
def test_unequal_counts_equal_one_process(accumulate, clip_norm):
    rows = Sentences(hvd.size() * BATCH * 4 + 1, nothing=(0, 4, 5))  # the last step has one sample, on rank 0
    model = tagger()
    trainer = make(model, accumulate=accumulate, clip_norm=clip_norm, metrics=["accuracy"])
    history = trainer.fit(loader(rows), epochs=2, progress=False)
    assert_equal(model, one_process(rows, accumulate=accumulate, clip_norm=clip_norm, epochs=2))
    everything = padded([rows[row] for row in range(len(rows))])
    with torch.no_grad():
        found = step(model, everything)
    result = trainer.evaluate(loader(rows))
    assert result["loss"] == pytest.approx(float(found.mean), rel=1e-6)
    counts = everything["labels"].flatten() != -100
    correct = found.outputs.argmax(1) == everything["labels"].flatten()
    assert result["accuracy"] == pytest.approx(float(correct[counts].double().mean()))
    assert history["loss"][1] < history["loss"][0]


@pytest.mark.world_size(2, 3)
def test_counts_cost_one_exchange_in_all(monkeypatch):
    asked = []
    ask = LossWeights._exchange
    monkeypatch.setattr(LossWeights, "_exchange", lambda self, weight: asked.append(weight) or ask(self, weight))
    rows = Sentences(hvd.size() * BATCH * 3)
    make(tagger()).fit(loader(rows), epochs=2, progress=False)
    assert len(asked) == 1  # in the first step, when no count is known yet


@pytest.mark.world_size(2)
def test_a_rank_that_never_has_samples_takes_part():
    rows = Sentences(1)
    model = tagger()
    make(model).fit(loader(rows), epochs=3, progress=False)
    assert_equal(model, one_process(rows, epochs=3))


@pytest.mark.world_size(2)
def test_a_step_in_which_nothing_counts_is_an_error_on_every_rank():
    rows = Sentences(2 * BATCH, nothing=range(2 * BATCH))
    with pytest.raises(ValueError, match=r"Nothing counts in this step.*6 samples over all ranks"):
        make(tagger()).fit(loader(rows), progress=False)
    assert int(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == 2  # no rank waits for another


@pytest.mark.world_size(2)
def test_a_sync_batch_norm_runs_the_step_on_no_samples(assert_same_on_all_ranks):
    order = hvdtrain.sampling.epoch_order(2 * BATCH + 1)
    rows = Sentences(2 * BATCH + 1, nothing=order[1:6:2])  # on rank 1: nothing counts, then no samples
    model = tagger(norm=True)
    make(model).fit(loader(rows), progress=False)
    assert_same_on_all_ranks(*model.parameters())
    assert all(each.isfinite().all() for each in model.parameters())


@pytest.mark.world_size(2)
def test_a_non_finite_gradient_of_an_own_step_is_named():
    def bad(model, batch):
        found = step(model, batch)
        return hvdtrain.Loss(found.mean * (float("nan") if hvd.rank() else 1.0), found.count)

    with pytest.raises(hvdtrain.errors.NonFiniteError, match=r"on rank 1 .*gradient of embed.weight is not finite"):
        make(tagger(), step=bad, nan_policy="raise").fit(loader(Sentences(6)), progress=False)


@pytest.mark.world_size(2)
def test_a_run_that_stops_within_an_epoch_resumes_with_the_same_bits(tmp_path_factory):
    folder = hvd.broadcast_object(str(tmp_path_factory.mktemp("own_step")), root_rank=0)
    rows, saved = Sentences(30), [hvdtrain.callbacks.Checkpoint(folder, every_steps=7)]

    class Stop(hvdtrain.callbacks.Callback):
        def on_step_end(self, trainer, step):
            if trainer.global_step == 8:
                raise KeyboardInterrupt

    straight, model = tagger(), tagger()
    make(straight, accumulate=2).fit(loader(rows), epochs=4, progress=False)
    with pytest.raises(KeyboardInterrupt):
        make(tagger(), accumulate=2).fit(loader(rows), epochs=4, callbacks=[*saved, Stop()], progress=False)
    make(model, accumulate=2).fit(loader(rows), epochs=4, callbacks=saved, progress=False)
    assert all(map(torch.equal, model.parameters(), straight.parameters()))
