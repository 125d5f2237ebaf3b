"""A Grid: models that torch divides over ranks, on Horovod, train the weights of one process."""

from __future__ import annotations

import copy
import math

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from grid_kit import PLAN, TOKENS, WIDTH, Block
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hvdtrain
import hvdtrain.torch
from hvdtrain.errors import HvdTrainError

pytestmark = pytest.mark.world_size(2, 4)
# Under their newer names, of torch 2.13.
ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(2)))


def batches(step, ranks):
    """Return a batch for each rank that divides the data; in every other step the ranks hold unequal numbers."""
    generator = torch.Generator().manual_seed(step)
    counts = [8 - 2 * (rank % 2) * (step % 2) for rank in range(ranks)]
    return [tuple(torch.randn(count, TOKENS, WIDTH, generator=generator) for _ in "xy") for count in counts]


class Whole:
    """One process's steps, on every rank."""

    def __init__(self, clip):
        self.net, self.clip = model(), clip
        self.optimizer = optimizer_of(self.net)

    def step(self, parts):
        self.optimizer.zero_grad()
        F.mse_loss(self.net(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])).backward()
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        self.optimizer.step()
        return float(norm)


def optimizer_of(net):
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.01)


class Staged:
    """A rank's stage, trained by a schedule of torch's in two micro-batches."""

    def __init__(self, grid, schedule):
        self.grid, self.schedule = grid, schedule
        self.net = nn.Sequential(model()[grid.stage])

    def backward(self, x, y, weight):
        stage = PipelineStage(self.net, self.grid.stage, 2, torch.device("cpu"), group=self.grid.group("stage"))
        schedule = self.schedule(stage, 2, loss_fn=lambda outputs, targets: weight * F.mse_loss(outputs, targets))
        schedule.step(x) if self.grid.stage == 0 else schedule.step(target=y)

    def of(self, whole):
        return nn.Sequential(whole[self.grid.stage])


class Divided:
    """A model that torch has divided within its layers."""

    def __init__(self, grid, divide):
        self.net = divide(model(), grid)

    def backward(self, x, y, weight):
        (weight * F.mse_loss(self.net(x), y)).backward()

    def of(self, whole):
        return whole


def sharded(net, grid, *axes):
    for block in net:
        fully_shard(block, mesh=grid.mesh(*axes))
        block.set_allocate_memory_from_process_group_for_comm(True)  # it asks the group
    return fully_shard(net, mesh=grid.mesh(*axes))


KINDS = {
    "1f1b": ({"stages": 2}, lambda grid: Staged(grid, Schedule1F1B)),
    "gpipe": ({"stages": 2}, lambda grid: Staged(grid, ScheduleGPipe)),
    "shard": ({"shard": 2}, lambda grid: Divided(grid, lambda net, grid: sharded(net, grid, "shard"))),
    "replicas of torch": (
        {"shard": 2},
        lambda grid: Divided(grid, lambda net, grid: sharded(net, grid, "replica", "shard")),
    ),
    "tensor": (
        {"tensor": 2},
        lambda grid: Divided(
            grid, lambda net, grid: nn.Sequential(*(parallelize_module(b, grid.mesh("tensor"), PLAN) for b in net))
        ),
    ),
}


def full(value):
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


@pytest.mark.parametrize(
    "kind",
    [kind if kind in ("1f1b", "shard") else pytest.param(kind, marks=pytest.mark.world_size(4)) for kind in KINDS],
)
def test_a_divided_model_trains_the_weights_of_one_process(grid_of, size, kind):
    lengths, make = KINDS[kind]
    grid = grid_of(**lengths)
    assert grid.replicas == size // 2
    part, whole = make(grid), Whole(clip=0.5)
    grid.broadcast_parameters(part.net)
    optimizer = optimizer_of(part.net)
    for step in range(20):
        parts = batches(step, grid.data_size)
        x, y = parts[grid.data_rank]
        optimizer.zero_grad()
        part.backward(x, y, grid.loss_weight(len(x)))
        grid.average_gradients(part.net.parameters())
        norm = grid.clip_grad_norm_(part.net.parameters(), 0.5)
        optimizer.step()
        assert norm == pytest.approx(whole.step(parts), rel=1e-5)
    expected = dict(part.of(whole.net).named_parameters())
    for name, value in part.net.named_parameters():
        torch.testing.assert_close(full(value), expected[name].detach(), rtol=0, atol=1e-6)


@pytest.mark.world_size(4)
def test_replicas_that_begin_with_other_weights_get_those_of_the_first(grid_of):
    grid = grid_of(stages=2)
    torch.manual_seed(grid.replica)
    net = nn.Linear(3, 3)
    torch.manual_seed(0)
    first = nn.Linear(3, 3)
    grid.broadcast_parameters(net)
    assert torch.equal(net.weight, first.weight)


@pytest.mark.world_size(4)
def test_a_parameter_without_a_gradient_counts_as_zeros_where_another_replica_has_one(grid_of):
    grid = grid_of(stages=2)
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    if grid.replica == 1:
        used.grad = torch.full((2,), 4.0)
    grid.average_gradients([used, unused])
    assert used.grad.tolist() == [2, 2]
    assert unused.grad is None


@pytest.mark.world_size(4)
def test_sparse_gradients_of_replicas_are_averaged_where_one_has_none_too(grid_of):
    grid = grid_of(stages=2)
    tables = [nn.Embedding(4, 2, sparse=True) for _ in range(2)]
    tables[0](torch.tensor([1, 1 + grid.replica])).sum().backward()
    if grid.replica == 1:
        tables[1](torch.tensor([3])).sum().backward()
    grid.average_gradients(each.weight for each in tables)
    first, second = (each.weight.grad.to_dense()[:, 0].tolist() for each in tables)
    assert (first, second) == ([0, 1.5, 0.5, 0], [0, 0, 0, 0.5])


def test_losses_weighed_by_classes_have_the_weights_of_one_process(grid_of):
    grid = grid_of(shard=2)
    of_classes = torch.tensor([0.1, 0.7])
    classes = torch.tensor([index % 3 % 2 for index in range(5 * grid.data_size)])
    mine = of_classes[classes[grid.data_rank :: grid.data_size]].sum()
    expected = float(mine / of_classes[classes].sum() * grid.data_size)
    assert grid.loss_weight(mine) == pytest.approx(expected, rel=1e-6)


@pytest.mark.world_size(4)
def test_a_drop_in_optimizer_averages_over_the_replicas_of_a_part(grid_of, hvd):
    grid = grid_of(stages=2)
    net = nn.Linear(2, 1, bias=False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), 1.0), named_parameters=net.named_parameters(), process_set=grid.process_set
    )
    before = net.weight.detach().clone()
    net(torch.full((1, 2), float(1 + grid.stage + 2 * grid.replica))).sum().backward()
    optimizer.step()
    torch.testing.assert_close(before - net.weight.detach(), torch.full((1, 2), 2.0 + grid.stage))


def test_a_norm_that_is_not_a_number_reaches_the_gradients_of_every_stage(grid_of):
    grid = grid_of(stages=2)
    part = nn.Parameter(torch.ones(2))
    part.grad = torch.tensor([1.0, float("nan") if grid.stage == 1 else 1.0])
    assert math.isnan(grid.clip_grad_norm_([part], 1.0))
    assert part.grad.isnan().all()


def test_what_takes_every_ranks_model_for_a_whole_one_is_refused(grid_of, hvd):
    grid_of(stages=2)
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with pytest.raises(HvdTrainError, match="prepare takes every rank's model"):
        hvdtrain.prepare(net, optimizer)
    with pytest.raises(HvdTrainError, match="Pass process_set="):
        hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())


def test_divided_parameters_are_refused_by_name(grid_of, hvd):
    grid = grid_of(shard=2)
    net = fully_shard(nn.Linear(2, 2), mesh=grid.mesh("shard"))
    with pytest.raises(ValueError, match="torch has divided weight over"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), 0.1),
            named_parameters=net.named_parameters(),
            process_set=grid.process_set,
        )


def test_a_second_grid_and_a_group_across_the_axes_are_refused(grid_of, size):
    grid = grid_of(shard=2)
    with pytest.raises(HvdTrainError, match="is initialised already, on 'horovod'"):
        grid_of(stages=2)
    with pytest.raises(ValueError, match="mesh takes names of replica, stage, shard, tensor, in this order"):
        grid.mesh("shard", "replica")


@pytest.mark.world_size(2)
def test_shards_divide_gradients_by_the_number_that_the_script_sets(grid_of, rank):
    net = fully_shard(nn.Linear(2, 2, bias=False), mesh=grid_of(shard=2).mesh("shard"))
    net.set_gradient_divide_factor(4.0)
    net(torch.full((1, 2), 1.0 + rank)).sum().backward()
    assert full(net.weight.grad).tolist() == [[0.75, 0.75], [0.75, 0.75]]


def test_after_close_a_grid_can_be_made_again(grid_of, hvd, size):
    for lengths in ({"stages": 2}, {"shard": 2}):
        grid = hvdtrain.torch.Grid(**lengths)
        grid.close()
    assert not dist.is_initialized()
    hvd.DistributedOptimizer(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1))


# The operations of torch.distributed, on all ranks.


def row(rank, count=2, dtype=torch.float32):
    return torch.arange(count).to(dtype) + 10 * rank


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_reductions_and_gathers_are_torchs(grid_of, rank, size, dtype):
    grid_of(shard=2)
    ranks = range(size)
    total = sum(row(each, dtype=dtype) for each in ranks)
    for op, expected in ((dist.ReduceOp.SUM, total), (dist.ReduceOp.MAX, row(size - 1, dtype=dtype))):
        value = row(rank, dtype=dtype)
        dist.all_reduce(value, op)
        assert torch.equal(value, expected)
    value = row(rank, dtype=dtype)
    dist.reduce(value, dst=1)
    assert torch.equal(value, total if rank == 1 else row(rank, dtype=dtype))
    gathered = [torch.empty(2, dtype=dtype) for _ in ranks]
    dist.all_gather(gathered, row(rank, dtype=dtype))
    joined = torch.empty(2 * size, dtype=dtype)
    ALL_GATHER(joined, row(rank, dtype=dtype))
    assert torch.equal(joined, torch.cat(gathered))
    assert all(torch.equal(each, row(other, dtype=dtype)) for other, each in enumerate(gathered))
    part = torch.empty(2, dtype=dtype)
    REDUCE_SCATTER(part, torch.cat([row(rank, dtype=dtype)] * size))
    assert torch.equal(part, total)


def test_what_moves_tensors_is_torchs(grid_of, rank, size):
    grid_of(shard=2)
    ranks = range(size)
    value = row(rank)
    dist.broadcast(value, src=size - 1)
    assert torch.equal(value, row(size - 1))
    dist.scatter(value, [row(each) for each in ranks] if rank == 1 else None, src=1)
    assert torch.equal(value, row(rank))
    gathered = [torch.empty(2) for _ in ranks] if rank == 1 else None
    dist.gather(row(rank), gathered, dst=1)
    assert rank != 1 or torch.equal(torch.cat(gathered), torch.cat([row(each) for each in ranks]))
    received = [torch.empty(2) for _ in ranks]
    dist.all_to_all(received, [row(rank) + 100 * each for each in ranks])
    assert torch.equal(torch.cat(received), torch.cat([row(each) + 100 * rank for each in ranks]))
    joined = torch.empty(2 * size)
    dist.all_to_all_single(joined, torch.cat([row(rank) + 100 * each for each in ranks]))
    assert torch.equal(joined, torch.cat(received))
    everyones = [None] * size
    dist.all_gather_object(everyones, {"rank": rank})
    assert everyones == [{"rank": each} for each in ranks]
    dist.barrier()


@pytest.mark.world_size(2)
def test_a_tensor_that_torch_has_not_received_yet_is_waited_for_before_it_is_sent(grid_of, hvd, rank, size):
    grid = grid_of(tensor=size)
    total = float(sum(range(size)))

    def on_its_way():  # as from a layer in tensor parts; a view of it waits no more than it does
        return all_reduce(torch.full((300, 300), float(rank)), "sum", grid.group("tensor")).view(-1)

    value = on_its_way()
    assert torch.equal(hvd.allreduce(value, op=hvd.Sum), torch.full((90000,), size * total))
    assert torch.equal(value, torch.full((90000,), total))  # it was not reduced in place
    dist.all_reduce(value)
    assert torch.equal(value, torch.full((90000,), size * total))
    received = torch.empty(90000)
    send = dist.isend(on_its_way(), (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    send.wait()
    gathered = hvd.allgather(on_its_way()).view(size, -1)
    for each in (received, hvd.broadcast(on_its_way(), 0), *gathered):
        assert torch.equal(each, torch.full((90000,), total))


@pytest.mark.parametrize("kind", ["tensor", "stages"])
def test_synchronized_batch_norm_counts_each_sample_once(grid_of, hvd, kind):
    grid = grid_of(**{kind: 2})
    torch.manual_seed(0)
    whole, inputs = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), torch.randn(6, 4)
    net = hvd.convert_sync_batchnorm(copy.deepcopy(whole))
    mine = inputs[grid.data_rank :: grid.data_size]
    whole(inputs).square().mean().backward()
    if kind == "stages":
        net = grid.pipeline(net, micro_batches=1)
        net.forward_backward(mine, lambda outputs, rows: outputs.square().mean())
    else:
        net(mine).square().mean().backward()
    grid.average_gradients(net.parameters())
    for name, each in net.named_parameters():
        torch.testing.assert_close(each.grad, whole.get_parameter(name).grad)
    for name, each in net.named_buffers():
        torch.testing.assert_close(each, whole.get_buffer(name))


@pytest.mark.world_size(4)
def test_a_stage_that_ends_in_tensor_parts_sends_their_sum(grid_of):
    grid = grid_of(stages=2, tensor=2)
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2)))
    inputs, net = torch.rand(6, 8), copy.deepcopy(whole)
    for layer in net:
        parallelize_module(layer, grid.mesh("tensor"), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    stage = grid.pipeline(net, micro_batches=3)
    torch.testing.assert_close(stage.shared(stage.outputs(inputs)), whole(inputs).detach())


def test_messages_go_both_ways_between_neighbouring_stages_in_the_order_sent(grid_of, rank, size):
    grid = grid_of(stages=size)
    after, before = (rank + 1) % size, (rank - 1) % size
    received = [torch.empty(2, requires_grad=True), torch.empty(2)]
    works = [dist.isend(row(rank) + number, after, grid.group("stage")) for number in range(2)]
    works += [dist.irecv(each, before, grid.group("stage")) for each in received]
    for work in works:
        work.wait()
    assert [each.tolist() for each in received] == [(row(before) + number).tolist() for number in range(2)]


def test_a_copy_of_a_sharded_model_is_the_whole_one(grid_of):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    grid = grid_of(shard=2)
    whole = model()
    net = sharded(copy.deepcopy(whole), grid, "shard")
    saved = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        assert all(torch.equal(saved[name], value) for name, value in whole.state_dict().items())


def test_shards_made_on_the_meta_device_load_the_state_that_rank_0_has(grid_of, rank):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    grid = grid_of(shard=2)
    whole = model()
    with torch.device("meta"):
        net = sharded(model(), grid, "shard")
    net.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(net, whole.state_dict() if rank == 0 else {}, options=options)
    for name, value in net.named_parameters():
        assert torch.equal(full(value), whole.get_parameter(name).detach())


def test_a_grid_opens_no_port(grid_of, hvd):
    before = {each.laddr for each in psutil.Process().net_connections()}
    grid = grid_of(stages=2)
    dist.all_reduce(torch.ones(2))
    dist.barrier(grid.group("stage"))
    assert {each.laddr for each in psutil.Process().net_connections()} <= before
