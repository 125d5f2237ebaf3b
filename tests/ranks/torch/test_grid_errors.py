"""What torch or a Grid cannot do with a divided model is an error that says what to do, on every rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from grid_kit import one_process
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hvdtrain
import hvdtrain.torch
from hvdtrain.errors import HvdTrainError

pytestmark = pytest.mark.world_size(2)
PLAN = {"2": ColwiseParallel(), "3": RowwiseParallel()}


@pytest.mark.parametrize("inputs", [{"a": torch.ones(8, 4)}, (torch.ones(8, 4), torch.ones(8, 4))], ids=type)
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_several_inputs_of_a_pipeline_are_one_error_on_every_rank(grid_of, inputs, method):
    grid = grid_of(stages=2)
    stage = grid.pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), micro_batches=2)
    trainer = hvdtrain.Trainer(stage, optimizer=torch.optim.SGD(stage.parameters(), lr=0.1), loss=nn.MSELoss())
    data = inputs if method == "predict" else (inputs, torch.ones(8, 4))
    how = {"run_dir": None, "progress": False} if method == "fit" else {}
    with pytest.raises((TypeError, HvdTrainError), match=r"let the first layer take them apart. Received: \w+"):
        getattr(trainer, method)(data, **how)


@pytest.mark.parametrize(("place", "what_to_do"), [(0, "by at="), (1, "Let it return a tensor")])
def test_a_stage_that_returns_no_tensors_is_one_error_on_every_rank(grid_of, place, what_to_do):
    class Named(nn.Linear):
        def forward(self, x):
            return {"logits": super().forward(x)}

    grid, kinds = grid_of(stages=2), [nn.Linear, nn.Linear]
    kinds[place] = Named
    stage = grid.pipeline(nn.Sequential(*(kind(4, 4) for kind in kinds)), micro_batches=2)
    with pytest.raises(TypeError, match=f"Received: dict from {place}, the last layer of stage {place}.*{what_to_do}"):
        stage.forward_backward(torch.ones(4, 4), lambda outputs, rows: outputs["logits"].sum())


@pytest.mark.world_size(4)
def test_a_stage_that_returns_a_part_of_a_tensor_is_one_error_on_every_rank(grid_of):
    grid = grid_of(stages=2, tensor=2)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in "01"))
    parallelize_module(net, grid.mesh("tensor"), {"0.0": ColwiseParallel(use_local_output=False)})
    stage = grid.pipeline(net, micro_batches=2)
    with pytest.raises(TypeError, match=r"Received: DTensor from 0.*Do not pass use_local_output=False"):
        stage.outputs(torch.ones(4, 4))


def test_widths_that_tensor_parts_cannot_divide_are_named(grid_of):
    grid = grid_of(tensor=2)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 5), nn.Linear(5, 4))
    parallelize_module(net, grid.mesh("tensor"), PLAN)
    trainer = hvdtrain.Trainer(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), loss=nn.MSELoss())
    with pytest.raises(HvdTrainError, match=r"widths that are multiples.*Received: 2.weight of shape \(5, 4\)"):
        trainer.fit((torch.ones(8, 4), torch.ones(8, 4)), run_dir=None, progress=False)


class OfWhole(torch.optim.SGD):
    """An optimizer that adds a whole tensor to weights, as those of torch do that know nothing of divided ones."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                each.add_(torch.ones(each.shape))


@pytest.mark.parametrize("lengths", [{"shard": 2}, {"tensor": 2}], ids=str)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (OfWhole, r"Use another optimizer, such as AdamW. Received: OfWhole\(\) on rank \d. torch says: "),
        (lambda *a, **k: OfWhole(*a, **k, foreach=True), r"Leave out foreach=. Received: OfWhole\(foreach=True\)"),
    ],
    ids=["plain", "foreach"],
)
def test_an_optimizer_that_cannot_update_divided_weights_says_what_to_do(grid_of, lengths, make, message):
    grid = grid_of(**lengths)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 8), nn.Linear(8, 4))
    if grid.tensors > 1:
        parallelize_module(net, grid.mesh("tensor"), PLAN)
    else:
        fully_shard(net, mesh=grid.mesh("shard"))
    trainer = hvdtrain.Trainer(net, optimizer=make(net.parameters(), lr=0.1), loss=nn.MSELoss())
    with pytest.raises(HvdTrainError, match=message):
        trainer.fit((torch.ones(8, 4), torch.ones(8, 4)), run_dir=None, progress=False)


def normed(grid=None):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    if grid is None:
        return net
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net)  # torch's, which takes tensors on GPUs only
    return grid.pipeline(net, micro_batches=2) if grid.stages > 1 else fully_shard(net, mesh=grid.mesh("shard"))


def fit_normed(net, replicas):
    trainer = hvdtrain.Trainer(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), loss=nn.MSELoss())
    generator = torch.Generator().manual_seed(1)
    data = torch.rand(30, 4, generator=generator), torch.rand(30, 2, generator=generator)
    trainer.fit(data, batch_size=12 // replicas, run_dir=None, progress=False)
    return trainer.state().arrays


def test_torchs_synchronized_batch_norm_becomes_ours_on_a_grid(grid_of):
    found = fit_normed(normed(grid_of(shard=2)), 2)
    with one_process():
        expected = fit_normed(normed(), 1)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-6, err_msg=name)


def test_torchs_synchronized_batch_norm_is_refused_in_stages_on_every_rank(grid_of):
    with pytest.raises((ValueError, HvdTrainError), match="in which others wait for it: use BatchNorm"):
        fit_normed(normed(grid_of(stages=2)), 1)


def test_divided_tensors_are_not_sent_as_whole_ones(grid_of, hvd):
    grid = grid_of(shard=2)
    net = fully_shard(nn.Linear(4, 4), mesh=grid.mesh("shard"))
    for send in (hvd.allreduce, hvd.allgather, lambda each: hvd.broadcast(each, 0)):
        with pytest.raises(TypeError, match="torch has divided this tensor over ranks"):
            send(net.weight.detach())
    with pytest.raises(TypeError, match=r"Use the methods of the Grid, such as grid.broadcast_parameters\(model\)"):
        hvd.broadcast_parameters(net.state_dict())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"divided the weights over them. Received: ranks \[\d\] .* Pass process_set="):
        hvd.broadcast_optimizer_state(optimizer)
