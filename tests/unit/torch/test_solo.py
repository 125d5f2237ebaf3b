"""One process: the same results, and nothing added."""

from __future__ import annotations

import pytest
import torch


def make(hvd, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, plain, hvd.DistributedOptimizer(plain, model.named_parameters(), **options)


def test_collectives_return_what_they_were_given(hvd):
    x = torch.arange(4.0)
    for got in (
        hvd.allreduce(x),
        hvd.allreduce(x, op=hvd.Sum),
        hvd.allreduce(x, compression=hvd.Compression.fp16),
        hvd.allreduce(x, compression=hvd.Compression.bf16),
        hvd.grouped_allreduce([x, x])[1],
        hvd.synchronize(hvd.allreduce_async(x)),
        hvd.allgather(x),
        hvd.grouped_allgather([x])[0],
        hvd.broadcast(x, 0),
        hvd.alltoall(x),
        hvd.alltoall(x, splits=[4])[0],
        hvd.reducescatter(x),
        hvd.grouped_reducescatter([x, x])[0],
    ):
        assert torch.equal(got, x)
        assert got is not x
    assert hvd.allreduce_(x) is x
    assert hvd.broadcast_(x, 0) is x
    assert torch.equal(hvd.allreduce(x, prescale_factor=2.0), 2 * x)
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(hvd.synchronize(hvd.sparse_allreduce_async(sparse, "s", hvd.Average)).to_dense(), torch.eye(3))
    assert hvd.allgather_object("x") == ["x"]
    assert hvd.broadcast_object("x") == "x"
    assert hvd.join() == 0
    hvd.barrier()


def test_collectives_are_differentiable(hvd):
    x = torch.ones(2, requires_grad=True)
    (
        hvd.allreduce(x) + hvd.allgather(x) + hvd.broadcast(x, 0) + hvd.alltoall(x) + hvd.reducescatter(x)
    ).sum().backward()
    assert x.grad.tolist() == [5.0, 5.0]


def test_the_optimizer_adds_no_hooks_and_changes_nothing(hvd):
    model, _, optimizer = make(hvd)
    twin = torch.nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    reference = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    for _ in range(3):
        for m, opt in ((model, optimizer), (twin, reference)):
            opt.zero_grad()
            m(torch.ones(4, 3)).square().sum().backward()
            opt.step()
    assert torch.equal(model.weight, twin.weight)


def test_accumulation_averages_by_choice_alone_too(hvd):
    model, _, optimizer = make(hvd, backward_passes_per_step=4, average_aggregated_gradients=True)
    for _ in range(4):
        model(torch.ones(1, 3)).sum().backward()
    optimizer.synchronize()
    assert model.bias.grad.tolist() == [1.0, 1.0]


def test_closures_clipping_and_sync_batch_norm_work_alone(hvd):
    model, _, optimizer = make(hvd)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss.detach()

    first = float(optimizer.step(closure))
    assert float(optimizer.step(closure)) < first
    closure()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with optimizer.skip_synchronize():
        optimizer.step()
    x = torch.randn(4, 3)
    assert torch.equal(hvd.SyncBatchNorm(3)(x), torch.nn.BatchNorm1d(3)(x))


def test_process_sets_of_one(hvd):
    mine = hvd.add_process_set([0])
    assert (mine.size(), mine.rank(), mine.included()) == (1, 0, True)
    assert hvd.remove_process_set(mine)
    assert mine.size() is None
    assert not hvd.remove_process_set(hvd.global_process_set)  # which stays, as Horovod's does
    assert hvd.global_process_set.size() == 1
    with pytest.raises(ValueError, match="one process"):
        hvd.add_process_set([0, 1])
    with pytest.raises(ValueError, match="list of ranks"):
        hvd.ProcessSet(["a"])


def test_broadcast_from_a_rank_that_does_not_exist_is_an_error(hvd):
    with pytest.raises(ValueError, match="root_rank=1"):
        hvd.broadcast(torch.ones(1), 1)


def test_nothing_works_after_shutdown(hvd):
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match=r"hvd.init\(\)"):
        hvd.size()
    hvd.init()


@pytest.mark.parametrize(("length", "recorded"), [(10, 4), (3, 3), (0, 0)])
def test_elastic_sampler_resumes_where_it_stopped(hvd, length, recorded):
    sampler = hvd.elastic.ElasticSampler(range(length), seed=1)
    first = list(sampler)[:recorded]
    sampler.record_batch(0, recorded)
    state = sampler.state_dict()
    other = hvd.elastic.ElasticSampler(range(length), seed=1)
    other.load_state_dict(state)
    assert sorted(first + list(other)) == list(range(length))


def test_elastic_state_commits_and_restores(hvd):
    model, _, optimizer = make(hvd)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=1)
    before = model.weight.detach().clone()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state.epoch = 2
    state.restore()
    assert torch.equal(model.weight, before)
    assert state.epoch == 1
    replacement = torch.nn.Linear(3, 2)
    state.model = replacement
    assert state.model is replacement


@pytest.mark.parametrize("forced", [False, True], ids=["alone", "HVDTRAIN_REDUCE_ALONE=1"])
def test_one_rank_reduces_only_on_request(hvd, monkeypatch, forced):
    from hvdtrain.torch.ops import solo

    if forced:
        monkeypatch.setenv("HVDTRAIN_REDUCE_ALONE", "1")
    sent, send = [], solo.allreduce_async_
    monkeypatch.setattr(
        solo, "allreduce_async_", lambda t, **options: sent.append(options["name"]) or send(t, **options)
    )
    model, _, optimizer = make(hvd)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert {"weight", "bias"} <= set(sent) if forced else not sent
