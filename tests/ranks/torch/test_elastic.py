"""Elastic state and sampler among ranks that stay; the end of a rank is in tests/e2e."""

from __future__ import annotations

import pytest
import torch

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
