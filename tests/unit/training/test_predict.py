"""`predict` returns one row a sample, in the order of the data, or an error with the shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset, SubsetRandomSampler, TensorDataset

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
TEXTS = np.random.default_rng(0).normal(size=(8, 5, 4)).astype(np.float32)


class Model(torch.nn.Module):
    """Returns what `outputs` makes of a GRU's outputs and its last state (layers, batch, hidden)."""

    def __init__(self, outputs, layers=2):
        super().__init__()
        self.gru, self.outputs = torch.nn.GRU(4, 3, num_layers=layers, batch_first=True), outputs

    def forward(self, x):
        return self.outputs(*self.gru(x))


@pytest.mark.parametrize("batch_size", [2, 3, 8])
@pytest.mark.parametrize("outputs", [lambda each, last: last, lambda each, last: {"each": each, "last": last}])
def test_an_output_whose_first_axis_is_not_the_samples_is_refused(make, batch_size, outputs):
    with pytest.raises(ValueError, match=r"one row a sample.*Received: .*\(2, \d, 3\) for \d sample.* on rank 0"):
        make(Model(outputs)).predict(TEXTS, batch_size=batch_size)
    rows = make(Model(lambda each, last: last.transpose(0, 1))).predict(TEXTS, batch_size=batch_size)
    assert rows.shape == (8, 2, 3)


def test_an_output_with_two_axes_of_the_batchs_size_may_have_samples_first(make):
    model = Model(lambda each, last: each)
    alone = make(model).predict(TEXTS, batch_size=1)
    np.testing.assert_allclose(make(model).predict(TEXTS[:5], batch_size=5), alone[:5], atol=1e-6)
    with pytest.raises(ValueError, match=r"shapes \(1, 1\) for 1 sample on rank 0"):  # one row for each pair
        make(Model(lambda each, last: each[:, -1] @ each[:, -1].T)).predict(TEXTS, batch_size=4)


def test_a_model_of_one_batch_size_predicts_it(make):
    def square(each, last):
        assert len(each) == 4
        return each[:, :4]

    assert make(Model(square)).predict(TEXTS, batch_size=4).shape == (8, 4, 3)


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (lambda each, last: each.mean(), r"shapes \(\) for 3 samples"),
        (lambda each, last: each[:, : len(each)], r"pad all samples to one length. Received: rows of shapes \(3, 3\)"),
    ],
)
def test_outputs_that_cannot_be_joined_are_named(make, outputs, message):
    with pytest.raises(ValueError, match=message):
        make(Model(outputs)).predict(TEXTS, batch_size=3)


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"drop_last": True}, {"num_workers": 1, "shuffle": True}])
def test_predict_takes_a_loader_in_the_order_of_its_dataset(make, options):
    trainer = make()
    for data in (TensorDataset(torch.as_tensor(X), torch.arange(8)), list(X)):
        loader = DataLoader(data, batch_size=3, **options)
        np.testing.assert_array_equal(trainer.predict(loader), trainer.predict(X, batch_size=3))


def test_predict_takes_a_loader_of_dicts_for_a_step_of_ones_own(make):
    class Named(torch.nn.Linear):
        def forward(self, x):
            return {"logits": super().forward(x), "loss": torch.zeros(())}

    trainer = make(Named(4, 2), loss=None, step=lambda model, batch: None)
    loader = DataLoader([{"x": row} for row in X], batch_size=3, shuffle=True)
    expected = trainer.predict({"x": X})["logits"]
    np.testing.assert_allclose(trainer.predict(loader)["logits"], expected, atol=1e-6)


def test_a_loader_with_an_order_of_its_own_is_told_what_to_do(make):
    sampler = SubsetRandomSampler([3, 1, 2])
    with pytest.raises(TypeError, match=r"sampler of its own, SubsetRandomSampler, on rank 0.*Subset\(dataset, indi"):
        make().predict(DataLoader(X, sampler=sampler))
    batches = BatchSampler(SequentialSampler(X), 3, drop_last=False)
    with pytest.raises(TypeError, match="DataLoader over one, with a batch_size"):
        make().predict(DataLoader(X, batch_sampler=batches))
    trainer = make()
    chosen = trainer.predict(DataLoader(Subset(X, [3, 1, 2]), batch_size=2))
    np.testing.assert_allclose(chosen, trainer.predict(X)[[3, 1, 2]], atol=1e-6)
