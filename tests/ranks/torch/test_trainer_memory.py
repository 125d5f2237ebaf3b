"""The memory that a rank says it holds: by shards, buckets and compressors, and in an error of one rank."""

from __future__ import annotations

import pytest
import torch

import hvdtrain

pytestmark = [pytest.mark.world_size(2), pytest.mark.usefixtures("hvd")]

WEIGHTS = 4 * (64 * 256 + 256 + 256 * 8 + 8)  # bytes


class Net(torch.nn.Module):
    def __init__(self, fails=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.fails = torch.nn.Linear(64, 256), torch.nn.Linear(256, 8), fails

    def forward(self, x):
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB.")
        return self.last(self.first(x))


def make(model, kind=torch.optim.Adam, **options):
    return hvdtrain.Trainer(model, optimizer=kind(model.parameters()), loss=torch.nn.MSELoss(), **options)


def fit(trainer):
    x = torch.ones(16, 64)
    trainer.fit((x, x[:, :8]), batch_size=4, progress=False, run_dir=None)
    return trainer.memory


@pytest.mark.parametrize("shard", [None, "optimizer", "gradients"])
def test_shards_are_said_before_and_after_the_first_step(size, shard):
    trainer = make(Net(), shard=shard)
    before, after = trainer.memory, fit(trainer)
    state, gradients = 2 * WEIGHTS, WEIGHTS
    assert before["weights"] == after["weights"] == WEIGHTS
    assert before["optimizer"] == (state if shard is None else state // size)
    assert after["optimizer"] == pytest.approx(before["optimizer"], rel=0.1)  # parts are rounded up to 64 numbers
    assert before["gradients"] == after["gradients"] == (gradients // size if shard == "gradients" else gradients)


@pytest.mark.parametrize("compression", ["none", "topk:0.5"])
def test_buckets_and_errors_of_compression_count(compression):
    trainer = make(Net(), torch.optim.SGD, compression=compression)
    assert trainer.memory["buckets"] == 0
    buckets = fit(trainer)["buckets"]
    assert buckets == pytest.approx(WEIGHTS, rel=0.1)  # all of this small model's gradients, or their errors


def test_each_rank_says_what_takes_its_memory(rank):
    with pytest.raises(torch.OutOfMemoryError) as caught:
        fit(make(Net(fails=True), shard="optimizer"))  # on all ranks, so that none waits for another
    note = str(caught.value).rpartition("\n")[2]
    assert note.startswith(f"hvdtrain: memory of rank {rank}: ")
    assert all(f"{part} 74.8 kB" in note for part in ("weights", "gradients", "optimizer state"))
