"""N ranks with batch B end with the weights of DistributedDataParallel, and of one process with batch N*B."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.world_size(2, 3), pytest.mark.on_gpus]
STEPS = 20


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)


def test_equal_to_distributed_data_parallel(hvd, task, difference, assert_same_on_all_ranks, shared_tmp_path):
    ours, theirs = task.model(), task.model()
    optimizer = hvd.DistributedOptimizer(sgd(ours), ours.named_parameters())
    hvd.broadcast_parameters(ours.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    task.train(ours, optimizer, STEPS)

    store = torch.distributed.FileStore(str(shared_tmp_path / "ddp"), task.size)
    backend = "nccl" if torch.get_default_device().type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=task.rank, world_size=task.size)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(theirs)
        task.train(wrapped, sgd(theirs), STEPS)
    finally:
        torch.distributed.destroy_process_group()
    assert difference(ours, theirs) < 1e-6
    assert difference(ours, task.model()) > 1e-2  # it trained
    assert_same_on_all_ranks(*ours.parameters())


def test_equal_to_one_process_with_the_global_batch(hvd, task, difference, assert_same_on_all_ranks):
    ours, alone = task.model(), task.model()
    optimizer = hvd.DistributedOptimizer(sgd(ours), ours.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    task.train(ours, optimizer, STEPS)
    task.train_alone(alone, sgd(alone), STEPS)
    assert difference(ours, alone) < 1e-6
    assert_same_on_all_ranks(*ours.parameters())


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.AdamW(p, lr=1e-2),
    lambda p: torch.optim.Adagrad(p, lr=1e-2),
    lambda p: torch.optim.RMSprop(p, lr=1e-3),
])  # fmt: skip
def test_other_optimizers_are_equal_to_one_process_too(hvd, task, difference, make):
    ours, alone = task.model(), task.model()
    task.train(ours, hvd.DistributedOptimizer(make(ours.parameters()), ours.named_parameters()), 5)
    task.train_alone(alone, make(alone.parameters()), 5)
    assert difference(ours, alone) < 1e-5


@pytest.mark.on_cpus  # on GPUs the flags travel by themselves
def test_each_gradient_goes_through_horovod_once_a_step(hvd, task, native_calls):
    model = task.model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    native_calls.names.clear()
    task.train(model, optimizer, 3)
    for name, _ in model.named_parameters():
        assert native_calls.names.count(name) == 1
    assert native_calls.names.count("gradients.present") == 1
    assert native_calls.names.count("2.bias.bucket") == 2  # all of these, which are small, from the second step on
    assert len(native_calls.names) == 4 + 1 + 2


def test_reduction_starts_during_backward(hvd, task, native_calls):
    model = task.model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    native_calls.names.clear()
    seen_at_the_first_layer = []
    model[0].weight.register_hook(lambda _: seen_at_the_first_layer.extend(native_calls.names))
    task.loss(model, task.mine(task.batches(1)[0])).backward()
    optimizer.step()
    assert "2.weight" in seen_at_the_first_layer
