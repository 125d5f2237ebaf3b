"""What ranks hold of a torch model of their own, on another number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from thread_ranks import Threads, on_ranks

from hvdtrain.distributed import rank_state
from hvdtrain.errors import CheckpointError, HvdTrainError
from hvdtrain.torch.steps import training_state


def test_batch_normalization_of_two_ranks_resumes_on_one():
    models = [torch.nn.BatchNorm1d(2) for _ in range(2)]
    for value, model in enumerate(models):
        model(torch.full((4, 2), float(value)))
    held = rank_state.combine([training_state.rank_state(model) for model in models], rank=0, size=1)
    training_state.set_rank_state(held, alone := torch.nn.BatchNorm1d(2))
    assert alone.num_batches_tracked == 1
    torch.testing.assert_close(alone.running_mean, (models[0].running_mean + models[1].running_mean) / 2)


@pytest.mark.parametrize("size", [3, 2])
@pytest.mark.parametrize("at_once_bytes", [2**20, 500])
def test_much_is_sent_by_one_rank_after_the_other(monkeypatch, at_once_bytes, size):
    monkeypatch.setattr(rank_state, "_AT_ONCE_BYTES", at_once_bytes)
    received = []

    class Noted(Threads):
        def allgather_bytes(self, data, *, name):
            parts = super().allgather_bytes(data, name=name)
            received.append(sum(map(len, parts)))
            return parts

    def state(rank):
        return {"random.x": np.full(60, rank), "mean.error": np.full(100, float(rank)), "max.table": np.ones(4)}

    saved = on_ranks(3, lambda world: rank_state.gather(state(world.rank), world=world), kind=Noted)
    assert saved[1:] == [{}, {}]
    assert sorted(saved[0]) == sorted(
        [*(f"{rank}/{name}" for rank in range(3) for name in ("random.x", "mean.error")), "0/max.table"]
    )
    found = on_ranks(size, lambda world: rank_state.scatter(saved[0] if world.is_root else {}, world=world), kind=Noted)
    for rank, mine in enumerate(found):
        assert mine["random.x"].tolist() == [rank] * 60
        assert mine["mean.error"].tolist() == [float(rank) if size == 3 else 1.0] * 100
        assert mine["max.table"].tolist() == [1.0] * 4
    assert (max(received) < 3000) is (at_once_bytes == 500)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_large_arrays_are_combined_as_small_ones(monkeypatch, size):
    def of(rank):
        numbers = np.arange(7.0) * (rank + 1)
        return {"sum.a": numbers, "mean.own": numbers, "max.b": numbers, "cat.c": numbers, "random.d": numbers}

    saved = {f"{rank}/{name}": array for rank in range(2) for name, array in of(rank).items()}
    saved |= {"0/max.shared": np.arange(9.0), "0/mean.equal": np.arange(5.0)}
    del saved["1/mean.own"]  # it equals that of rank 0

    def scatter(world):
        return rank_state.scatter(saved if world.is_root else {}, world=world)

    small = on_ranks(size, scatter)
    monkeypatch.setattr(rank_state, "_LARGE_BYTES", 0)
    monkeypatch.setattr(rank_state, "_PIECE_BYTES", 16)
    for mine, expected in zip(on_ranks(size, scatter), small, strict=True):
        assert mine.keys() == expected.keys()
        for name, array in expected.items():
            assert np.array_equal(mine[name], array), name
            assert mine[name].dtype == array.dtype


@pytest.mark.parametrize("large_bytes", [0, 100])
def test_an_array_that_the_root_cannot_read_ends_all_ranks(monkeypatch, large_bytes):
    class Damaged(dict):
        def __getitem__(self, name):
            raise CheckpointError(f"{name} cannot be read")

    monkeypatch.setattr(rank_state, "_LARGE_BYTES", large_bytes)

    def scatter(world):
        saved = Damaged({"0/max.a": np.ones(2)}) if world.is_root else {}
        with pytest.raises(HvdTrainError, match=r"0/max.a cannot be read"):
            rank_state.scatter(saved, world=world, nbytes=lambda name: 16)

    on_ranks(2, scatter)
