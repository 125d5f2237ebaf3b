"""Losses of the user's own equal one process on several ranks, or are refused on all of them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional

import hvdtrain

pytestmark = [pytest.mark.usefixtures("hvd"), pytest.mark.world_size(2, 3), pytest.mark.two_suffice]

BATCH, STEPS = 4, 3


def focal(scores, labels):
    chosen = functional.log_softmax(scores, 1).gather(1, labels[:, None])
    return (-((1 - chosen.exp()) ** 2) * chosen).mean()


def smoothed(scores, labels):
    return functional.cross_entropy(scores, labels, label_smoothing=0.1)


def dice(scores, values):
    scores, values = scores.sigmoid(), values.sigmoid()
    return 1 - 2 * (scores * values).sum() / (scores + values).sum()


def info_nce(scores, values):
    return functional.cross_entropy(scores @ values.T, torch.arange(len(scores)))


def triplet(scores, values):
    return functional.triplet_margin_loss(scores, values, values.roll(1, 0))


def ctc(scores, labels):
    steps = functional.log_softmax(scores, 1)[None].expand(4, -1, -1)
    rows = len(labels)
    return functional.ctc_loss(steps, 1 + labels[:, None] % 2, torch.full((rows,), 4), torch.ones(rows, dtype=int))


class Centre(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, scores, values):
        with torch.no_grad():
            self.centre.lerp_(scores.mean(0), 0.1)
        return ((scores - self.centre) * values).mean()


def data(size, *, kind):
    random = np.random.default_rng(3)
    rows = size * BATCH * STEPS - 1
    x = random.normal(size=(rows, 4)).astype(np.float32)
    labels = random.integers(0, 3, rows)
    if kind == "ignored":
        labels[random.random(rows) < 0.5] = -100
    return x, random.normal(size=(rows, 3)).astype(np.float32) if kind == "values" else labels


def net():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3)


def one_process(x, y, loss, size):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    order = hvdtrain.sampling.epoch_order(len(x))
    for start in range(0, len(x), size * BATCH):
        chosen = order[start : start + size * BATCH]
        optimizer.zero_grad()
        loss(model(torch.from_numpy(x[chosen])), torch.from_numpy(y[chosen])).backward()
        optimizer.step()
    return model


def fit(x, y, loss):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=loss)
    trainer.fit((x, y), batch_size=BATCH, progress=False, run_dir=None)
    return model


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (functional.cross_entropy, "ignored"),
        (partial(functional.cross_entropy, weight=torch.tensor([0.1, 2.0, 0.5])), "ignored"),
        (partial(functional.mse_loss, reduction="sum"), "values"),
        (focal, "labels"),
        (smoothed, "labels"),
        (torch.nn.MultiMarginLoss(), "labels"),
    ],
)
def test_a_loss_that_is_not_refused_equals_one_process(size, loss, kind):
    x, y = data(size, kind=kind)
    expected, found = one_process(x, y, loss, size), fit(x, y, loss)
    for a, b in zip(expected.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "kind", "message"),
    [
        (smoothed, "ignored", "not a mean over samples|leaves out labels of -100"),
        (dice, "values", "not a mean over samples"),
        (info_nce, "values", "not a mean over samples"),
        (triplet, "values", "not a mean over samples"),
        (Centre(), "values", "changes its buffer centre"),
    ],
)
def test_a_loss_that_would_not_is_refused_on_all_ranks(size, loss, kind, message):
    with pytest.raises(ValueError, match=message):
        fit(*data(size, kind=kind), loss)


def test_ctc_is_a_mean_over_samples(size):
    x, y = data(size, kind="labels")
    expected, found = one_process(x, y, ctc, size), fit(x, y, ctc)
    torch.testing.assert_close(found.weight, expected.weight, rtol=1e-5, atol=1e-6)


def test_targets_padded_to_another_width_on_one_rank_are_refused_on_all_ranks(rank):
    model = net()
    trainer = hvdtrain.Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.MSELoss())
    check = trainer._adapter._loss_check
    width = torch.ones(BATCH, 2 + rank, requires_grad=True)
    check.see(width, width, width.mean(), BATCH)
    with pytest.raises(ValueError, match=r"of \(2,\) on rank 0 and \(3,\) on rank 1"):
        check.agree()


def test_evaluate_before_fit_refuses_on_all_ranks_also_on_one_without_samples():
    model = net()
    trainer = hvdtrain.Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=info_nce)
    x, y = data(1, kind="values")
    with pytest.raises(ValueError, match="not a mean over samples"):
        trainer.evaluate((x[:1], y[:1]), batch_size=BATCH)


def padded(rows):
    values = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return values, values


def loader_of_lengths(lengths):
    """Return samples of these lengths, in batches of one on each rank."""
    rows = [torch.linspace(0, 1, length)[:, None] for length in lengths]
    return torch.utils.data.DataLoader(rows, batch_size=1, collate_fn=padded)


def elementwise_trainer(**options):
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = options.pop("optimizer", partial(torch.optim.SGD, lr=0.1))(model.parameters())
    return hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.MSELoss(), **options)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"micro_batch": "auto"}, {"optimizer": torch.optim.LBFGS}])
def test_a_later_batch_of_another_length_is_refused_on_all_ranks(hvd, size, options):
    data = loader_of_lengths([3] * (4 * size) + [5] + [3] * (2 * size - 1))
    trainer = elementwise_trainer(**options)
    with pytest.raises(ValueError, match=r"targets of \(3, 1\), then \(5, 1\) on rank 0"):
        trainer.fit(data, progress=False, run_dir=None)
    assert int(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == size  # no rank waits for another


def test_a_later_batch_with_an_ignored_label_is_refused_on_all_ranks(size):
    x, labels = data(size, kind="labels")
    labels[hvdtrain.sampling.epoch_order(len(x))[-1]] = -100
    with pytest.raises(ValueError, match="leaves out labels of -100"):
        fit(x, labels, smoothed)


@pytest.mark.parametrize("lengths", [[3, 5], [3, 3, 5]])
def test_an_evaluation_over_batches_of_two_lengths_is_refused_on_all_ranks(size, lengths):
    data = loader_of_lengths([length for length in lengths for _ in range(size)][size - 1 :])
    trainer = elementwise_trainer()
    with pytest.raises(ValueError, match="padded to their own length depends on the number of ranks"):
        trainer.evaluate(data)


def test_each_evaluation_may_have_a_length_of_its_own(size):
    trainer = elementwise_trainer()
    sets = {str(length): loader_of_lengths([length] * (2 * size)) for length in (3, 5)}
    trainer.fit(loader_of_lengths([4] * size), validation=sets, progress=False, run_dir=None)
