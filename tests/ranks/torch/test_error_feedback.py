"""Compression with error feedback over real ranks: in the drop-in and in the Trainer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import trainer_kit as kit

import hvdtrain
from hvdtrain.callbacks import Callback, Checkpoint
from hvdtrain.distributed.compression import Int8

pytestmark = pytest.mark.world_size(2, 3)

SCHEMES = ["int8", "topk:0.1", "powersgd:1:2"]


def made(hvd, scheme):
    """Return what the drop-in takes for a name of the Trainer's."""
    name, *numbers = scheme.split(":")
    kind = getattr(hvd.Compression, name)
    return kind(*(float(n) if name == "topk" else int(n) for n in numbers)) if numbers else kind


def wrap(hvd, model, scheme, lr=0.1, **options):
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    return hvd.DistributedOptimizer(sgd, model.named_parameters(), made(hvd, scheme), **options)


def memory(trainer):
    return {
        name: each
        for name, each in trainer._adapter.rank_state.items()
        if name.startswith(("mean.error", "max.powersgd"))
    }


def flat(net):
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()]).numpy()


@pytest.mark.parametrize("scheme", [*SCHEMES, "topk:1.0", "powersgd:1:99"])
def test_the_drop_in_trains_about_the_weights_of_one_process(hvd, task, difference, assert_same_on_all_ranks, scheme):
    ours, alone = task.model(), task.model()
    task.train(ours, wrap(hvd, ours, scheme), 12)
    task.train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), 12)
    start = difference(task.model(), alone)
    assert difference(ours, alone) < (1e-6 if scheme in ("topk:1.0", "powersgd:1:99") else 0.6 * start)
    assert_same_on_all_ranks(*ours.parameters())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_constant_gradient_arrives_as_a_whole(hvd, rank, size, scheme):
    torch.manual_seed(rank)
    mine = torch.randn(20, 30)
    everyones = hvd.allreduce(mine)
    parameter = torch.nn.Parameter(torch.zeros(20, 30))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], 1.0), [("w", parameter)], made(hvd, scheme))
    lost = []
    for step in range(1, 101):
        optimizer.zero_grad()
        (parameter * mine).sum().backward()
        optimizer.step()
        lost.append(float((-parameter.detach() / step - everyones).norm() / everyones.norm()))
    assert max(lost) > 1e-3  # it was compressed
    assert lost[-1] < 0.25 * max(lost)


def test_names_and_objects_mean_the_same(hvd, task, difference):
    for scheme, given in (
        ("int8", [hvd.Compression.int8, hvd.Compression.int8(), hvdtrain.Int8(), "int8"]),
        ("topk:0.1", [hvd.Compression.topk(0.1), hvdtrain.TopK(0.1), "topk:0.1"]),
        ("powersgd:1:2", [hvd.Compression.powersgd(1, after_steps=2), hvdtrain.PowerSGD(1, 2), "powersgd:1:2"]),
    ):
        right = task.model()
        task.train(right, wrap(hvd, right, scheme), 4)
        for each in given:
            ours = task.model()
            sgd = torch.optim.SGD(ours.parameters(), lr=0.1)
            task.train(ours, hvd.DistributedOptimizer(sgd, ours.named_parameters(), each), 4)
            assert difference(ours, right) == 0.0


def test_a_step_sends_the_bytes_of_the_formula(hvd, rank, size, native_calls):
    model = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.Linear(50, 20, bias=False))
    numbers = {"0.weight": 5000, "0.bias": 50, "1.weight": 1000}
    blocks = sum(-(-n // 256) for n in numbers.values())
    shard = -(-blocks // size)
    kept = sum(math.ceil(0.1 * n) for n in numbers.values())
    flags = 4 * (2 + 2 * len(numbers))
    expected = {
        "int8": {"alltoall": 260 * size * shard, "allgather": 260 * shard},
        "topk:0.1": {"allgather": 8 * kept},
        "powersgd:2:0": {"allreduce": 4 * (2 * (100 + 50) + 2 * (50 + 20) + 50)},
    }
    for scheme, sent in expected.items():
        optimizer = wrap(hvd, model, scheme)
        for _ in range(2):  # after the first one, gradients travel together
            native_calls.bytes_sent.clear()
            optimizer.zero_grad()
            model(torch.ones(2, 100) * (rank + 1)).sum().backward()
            optimizer.step()
        found = {kind: number for kind, number in native_calls.bytes_sent.items() if number}
        small = 4 + flags  # the count of ranks that have not joined; which gradients there are
        assert found.pop("allreduce") == sent.pop("allreduce", 0) + small
        assert found == sent


@pytest.mark.over_gloo
def test_int8_sends_a_large_gradient_in_messages_of_half_a_megabyte(
    hvd, rank, size, native_calls, assert_same_on_all_ranks
):
    numbers = 256 * 4999 + 7  # 5000 blocks
    parameter = torch.nn.Parameter(torch.zeros(numbers))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], 1.0), [("w", parameter)], "int8")
    mine = torch.randn(numbers, generator=torch.Generator().manual_seed(rank))
    mean = hvd.allreduce(mine)
    for step in range(1, 6):
        native_calls.bytes_sent.clear()
        optimizer.zero_grad()
        (parameter * mine).sum().backward()
        optimizer.step()
        torch.testing.assert_close(-parameter.detach() / step, mean, rtol=0, atol=0.08 / step)
    shard = -(-5000 // size)
    assert native_calls.bytes_sent["alltoall"] == 260 * size * shard
    assert native_calls.bytes_sent["allgather"] == 260 * shard
    assert len(Int8.shards(5000, size)) == 3
    assert_same_on_all_ranks(parameter)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_rank_that_has_joined_leaves_the_memory_alone(hvd, rank, size, scheme, assert_same_on_all_ranks):
    model = torch.nn.Linear(20, 12)
    torch.manual_seed(0)
    optimizer = wrap(hvd, model, scheme)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(4 if rank else 6):
        optimizer.zero_grad()
        model(torch.randn(3, 20)).square().sum().backward()
        optimizer.step()
    hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(3, 20)).square().sum().backward()
        optimizer.step()
    assert_same_on_all_ranks(*model.parameters())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_sparse_gradients_go_as_they_are(hvd, rank, size, scheme, assert_same_on_all_ranks):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(40, 20, sparse=True), torch.nn.Linear(20, 12))
    optimizer = wrap(hvd, model, scheme)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.tensor([rank, 7])).sum().backward()
        mine = model[0].weight.grad.to_dense()
        optimizer.synchronize()
        assert model[0].weight.grad.is_sparse
        torch.testing.assert_close(model[0].weight.grad.to_dense(), hvd.allreduce(mine))
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_same_on_all_ranks(*model.parameters())
    assert {len(unit.params) for unit in optimizer._hvd_reducer._units} == {1, 2}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_missing_gradient_keeps_its_error(hvd, rank, scheme, assert_same_on_all_ranks):
    """The exchange takes it with others, and what it has sent of the error is not applied."""
    torch.manual_seed(rank)
    parameters = [torch.nn.Parameter(torch.zeros(16, 20)) for _ in range(2)]
    named = [("a", parameters[0]), ("b", parameters[1])]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, 1.0), named, made(hvd, scheme))
    compressor = optimizer._hvd_reducer.options.compression
    gradients = [torch.randn(16, 20) for _ in range(2)]
    for _ in range(4):
        optimizer.zero_grad()
        sum((p * g).sum() for p, g in zip(parameters, gradients, strict=True)).backward()
        optimizer.step()
    before = compressor.state()
    optimizer.zero_grad()
    (parameters[0] * gradients[0]).sum().backward()
    optimizer.step()
    after = compressor.state()
    assert parameters[1].grad is None
    assert np.array_equal(after["mean.error.b"], before["mean.error.b"])
    assert not np.array_equal(after["mean.error.a"], before["mean.error.a"])
    assert_same_on_all_ranks(*parameters)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_step_that_a_scaler_skips_leaves_the_memory_as_it_was(hvd, rank, scheme, assert_same_on_all_ranks):
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 12)
    optimizer = wrap(hvd, model, scheme)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    compressor = optimizer._hvd_reducer.options.compression
    before = None
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(3, 20)).square().mean() * (math.inf if step == 4 and rank else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        after = compressor.state()
        if step == 4:
            assert scaler.get_scale() == 4.0
            assert all(np.array_equal(after[name], before[name]) for name in before)
        elif step > 2:  # PowerSGD has sent the first two steps as they are
            assert not np.array_equal(after["mean.error.weight"], before.get("mean.error.weight"))
        before = after
    assert all(p.isfinite().all() for p in model.parameters())
    assert_same_on_all_ranks(*model.parameters())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_reduced_gradient_without_a_step_leaves_the_memory_as_it_was(hvd, rank, scheme):
    weights = []
    for refused in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(20, 12)
        optimizer = wrap(hvd, model, scheme)
        generator = torch.Generator().manual_seed(rank)
        for step in range(6):
            x = torch.randn(3, 20, generator=generator)
            if step == 4:
                if not refused:
                    continue
                x *= 100
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if step == 4:
                optimizer.synchronize()
            else:
                optimizer.step()
        weights.append(flat(model))
    assert np.array_equal(*weights)


def test_what_has_no_next_step_is_refused(hvd):
    for compression in (hvd.Compression.int8, hvd.Compression.topk(0.1), "powersgd:4"):
        for call in (hvd.allreduce, hvd.reducescatter):
            with pytest.raises(ValueError, match=r"DistributedOptimizer and the Trainer only\. Received"):
                call(torch.ones(6), compression=compression)
    parameter = torch.nn.Parameter(torch.zeros(3))
    for compression, received in (("zip", "'zip'"), (hvd.Compression.topk, "topk"), (3, "3")):
        with pytest.raises(ValueError, match=f"compression must be.*Received: .*{received}"):
            hvd.DistributedOptimizer(torch.optim.SGD([parameter], 0.1), [("w", parameter)], compression)
    with pytest.raises(ValueError, match=r"Adasum.*Received: compression=int8"):
        hvd.DistributedOptimizer(torch.optim.SGD([parameter], 0.1), [("w", parameter)], "int8", op=hvd.Adasum)


class Wide(torch.nn.Module):
    """A model with a matrix that PowerSGD makes smaller, and a weight that is not trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))
        self.head = torch.nn.Linear(16, 3)
        self.frozen = torch.nn.Parameter(torch.ones(8, 8), requires_grad=False)

    def forward(self, x):
        return self.head(torch.tanh(self.layers(x)))


HOWS = {
    "overlapped": {},
    "accumulate": {"accumulate": 2, "clip_norm": 0.5},
    "delayed": {"sync": hvdtrain.Delayed()},
    "fp16": {"precision": "fp16"},
    "delayed fp16": {"precision": "fp16", "sync": hvdtrain.Delayed()},
    "cutoff": {"cutoff": 0.5, "accumulate": 2},
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_compressed_run_resumes_bit_for_bit(world, how, scheme, shared_tmp_path, assert_same_on_all_ranks):
    options = dict(HOWS[how])

    def train(*hooks):
        net = Wide()
        return net, kit.run(kit.make_trainer(net, compression=scheme, **options), hooks=hooks)

    net, trainer = train()
    assert_same_on_all_ranks(*net.parameters())
    if how == "cutoff":  # what is cut depends on time: repeat it
        options["cutoff"] = trainer.history.cutoffs
    held = memory(trainer)
    assert max(np.abs(each).max() for name, each in held.items() if name.startswith("mean.error")) > 0
    assert all(np.isfinite(each).all() for each in held.values())
    with pytest.raises(kit.StoppedError):
        train(Checkpoint(shared_tmp_path, every_steps=1), kit.StopAt(4 if how in ("cutoff", "accumulate") else 8))
    resumed, again = train(Checkpoint(shared_tmp_path))
    assert np.array_equal(flat(resumed), flat(net))
    found = memory(again)
    assert found.keys() == held.keys()
    assert all(np.array_equal(found[name], held[name]) for name in held)


@pytest.mark.parametrize("samples", [46, 5])
@pytest.mark.parametrize("scheme", ["topk:1.0", "powersgd:16:0"])
def test_without_loss_the_weights_are_those_without_compression(world, scheme, samples):
    """All numbers are sent: of matrices with rank 16, none would get smaller."""
    nets = []
    for compression in ("none", scheme):
        nets.append(Wide())
        kit.run(kit.make_trainer(nets[-1], compression=compression), kit.data(samples))
    np.testing.assert_allclose(flat(nets[1]), flat(nets[0]), atol=1e-5)


class Memories(Callback):
    """Notes the memory after each step, and whether it was taken."""

    def __init__(self):
        self.taken, self.held = [], []

    def on_step_end(self, trainer, step):
        self.taken.append(trainer.step_taken)
        self.held.append(memory(trainer))


@pytest.mark.parametrize("options", [{"nan_policy": "skip"}, {"precision": "fp16"}])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_step_that_ranks_refuse_leaves_the_memory_as_it_was(world, scheme, options):
    net, notes = Wide(), Memories()
    faulty = kit.Infinite(net.layers[2].weight, [5])
    trainer = kit.make_trainer(net, compression=scheme, **options)
    kit.run(trainer, hooks=[faulty, notes])
    refused = [step for step, was_taken in enumerate(notes.taken) if not was_taken]
    assert 5 in refused
    for step in refused[1:] if refused[0] == 0 else refused:
        before, after = notes.held[step - 1], notes.held[step]
        assert before.keys() == after.keys()
        assert all(np.array_equal(before[name], after[name]) for name in before)
    assert all(np.isfinite(each).all() for held in notes.held for each in held.values())
    assert np.isfinite(flat(net)).all()


@pytest.mark.parametrize("how", [{"sync": hvdtrain.Delayed()}, {"cutoff": 1.0, "accumulate": 2}])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_step_that_is_refused_late_leaves_no_nan_in_the_memory(world, scheme, how, assert_same_on_all_ranks):
    net = Wide()
    faulty = kit.Infinite(net.layers[2].weight, [2])
    trainer = kit.make_trainer(net, compression=scheme, nan_policy="skip", **how)
    kit.run(trainer, hooks=[faulty])
    assert False in faulty.taken
    assert all(np.isfinite(each).all() for each in memory(trainer).values())
    assert np.isfinite(flat(net)).all()
    assert_same_on_all_ranks(*net.parameters())


def test_a_later_fit_begins_without_errors(world):
    class Begins(Callback):
        def __init__(self):
            self.held = []

        def on_epoch_begin(self, trainer, epoch):
            self.held.append(memory(trainer))

    begins, net = Begins(), Wide()
    trainer = kit.make_trainer(net, compression="topk:0.1")
    for _ in range(2):
        kit.run(trainer, hooks=[begins], epochs=1)
        assert memory(trainer)
    assert begins.held == [{}, {}]


def test_what_cannot_be_combined_is_refused_with_the_reason(world):
    with pytest.raises(ValueError, match="the loss's scale"):
        kit.make_trainer(Wide(), compression="int8", cutoff=0.5, accumulate=2, precision="fp16")


def test_lbfgs_is_refused(world):
    net = Wide()
    with pytest.raises(ValueError, match=r"LBFGS.*Received: compression='topk:0.1'"):
        kit.make_trainer(net, torch.optim.LBFGS(net.parameters()), compression="topk:0.1")
