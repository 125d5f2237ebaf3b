"""`convert_sync_batchnorm` changes what a BatchNorm does, and nothing else of a model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hvdtrain.torch as hvd
from hvdtrain.torch.ops.sync_batch_norm import convert_torchs


@pytest.mark.usefixtures("alone")
def test_a_converted_model_keeps_its_modules_parameters_and_statistics():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.SyncBatchNorm(2, momentum=None)))
    norm, calls = model[1].eval(), []
    norm.register_forward_hook(lambda *_: calls.append(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert hvd.convert_sync_batchnorm(model) is model
    assert [type(each) for each in model.modules() if not list(each.children())] == [
        nn.Conv2d, hvd.SyncBatchNorm, hvd.SyncBatchNorm
    ]  # fmt: skip
    assert model[1] is norm
    assert not norm.training
    assert model[2][0].momentum is None
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
    model(torch.ones(2, 1, 3, 3))
    assert calls == [1]


def test_a_batch_norm_itself_is_converted():
    assert type(hvd.convert_sync_batchnorm(nn.BatchNorm1d(3))) is hvd.SyncBatchNorm


class WithActivation(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


@pytest.mark.parametrize(
    ("norm", "reason"), [(WithActivation(2), "has a forward of its own"), (nn.LazyBatchNorm1d(), "has no weights yet")]
)
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_what_cannot_be_converted_is_named_and_nothing_changes(norm, reason):
    model = nn.Sequential(nn.BatchNorm1d(2), norm)
    with pytest.raises(TypeError, match=rf"Received: 1 of type {type(norm).__name__}, which {reason}"):
        hvd.convert_sync_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm1d


def test_only_torchs_sync_batch_norm_is_converted_unasked():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.SyncBatchNorm(2))
    assert convert_torchs(model) == "torch.nn.SyncBatchNorm -> hvdtrain.torch.SyncBatchNorm: 1 layer, 1 first"
    assert [type(each) for each in model] == [nn.BatchNorm1d, hvd.SyncBatchNorm]
    assert convert_torchs(model) is None
