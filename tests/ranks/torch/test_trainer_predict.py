"""`Trainer.predict` on ranks: rows in the order of the data, or an error on every rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdtrain
import hvdtrain.torch as hvd
from hvdtrain.errors import DesyncError, HvdTrainError

pytestmark = pytest.mark.usefixtures("hvd")

TEXTS = torch.randn(9, 5, 4, generator=torch.Generator().manual_seed(0))


class Model(torch.nn.Module):
    def __init__(self, outputs):
        super().__init__()
        torch.manual_seed(0)
        self.gru, self.outputs = torch.nn.GRU(4, 3, num_layers=2, batch_first=True), outputs

    def forward(self, x):
        return self.outputs(*self.gru(x))


def trainer(outputs):
    model = Model(outputs)
    return hvdtrain.Trainer(model, optimizer=torch.optim.SGD(model.parameters(), 0.1), loss=torch.nn.MSELoss())


@pytest.mark.world_size(2)
def test_an_output_without_rows_for_samples_is_an_error_on_every_rank():
    for rows, batch_size in [(8, 2), (8, 4), (1, 2)]:  # by chance as many layers as samples; not; a rank without any
        with pytest.raises((ValueError, HvdTrainError), match=r"one row a sample.*Received: outputs of shapes \(2, "):
            trainer(lambda each, last: last).predict(TEXTS[:rows], batch_size=batch_size)
    with pytest.raises((ValueError, HvdTrainError), match=r"\(2, 2, 3\) for 1 sample on rank 1"):
        trainer(lambda each, last: each.repeat(1 + hvd.rank(), 1, 1)[:, :2]).predict(TEXTS[:2], batch_size=1)
    with pytest.raises(DesyncError, match=r"\(1, 3\) float32.* on rank 0 .*\(2, 3\) float32.* on rank 1 .*pad all"):
        trainer(lambda each, last: each[:, : 1 + hvd.rank()]).predict(TEXTS, batch_size=2)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_a_loader_that_shuffles_is_predicted_in_the_order_of_its_dataset(rows):
    model = trainer(lambda each, last: {"last": last[-1], "all": [each]})
    with torch.no_grad():
        each, last = model.model.gru(TEXTS[:rows])
    loader = DataLoader(TensorDataset(TEXTS[:rows], torch.zeros(rows)), batch_size=2, shuffle=True)
    predicted = model.predict(loader)
    np.testing.assert_allclose(predicted["last"], last[-1].numpy(), atol=1e-6)
    np.testing.assert_allclose(predicted["all"][0], each.numpy(), atol=1e-6)
