"""The same checks, run against horovod.torch 0.28.1 and against hvdtrain.torch: the first fails them, ours passes.

What is mended stays worth mending only as long as Horovod has it: if one of these starts to pass there, drop ours.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import horovod.torch as horovod
import pytest
import torch

pytestmark = [
    pytest.mark.world_size(2, 3),
    pytest.mark.two_suffice,
    pytest.mark.filterwarnings("ignore:optimizer.step.. called without"),
]

CHECKS: list[Callable[..., None]] = []


def check(function):
    CHECKS.append(function)
    return function


def sgd(params, **options):
    return torch.optim.SGD(params, **{"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, **options})


def linear(module):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return model, [(f"{module.__name__}.{name}", p) for name, p in model.named_parameters()]


@check
def broadcasting_an_optimizer_leaves_weights_alone(module):
    model, _ = linear(module)
    before = model.weight.detach().clone()
    module.broadcast_optimizer_state(sgd(model.parameters()), root_rank=0)
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


@check
def an_optimizer_keeps_its_state(module):
    model, named = linear(module)
    plain = sgd(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    plain.step()
    plain.zero_grad()
    assert model.weight in module.DistributedOptimizer(plain, named).state


@check
def an_optimizer_keeps_its_defaults(module):
    model, named = linear(module)
    assert module.DistributedOptimizer(sgd(model.parameters(), lr=0.5), named).defaults["lr"] == 0.5


@check
def parameters_added_later_are_reduced(module):
    model, named = linear(module)
    optimizer = module.DistributedOptimizer(sgd([model.weight]), named)
    optimizer.add_param_group({"params": [model.bias]})
    (model(torch.ones(1, 3)).sum() * module.rank() ** 2).backward()
    optimizer.synchronize()
    mean = sum(rank**2 for rank in range(module.size())) / module.size()
    assert float(model.bias.grad[0]) == pytest.approx(mean)


@check
def zero_grad_takes_set_to_none(module):
    model, named = linear(module)
    module.DistributedOptimizer(sgd(model.parameters()), named).zero_grad(set_to_none=False)


@check
def closures_keep_ranks_equal(module):
    model, named = linear(module)
    optimizer = module.DistributedOptimizer(sgd(model.parameters()), named)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).square().sum() * (module.rank() + 1)
        loss.backward()
        return loss.detach()

    loss = float(optimizer.step(closure))
    optimizer.synchronize()  # Horovod leaves reductions under way
    everyones = module.allgather_object(loss, name=f"{module.__name__}.defect.loss")
    assert len(set(everyones)) == 1


@check
def accumulation_can_average(module):
    model, named = linear(module)
    module.DistributedOptimizer(
        sgd(model.parameters()), named, backward_passes_per_step=2, average_aggregated_gradients=True
    )


@check
def parameters_that_nobody_used_do_not_decay(module):
    model, named = linear(module)
    unused = torch.nn.Parameter(torch.ones(2))
    named.append((f"{module.__name__}.unused", unused))
    optimizer = module.DistributedOptimizer(sgd([*model.parameters(), unused]), named)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(unused, torch.ones(2))


@check
def bfloat16_is_reduced(module):
    module.allreduce(torch.ones(2, dtype=torch.bfloat16), name="defect.bf16")


@check
def channels_last_gradients_are_reduced(module):
    param = torch.nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
    optimizer = module.DistributedOptimizer(sgd([param]), [(f"{module.__name__}.conv", param)])
    param.sum().backward()
    optimizer.step()


@check
def the_mean_is_over_the_ranks_still_there(module):
    mean = 1.0
    if module.rank() == 0:
        mean = float(module.allreduce(torch.ones(1), name=f"{module.__name__}.defect.join"))
    module.join()
    assert module.broadcast_object(mean, 0) == 1.0


@check
def sync_batch_norm_runs_on_the_cpu(module):
    module.SyncBatchNorm(3)(torch.randn(4, 3))


@check
def broadcast_takes_booleans_layouts_and_iterators(module):
    module.broadcast_parameters(iter([("mask", torch.ones(2, dtype=torch.bool)), ("t", torch.ones(2, 3).t())]), 0)


@check
def the_lbfgs_state_is_broadcast(module):
    model, _ = linear(module)
    module.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), root_rank=0)


@check
def ranks_get_samples_when_few_are_left(module):
    elastic = importlib.import_module(f"{module.__name__}.elastic")
    sampler = elastic.ElasticSampler(range(4), shuffle=False)
    sampler.num_replicas, left = 9, [0, 1, 2, 3]  # four samples for nine ranks
    sampler.remaining_indices, sampler.num_samples, sampler.total_size = left, 1, 9
    assert len(list(sampler)) == 1


@check
def the_elastic_sampler_knows_which_samples_were_processed(module):
    elastic = importlib.import_module(f"{module.__name__}.elastic")
    sampler = elastic.ElasticSampler(range(12), shuffle=False)
    sampler.record_batch(0, 2)
    assert sampler.processed_indices == set(range(2 * module.size()))


@check
def different_models_are_an_error_at_once(module):
    _, named = linear(module)
    params = named[: 1 if module.rank() == 0 else 2]
    with pytest.raises(RuntimeError, match=r"weight|bias"):
        module.DistributedOptimizer(sgd([p for _, p in params]), params)


@pytest.mark.parametrize("check", CHECKS, ids=[c.__name__ for c in CHECKS])
def test_mended_here(hvd, check):
    check(hvd)


@pytest.mark.parametrize("check", CHECKS, ids=[c.__name__ for c in CHECKS])
def test_broken_in_horovod(hvd, check):
    try:
        check(horovod)
        failed = False
    except (AssertionError, TypeError, ValueError, NotImplementedError, pytest.fail.Exception):
        failed = True
    assert failed, "horovod.torch passes this check now"
