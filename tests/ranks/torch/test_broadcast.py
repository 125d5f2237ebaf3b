"""A broadcast changes nothing but what it broadcasts."""

from __future__ import annotations

import warnings

import pytest
import torch

pytestmark = [pytest.mark.world_size(2, 3), pytest.mark.two_suffice]


@pytest.mark.over_gloo
def test_parameters_of_every_kind_arrive(hvd, rank, assert_same_on_all_ranks):
    def tensors():
        torch.manual_seed(rank)
        return {
            "weight": torch.nn.Parameter(torch.randn(3, 4)),
            "transposed": torch.randn(3, 4).t(),
            "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
            "scalar": torch.tensor(float(rank)),
            "bf16": torch.randn(5).to(torch.bfloat16),
            "mask": torch.rand(9) > 0.5,
            "count": torch.tensor(rank),
            "empty": torch.empty(0, 3),
        }

    named = tensors()
    for params in (tensors(), list(tensors().items()), iter(tensors().items()), list(tensors().values())):
        hvd.broadcast_parameters(params, root_rank=1)
    hvd.broadcast_parameters(named, root_rank=1)
    assert_same_on_all_ranks(*named.values())
    torch.manual_seed(1)
    assert torch.equal(named["weight"], torch.randn(3, 4))


def test_model_iterators_are_taken(hvd, rank, assert_same_on_all_ranks):
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    hvd.broadcast_parameters(model.named_parameters(), root_rank=0)
    hvd.broadcast_parameters(model.parameters(), root_rank=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert_same_on_all_ranks(*model.state_dict().values())


def test_what_is_not_a_tensor_is_named_and_left_alone(hvd, rank):
    params = {"a": torch.ones(1) * rank, "extra": {"anything": 1}}
    with pytest.warns(UserWarning, match="left these alone.*extra"):
        hvd.broadcast_parameters(params, root_rank=0)
    assert float(params["a"]) == 0


def test_params_of_another_kind_are_an_error(hvd):
    with pytest.raises(ValueError, match="Received: int"):
        hvd.broadcast_parameters(3, root_rank=0)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


def advance(model, optimizer, steps=2):
    for step in range(steps):

        def closure(step=step):
            optimizer.zero_grad()
            loss = model(torch.arange(6.0).view(2, 3) + step).square().sum()
            loss.backward()
            return loss.detach()

        optimizer.step(closure)


def flat(optimizer):
    """All that the optimizer knows, as plain values."""

    def plain(value):
        if isinstance(value, torch.Tensor):
            return (str(value.dtype), value.tolist())
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        return value

    return plain(optimizer.state_dict())


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("who", ["root has state", "others have state", "all have", "nobody has"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_optimizer_state_becomes_the_roots_and_nothing_else_changes(hvd, rank, make, who, distributed):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = make(model.parameters())
    is_root = rank == 1
    if who == "all have" or (who == "root has state" and is_root) or (who == "others have state" and not is_root):
        advance(model, optimizer, steps=1 + rank)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * (1 + rank)
    if distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    model.weight.grad = None
    model.bias.grad = torch.ones(2)
    before = [p.detach().clone() for p in model.parameters()]
    everyones = hvd.allgather_object(flat(optimizer))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    assert flat(optimizer) == everyones[1]
    assert model.weight.grad is None
    assert torch.equal(model.bias.grad, torch.ones(2))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_tensors_keep_their_memory(hvd, rank):
    model = torch.nn.Linear(3, 2)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    advance(model, optimizer)
    moment = optimizer.state[model.weight]["exp_avg"]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.state[model.weight]["exp_avg"] is moment


def test_nested_and_unknown_state_arrives(hvd, rank):
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=0.1)
    if rank == 0:
        optimizer.state[param] = {"history": [torch.ones(2), (None, {"deep": torch.tensor(3)})], "seen": {1, 2}}
        optimizer.state["shared"] = {"count": 7, "owner": param}
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    state = optimizer.state[param]
    assert state["history"][0].tolist() == [1, 1]
    assert int(state["history"][1][1]["deep"]) == 3
    assert state["seen"] == {1, 2}
    assert optimizer.state["shared"]["count"] == 7
    assert optimizer.state["shared"]["owner"] is param


def test_other_groups_are_an_error_on_every_rank(hvd, rank):
    model = torch.nn.Linear(3, 2)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params if rank == 0 else params[:1], lr=0.1)
    with pytest.raises(ValueError, match=r"rank 1 has parameter groups of \[1\].*rank 0 of \[2\]"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def test_ranks_are_bitwise_equal_after_horovods_documented_resume(
    hvd, task, rank, assert_same_on_all_ranks, shared_tmp_path
):
    def make():
        model = task.model()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)

    reference, plain = make()
    task.train_alone(reference, plain, 2)
    file = shared_tmp_path / "checkpoint.pt"
    if rank == 0:
        torch.save({"model": reference.state_dict(), "optimizer": plain.state_dict()}, file)
    hvd.barrier()
    model, optimizer = make()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    if rank == 0:
        checkpoint = torch.load(file)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert_same_on_all_ranks(*model.parameters(), *(s["momentum_buffer"] for s in optimizer.state.values()))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), reference.parameters(), strict=True))
    task.train(model, optimizer, 2)
    assert_same_on_all_ranks(*model.parameters())
