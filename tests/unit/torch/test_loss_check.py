"""A callable loss is checked on parts of the first batch: a mean over samples is right, any other is refused."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional

import hvdtrain
from hvdtrain.distributed.world import SoloWorld
from hvdtrain.torch.steps.loss_check import LossCheck, as_module

SAMPLES = 6


def outputs():
    return torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0))


LABELS = torch.tensor([0, 1, 2, 2, 1, 0])
VALUES = torch.linspace(-1, 1, 3 * SAMPLES).reshape(SAMPLES, 3)


def found(loss, targets, scores=None):
    check = LossCheck(loss, SoloWorld(), split=True)
    scores = outputs() if scores is None else scores
    check.see(scores, targets, loss(scores, targets), len(scores))
    check.agree()


def test_smoothed_labels_of_classes_without_weight_are_refused_where_a_step_is_split(alone):
    loss = torch.nn.CrossEntropyLoss(torch.tensor([0.0, 1.0, 2.0]), label_smoothing=0.1)
    LossCheck(loss, SoloWorld(), split=False)
    for change in ({"weight": None}, {"label_smoothing": 0.0}, {"reduction": "sum"}):
        LossCheck(
            torch.nn.CrossEntropyLoss(**{"weight": loss.weight, "label_smoothing": 0.1} | change),
            SoloWorld(),
            split=True,
        )
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"small weight.*Received: weight=\[0\.0, 1\.0, 2\.0\], label_smoothing=0\.1"):
        hvdtrain.Trainer(model, optimizer=optimizer, loss=loss, accumulate=2)


def focal(scores, labels):
    return ((1 - functional.softmax(scores, 1).gather(1, labels[:, None])) ** 2).mean()


def info_nce(scores, values):
    return functional.cross_entropy(scores @ values.T, torch.arange(len(scores)))


def dice(scores, values):
    return 1 - 2 * (scores.sigmoid() * values.abs()).sum() / (scores.sigmoid() + values.abs()).sum()


class Wrapper(torch.nn.Module):
    def forward(self, scores, labels):
        return functional.cross_entropy(scores, labels)


class Centre(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, scores, values):
        with torch.no_grad():
            self.centre.lerp_(scores.mean(0), 0.1)
        return ((scores - self.centre) * values).mean()


@pytest.mark.parametrize(
    ("loss", "targets"),
    [
        (focal, LABELS),
        (lambda scores, values: (scores - values).square().mean(), VALUES),
        (lambda scores, values: (scores - values).square(), VALUES),
        (partial(functional.cross_entropy, reduction="none"), LABELS),
    ],
)
@pytest.mark.parametrize("samples", [1, SAMPLES])
def test_means_over_samples_and_values_are_right(loss, targets, samples):
    found(loss, targets[:samples], outputs()[:samples])


@pytest.mark.parametrize(
    ("loss", "targets", "message"),
    [
        (info_nce, VALUES, "not a mean over samples"),
        (dice, VALUES, "not a mean over samples"),
        (lambda scores, values: (scores - values).square().mean().sqrt(), VALUES, "not a mean over samples"),
        (lambda scores, values: (scores - values).square().sum(), VALUES, 'use the module with reduction="sum"'),
        (Wrapper(), LABELS.where(LABELS != 2, -100), "not a mean over samples"),
        (lambda scores, values: scores.sum(0), VALUES, r"values of shape \(6, ...\)"),
    ],
)
def test_another_loss_is_refused_with_the_ways_out(loss, targets, message):
    with pytest.raises(ValueError, match=message):
        found(loss, targets)


@pytest.mark.parametrize("loss", [Wrapper(), lambda scores, labels: functional.cross_entropy(scores, labels)])
def test_a_wrapper_that_ignores_labels_is_right_until_there_are_any(loss):
    check = LossCheck(loss, SoloWorld(), split=True)
    check.see(outputs(), LABELS, loss(outputs(), LABELS), SAMPLES)
    check.agree()
    check.see(outputs(), LABELS, loss(outputs(), LABELS), SAMPLES)
    marked = LABELS.where(LABELS != 2, -100)
    with pytest.raises(ValueError, match="leaves out labels of -100 and divides by the others"):
        check.see(outputs(), marked, loss(outputs(), marked), SAMPLES)


def test_a_single_sample_shows_a_loss_that_compares_samples():
    with pytest.raises(ValueError, match="not a mean over samples"):
        found(info_nce, VALUES[:1], outputs()[:1])


@pytest.mark.parametrize(
    ("loss", "kind", "reduction"),
    [
        (functional.cross_entropy, torch.nn.CrossEntropyLoss, "mean"),
        (partial(functional.mse_loss, reduction="sum"), torch.nn.MSELoss, "sum"),
        (partial(functional.nll_loss, ignore_index=2), torch.nn.NLLLoss, "mean"),
    ],
)
def test_torchs_functions_are_taken_as_its_modules(loss, kind, reduction):
    module = as_module(loss)
    assert type(module) is kind
    assert module.reduction == reduction


@pytest.mark.parametrize("loss", [focal, partial(functional.mse_loss, torch.zeros(1)), torch.nn.MSELoss()])
def test_other_callables_stay_what_they_are(loss):
    assert as_module(loss) is loss


def test_the_check_moves_no_random_state_and_no_buffer():
    loss = Centre()
    check = LossCheck(loss, SoloWorld(), split=True)
    value, held = loss(outputs(), VALUES), loss.centre.clone()
    state = torch.get_rng_state()
    check.see(outputs(), VALUES, value, SAMPLES)
    assert torch.equal(loss.centre, held)
    assert torch.equal(torch.get_rng_state(), state)


def test_batches_of_two_widths_are_refused_for_a_mean_over_elements():
    check = LossCheck(torch.nn.MSELoss(), SoloWorld(), split=True)
    check.see(VALUES, VALUES, torch.ones(()), SAMPLES)
    with pytest.raises(ValueError, match=r"of \(3,\), then \(2,\) on rank 0"):
        check.see(VALUES[:, :2], VALUES[:, :2], torch.ones(()), SAMPLES)


def test_tokens_of_two_lengths_without_an_ignored_label_are_a_warning(caplog):
    check = LossCheck(torch.nn.CrossEntropyLoss(), SoloWorld(), split=True)
    for length in (3, 2, 4):
        check.see(None, torch.ones(SAMPLES, length, dtype=torch.int64), torch.ones(()), SAMPLES)
    assert caplog.text.count("pad targets with ignore_index=-100") == 1


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.usefixtures("alone")
def test_the_trainer_checks_only_steps_that_are_split(accumulate):
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=info_nce, accumulate=accumulate)
    data = np.ones((12, 3), np.float32), np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    if accumulate == 1:
        trainer.fit(data, batch_size=4, progress=False, run_dir=None)
        return
    with pytest.raises(ValueError, match="not a mean over samples"):
        trainer.fit(data, batch_size=4, progress=False, run_dir=None)


def test_one_process_evaluates_batches_of_any_width():
    check = LossCheck(torch.nn.MSELoss(), SoloWorld(), split=True)
    with torch.no_grad():
        check.see(VALUES, VALUES, torch.ones(()), SAMPLES)
        check.see(VALUES[:, :2], VALUES[:, :2], torch.ones(()), SAMPLES)
    check.end_evaluation()
