"""Unequal parts of a step: what is divided, when shares change, what is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest
from fake_world import FakeWorld

from hvdtrain.data import sharding
from hvdtrain.data.reading import as_source
from hvdtrain.data.sources import Consumed, IteratedSource
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.sync.balance import Balance, as_given, by_speed, check_balance
from hvdtrain.telemetry.interval import RankTimes

BATCH = 4


def source(num_samples=100, *, rank=0, size=1, batch_size=BATCH, data=None):
    x = np.arange(num_samples)[:, None].astype(np.float32)
    return as_source((x, x) if data is None else data, batch_size=batch_size, world=FakeWorld(rank, size), seed=0)


def loader(num_samples, **options):
    torch = pytest.importorskip("torch")
    rows = torch.utils.data.TensorDataset(*[torch.arange(num_samples, dtype=torch.float32)[:, None]] * 2)
    return torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True, **options)


@pytest.mark.parametrize("shares", [[1, 1], [12, 12, 4, 4], [1, 62, 1]])
def test_each_sample_of_a_step_belongs_to_one_rank(shares):
    for num_samples in range(sum(shares) + 1):
        offsets = sharding.divide(num_samples, shares)
        assert offsets[0] == 0
        assert offsets[-1] == num_samples
        parts = np.diff(offsets)
        assert (parts >= 0).all()
        assert (abs(parts - num_samples * np.array(shares) / sum(shares)) < 1).all()
    assert parts.tolist() == shares


@pytest.mark.parametrize("kind", ["arrays", "loader", "loader with drop_last"])
@pytest.mark.parametrize("shares", [[9, 1, 2], [4, 4, 4]])
def test_steps_hold_the_samples_of_equal_parts(kind, shares):
    data = None if kind == "arrays" else loader(52, drop_last="drop_last" in kind)

    def epoch(rank, shares, after=Consumed()):  # noqa: B008 - frozen
        of_rank = source(52, rank=rank, size=3, data=data)
        of_rank.shares = shares
        return list(of_rank.epoch(1, shuffle=True, after=after))

    equal, divided = ([epoch(rank, given) for rank in range(3)] for given in (None, shares))
    steps = list(zip(*equal, strict=True)), list(zip(*divided, strict=True))
    for ours, theirs in zip(*steps, strict=True):
        mine = [sorted(np.concatenate([each.indices for each in step]).tolist()) for step in (ours, theirs)]
        assert mine[0] == mine[1]
        assert [each.local_count for each in theirs] == np.diff(sharding.divide(len(mine[0]), shares)).tolist()
        assert {each.global_count for each in theirs} == {len(mine[0])}
        assert {each.largest for each in theirs} == {max(each.local_count for each in theirs)}
        for each in theirs:
            if each.local_count:
                assert np.asarray(each.inputs)[:, 0].astype(int).tolist() == each.indices.tolist()
            else:
                assert len(each.inputs), "a filler"
    rest = [epoch(rank, shares, Consumed(24, 6, 3)) for rank in range(3)]
    for rank in range(3):
        assert [each.indices.tolist() for each in rest[rank]] == [each.indices.tolist() for each in divided[rank][2:]]


def test_workers_of_a_loader_read_the_parts():
    given = source(30, rank=1, size=2, data=loader(30, num_workers=1))
    given.shares = [1, 7]
    read = list(given.epoch(0, shuffle=True))
    assert [each.local_count for each in read] == [7, 7, 7, 6]
    for each in read:
        assert each.inputs[:, 0].int().tolist() == each.indices.tolist()


def test_given_shares_are_proportions():
    assert as_given([3, 3, 1, 1], 32) == [12, 12, 4, 4]
    assert as_given([0.5, 0.25], 10) == [7, 3]
    with pytest.raises(ValueError, match=r"must leave each rank a sample .* divides 8 samples into \[8, 0\]"):
        as_given([100.0, 1.0], 8)


@pytest.mark.parametrize("batch_size", [1, 8, 32, 100])
@pytest.mark.parametrize("speeds", [[1, 1, 1, 0.5], [1, 1, 1, 1], [1, 0.9], [10, 1, 1], [0.01, 1]])
def test_shares_by_speed_make_short_steps_of_as_many_samples(speeds, batch_size):
    found = by_speed(np.array(speeds, float), batch_size=batch_size)
    assert sum(found) == batch_size * len(speeds)
    assert min(found) >= 1
    assert max(found) <= 2 * batch_size
    equal_s = batch_size / min(speeds)
    assert max(np.array(found) / speeds) <= equal_s + max(1, batch_size // 32) / min(speeds)
    if batch_size >= 32 and max(speeds) == 1 and min(speeds) >= 0.5:
        ideal_s = batch_size * len(speeds) / sum(speeds)
        assert max(np.array(found) / speeds) <= 1.05 * ideal_s


def times(*seconds):
    zero = np.zeros(len(seconds))
    own = np.array(seconds, float)
    return RankTimes(step=np.full(len(seconds), own.max()), data=zero, train=own, reduction=zero, other=zero)


def balance(given="speed", size=4, batch_size=32):
    data = source(1000, size=size, batch_size=batch_size)
    return Balance(given, data, size=size), data


def test_shares_follow_the_speed_of_ranks_and_then_stay():
    found, data = balance()
    assert [found.observe(times(1, 1, 1, 2)) for _ in range(2)] == [None, None]
    line = found.observe(times(1, 1, 1, 2))
    assert found.shares == data.shares == [37, 37, 36, 18]
    assert line == (
        "balance: from here on ranks take 37, 37, 36, 18 of 128 samples a step (rank 3 takes 2.0 times the median's "
        "time for a sample)"
    )
    for _ in range(20):
        assert found.observe(times(37 / 32, 37 / 32, 36 / 32, 36 / 32)) is None
    for _ in range(6):  # and rank 3 recovers
        line = found.observe(times(37 / 32, 37 / 32, 36 / 32, 18 / 32)) or line
    assert found.shares == [32, 32, 32, 32]
    assert "ranks take 32, 32, 32, 32" in line


def test_a_few_percent_and_one_long_interval_change_nothing():
    found, data = balance()
    for seconds in [(9, 9, 9, 90), *[(1, 1, 1.04, 1)] * 20]:
        assert found.observe(times(*seconds)) is None
    assert found.shares is data.shares is None


def test_measured_shares_continue_in_a_resumed_run_of_as_many_samples_a_step():
    found, data = balance()
    for shares in ([64, 64], [16, 16, 16, 16], None):
        found.resume(shares)
        assert found.shares is data.shares is None
    found.resume([40, 40, 40, 8])
    assert found.shares == data.shares == [40, 40, 40, 8]
    found, data = balance([1.0, 1.0, 1.0, 2.0])
    found.resume([40, 40, 40, 8])
    assert data.shares == [26, 25, 26, 51]


def test_one_process_has_nothing_to_divide():
    found, data = balance(size=1)
    assert found.observe(times(1)) is None
    assert data.shares is None


@pytest.mark.parametrize("given", ["fast", [], [1, 0], [1, -1], [1, float("nan")], 3, ["a", "b"], [1, float("inf")]])
def test_what_is_no_balance_is_refused(given):
    message = f'balance must be None, "speed", or a positive number for each rank.*{re.escape(repr(given))}'
    with pytest.raises(ValueError, match=message):
        check_balance(given, size=2)


def test_shares_of_another_number_of_ranks_are_refused():
    with pytest.raises(ValueError, match=r"each of 4 ranks\. Received: balance=\[3, 1\], 2 numbers\. With balance=.sp"):
        check_balance([3, 1], size=4)


def test_data_that_can_only_be_iterated_is_refused():
    stream = IteratedSource(lambda epoch, shuffle, after: iter(()), ranks=DataRanks(FakeWorld(0, 2)))
    with pytest.raises(TypeError, match=r"divides steps sample by sample\. Received: data that can only be iterated"):
        Balance("speed", stream, size=2)


def test_new_shares_leave_the_order_that_a_sampler_of_the_users_own_has_drawn():
    torch = pytest.importorskip("torch")

    class Order(torch.utils.data.Sampler):
        def __iter__(self):
            return iter(np.random.permutation(48).tolist())  # noqa: NPY002 - another order each time

        def __len__(self):
            return 48

    class Drawing(FakeWorld):
        def broadcast(self, array, *, name=None):
            return array

    loader = torch.utils.data.DataLoader(range(48), batch_size=BATCH, sampler=Order())
    of_rank = as_source(loader, batch_size=BATCH, world=Drawing(0, 1), seed=0)
    batches, used = of_rank.epoch(0, shuffle=True), []
    for _ in range(5):
        used += next(batches).indices.tolist()
    balance = Balance([1.0], of_rank, size=1)
    assert balance.has_changed
    for batch in balance.rest(0, Consumed(samples=5 * BATCH)):
        used += batch.indices.tolist()
    assert not balance.has_changed
    assert sorted(used) == list(range(48))
