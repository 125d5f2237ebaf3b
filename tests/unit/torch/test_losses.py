"""What a batch's mean loss was divided by is known on the host, from arrays and tensors alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvdtrain.data.sources import Batch
from hvdtrain.distributed.world import SoloWorld
from hvdtrain.torch.reduction.loss_weights import LossWeights, denominator
from hvdtrain.torch.steps.metrics import Accuracy, Totals

LABELS = np.array([0, 2, -100, 1, -100])


def batch(targets, count=5):
    return Batch(np.zeros((count, 1)), targets, local_count=count, global_count=count)


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor])
def test_ignored_labels_and_class_weights_are_what_torch_divides_by(kind):
    weight = torch.tensor([1.0, 2.0, 0.25])
    assert denominator(torch.nn.CrossEntropyLoss(), batch(kind(LABELS))) == (3.0, False)
    assert denominator(torch.nn.CrossEntropyLoss(weight=weight), batch(kind(LABELS))) == (3.25, False)
    assert denominator(torch.nn.NLLLoss(ignore_index=2), batch(kind(LABELS % 3), 5))[1] is False
    assert denominator(torch.nn.CrossEntropyLoss(), batch(kind(np.arange(5)))) == (5.0, True)


def test_class_weights_are_read_from_their_device_only_when_they_change(monkeypatch):
    loss = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.25]))
    assert denominator(loss, batch(LABELS))[0] == 3.25
    loss.weight[0] = 3.0
    assert denominator(loss, batch(LABELS))[0] == 5.25
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "cpu", lambda _: pytest.fail("a tensor was copied to the host"))
        assert denominator(loss, batch(LABELS))[0] == 5.25
    loss.weight = torch.ones(3)
    assert denominator(loss, batch(LABELS))[0] == 3.0


def test_losses_over_samples_are_divided_by_samples():
    probabilities = np.full((5, 3), 1 / 3, np.float32)
    assert denominator(torch.nn.CrossEntropyLoss(), batch(probabilities))[0] == 5.0
    assert denominator(torch.nn.CrossEntropyLoss(), batch(torch.tensor(probabilities)))[0] == 5.0
    assert denominator(torch.nn.MSELoss(), batch(probabilities))[0] == 5.0
    assert denominator(torch.nn.CrossEntropyLoss(reduction="sum"), batch(LABELS))[0] == 5.0
    assert denominator(torch.nn.CrossEntropyLoss(), batch(None, 0))[0] == 0.0


def test_one_process_scales_a_step_of_one_batch_by_nothing():
    weights = LossWeights(torch.nn.CrossEntropyLoss(), SoloWorld())
    weights.begin([batch(LABELS)])
    assert weights.factor(0) == 1.0
    weights.begin([batch(LABELS), batch(np.arange(5))])
    assert [weights.factor(0), weights.factor(1)] == [3 / 8, 5 / 8]


def test_accuracy_leaves_out_what_the_loss_ignores():
    outputs, targets = torch.eye(3)[[0, 2, 1, 0, 0]], torch.from_numpy(LABELS)
    loss = torch.nn.CrossEntropyLoss()
    weights, totals = (
        LossWeights(loss, SoloWorld()),
        Totals({"accuracy": Accuracy(loss)}, torch.device("cpu"), SoloWorld()),
    )
    for labels in (targets, torch.tensor([0, 2, 1, 0, 1])):
        totals.add(outputs, labels, loss(outputs, labels), weights.count(batch(labels)))
    results = totals.results(lambda vector: vector)
    assert results["accuracy"] == 6 / 8
    assert results["loss"] == pytest.approx(
        float(loss(torch.cat([outputs, outputs]), torch.cat([targets, torch.tensor([0, 2, 1, 0, 1])]))), abs=1e-6
    )


def test_sums_keep_the_digits_of_many_small_losses():
    totals = Totals({}, torch.device("cpu"), SoloWorld())
    loss = torch.tensor(0.1)
    for _ in range(2000):
        totals.add(None, None, loss, LossWeights(torch.nn.MSELoss(), SoloWorld()).count(batch(None, 10_000)))
    assert totals.results(lambda vector: vector)["loss"] == pytest.approx(float(loss), rel=1e-12)
