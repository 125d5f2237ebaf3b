"""Elastic state and sampler among ranks that stay; the end of a rank is in tests/e2e."""

from __future__ import annotations

import pytest
import torch

from hvdtrain.distributed import keepers
from hvdtrain.errors import LostShardError

pytestmark = pytest.mark.world_size(2, 3)


def test_state_becomes_the_roots_and_can_be_restored(hvd, rank, assert_same_on_all_ranks):
    torch.manual_seed(rank)
    model = torch.nn.Linear(2, 2)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1), momentum=0.9), model.named_parameters()
    )
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=rank + 4, batch=0)
    state.sync()
    assert state.epoch == 4
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert_same_on_all_ranks(*model.parameters())
    committed = model.weight.detach().clone()
    state.commit()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state.epoch = 9
    state.restore()
    assert state.epoch == 4
    assert torch.equal(model.weight, committed)


def test_run_synchronizes_first_and_starts_again_after_a_failure(hvd, rank):
    state = hvd.elastic.TorchState(model=torch.nn.Linear(1, 1), step=0)
    starts = []

    @hvd.elastic.run
    def train(state):
        starts.append(state.step)
        state.step = 5
        state.commit()
        state.step = 6
        return "done"

    assert train(state) == "done"
    assert starts == [0]


@pytest.mark.parametrize("length", [1, 2, 7, 24, 25])
def test_every_sample_is_seen_and_ranks_take_equal_steps(hvd, rank, size, length):
    sampler = hvd.elastic.ElasticSampler(range(length), seed=3)
    everyones = hvd.allgather_object(list(sampler))
    assert {len(indices) for indices in everyones} == {-(-length // size)}
    assert {i for indices in everyones for i in indices} == set(range(length))
    assert sum(map(len, everyones)) - length < size


def test_after_a_reset_only_what_is_left_is_seen(hvd, rank, size):
    sampler = hvd.elastic.ElasticSampler(range(25), seed=3)
    state = hvd.elastic.TorchState(model=torch.nn.Linear(1, 1), sampler=sampler)
    seen = list(sampler)[:4]
    sampler.record_batch(0, 2)
    sampler.record_batch(1, 2)
    state.save()
    sampler.record_batch(2, 1)
    state.restore()
    state.sync()
    seen_by_all = {i for indices in hvd.allgather_object(seen) for i in indices}
    assert sampler.processed_indices == seen_by_all
    assert sampler.processed_num == 4 * size
    left = {i for indices in hvd.allgather_object(list(sampler)) for i in indices}
    assert left == set(range(25)) - seen_by_all
    sampler.set_epoch(1)
    assert len(sampler) == -(-25 // size)


def test_a_rank_that_has_just_come_takes_over_what_the_others_processed(hvd, rank, size):
    sampler = hvd.elastic.ElasticSampler(range(12), shuffle=False)
    state = hvd.elastic.TorchState(model=torch.nn.Linear(1, 1), sampler=sampler)
    if rank != size - 1:
        sampler.record_batch(0, 1)
    state.sync()
    assert sampler.processed_indices == set(range(size))


def test_horovods_own_sampler_state_loads(hvd, size):
    sampler = hvd.elastic.ElasticSampler(range(12), shuffle=False)
    sampler.load_state_dict({"epoch": 2, "processed_num": 4})
    assert sampler.processed_indices == {0, 1, 2, 3}
    assert sampler.epoch == 2


@pytest.fixture
def hosts(monkeypatch, rank):
    """Let each rank be a host, so that each keeps a copy of another one's shard."""
    monkeypatch.setattr(keepers, "this_host", lambda: ("here", f"host-{rank}"))


def make(hvd, *, shard, passes=1, optimizer=torch.optim.Adam):
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(6, 147), torch.nn.Tanh(), torch.nn.Linear(147, 3))
    plain = optimizer(net.parameters(), lr=0.01)
    how = {"backward_passes_per_step": passes, "shard_state": shard}
    return net, hvd.DistributedOptimizer(plain, net.named_parameters(), **how)


def backward(net, seed, rank):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    net(torch.randn(5, 6, generator=generator)).square().mean().backward()


def take(net, optimizer, steps, rank):
    for seed in steps:
        optimizer.zero_grad()
        backward(net, seed, rank)
        optimizer.step()


def assert_equal(ours, theirs):
    """Compare weights and whole states."""
    (net, optimizer), (right, plain) = ours, theirs
    assert all(torch.equal(mine, each) for mine, each in zip(net.parameters(), right.parameters(), strict=True))
    optimizer.consolidate_state_dict(None)
    found, expected = optimizer.state_dict()["state"], plain.state_dict()["state"]
    assert found.keys() == expected.keys()
    for index, entries in expected.items():
        assert found[index].keys() == entries.keys()
        assert all(torch.equal(found[index][name], each) for name, each in entries.items())


def test_a_sharded_state_is_committed_restored_and_synchronized(hvd, rank, hosts):
    (net, optimizer), (right, plain) = (make(hvd, shard=shard) for shard in (True, False))
    state = hvd.elastic.TorchState(model=net, optimizer=optimizer, step=0)
    state.restore()  # before the first commit
    state.sync()
    take(net, optimizer, range(3), rank)
    state.step = 3
    state.commit()
    take(net, optimizer, range(3, 6), rank)
    state.step = 6
    state.restore()
    assert state.step == 3
    take(right, plain, range(3), rank)
    assert_equal((net, optimizer), (right, plain))
    take(net, optimizer, [6], rank)
    state.sync()  # ranks are the same: the present state counts
    take(right, plain, [6], rank)
    assert_equal((net, optimizer), (right, plain))
    take(net, optimizer, [7], rank)
    state.restore()
    state.on_reset()
    state.sync()
    take(net, optimizer, [8], rank)
    take(right, plain, [8], rank)
    assert_equal((net, optimizer), (right, plain))


def test_a_failure_without_a_change_of_ranks_costs_the_steps_since_the_commit(hvd, rank, hosts, monkeypatch):
    monkeypatch.setattr(hvd.elastic, "reset", lambda: None)
    failure = type("HorovodInternalError", (RuntimeError,), {})
    (net, optimizer), (right, plain) = (make(hvd, shard=shard) for shard in (True, False))
    state = hvd.elastic.TorchState(model=net, optimizer=optimizer, step=0)

    @hvd.elastic.run
    def train(state):
        has_failed = bool(starts)
        starts.append(state.step)
        take(net, optimizer, range(state.step, 3), rank)
        state.step = 3
        state.commit()
        take(net, optimizer, range(3, 5), rank)
        if not has_failed:
            raise failure("a connection was lost")

    starts = []
    train(state)
    assert starts == [0, 3]
    take(right, plain, range(5), rank)
    assert_equal((net, optimizer), (right, plain))


def test_a_commit_between_backward_passes_changes_no_bit_of_a_sharded_step(hvd, rank, hosts):
    (net, optimizer), (right, plain) = (make(hvd, shard=shard, passes=2) for shard in (True, False))
    state = hvd.elastic.TorchState(model=net, optimizer=optimizer)
    state.sync()
    for seed in range(4):
        for each, its in ((net, optimizer), (right, plain)):
            its.zero_grad()
            backward(each, 2 * seed, rank)
            if each is net:
                state.commit()
            backward(each, 2 * seed + 1, rank)
            its.step()
    assert_equal((net, optimizer), (right, plain))
    state.restore()  # to the middle of the last step: it begins again
    optimizer.zero_grad()
    backward(net, 6, rank)
    backward(net, 7, rank)
    optimizer.step()
    assert_equal((net, optimizer), (right, plain))


def committed(hvd, rank):
    """Return a TorchState that was committed after two steps with a sharded state."""
    net, optimizer = make(hvd, shard=True)
    state = hvd.elastic.TorchState(model=net, optimizer=optimizer)
    state.sync()
    take(net, optimizer, range(2), rank)
    state.commit()
    return state


def test_each_rank_keeps_its_shard_and_one_copy(hvd, rank, size, hosts):
    state = committed(hvd, rank)
    state.commit()  # the earlier one is dropped
    numbers = sum(p.numel() for p in state.model.parameters())
    whole, rounding = 2 * 4 * numbers, 2 * 4 * 64 * len(list(state.model.parameters()))
    held = hvd.allgather_object(state._shards.nbytes)
    assert max(held) <= 2 * (whole / size + rounding)
    assert sum(held) == 2 * whole


def test_on_one_host_no_copies_are_kept(hvd, rank, size):
    state = committed(hvd, rank)
    assert sum(hvd.allgather_object(state._shards.nbytes)) == 2 * 4 * sum(p.numel() for p in state.model.parameters())


def test_a_part_that_no_rank_holds_is_an_error_on_every_rank(hvd, rank, size, hosts):
    state = committed(hvd, rank)
    state.on_reset()
    for commit in state._shards._commits.values():
        commit.parts.pop(1, None)
    with pytest.raises(LostShardError, match=r"lost: rank 1 \(host host-1\) and the keeper of its copy, rank .*newest"):
        state.sync()
