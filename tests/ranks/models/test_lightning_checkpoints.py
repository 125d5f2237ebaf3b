"""Checkpoints of Lightning on ranks: what goes on from them ends as if nothing had stopped."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_kit import MARKS, Model, assert_equal, assert_same_on_ranks, loaders, train_alone, trainer_of

import hvdtrain.torch as hvd

pytestmark = [pytest.mark.world_size(2, 3), *MARKS]


def test_a_run_from_a_checkpoint_ends_as_one_that_never_stopped(world, shared_tmp_path):
    straight, first, second = (Model("adam", schedule="step", seed=world.rank) for _ in range(3))
    trainer_of(epochs=4).fit(straight, *loaders())
    saved = ModelCheckpoint(dirpath=shared_tmp_path, filename="half", save_weights_only=False)
    trainer_of(epochs=2, enable_checkpointing=True, callbacks=[saved]).fit(first, *loaders())
    assert [each.name for each in shared_tmp_path.iterdir()] == ["half.ckpt"]
    trainer_of(epochs=4).fit(second, *loaders(), ckpt_path=shared_tmp_path / "half.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(second.parameters(), straight.parameters(), strict=True))


@pytest.mark.world_size(2)
def test_a_run_from_a_checkpoint_within_an_epoch_equals_one_processs(world, shared_tmp_path):
    # Lightning reads the epoch's data from their beginning, and ends it at the batch at which it would have ended.
    first, ours, alone = (Model("adam", seed=seed) for seed in (world.rank, world.rank + 5, 9))
    saved = ModelCheckpoint(dirpath=shared_tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    options = {"accumulate_grad_batches": 2}
    trainer_of(enable_checkpointing=True, callbacks=[saved], **options).fit(first, *loaders(samples=53))
    hvd.barrier()
    path = shared_tmp_path / "step=3.ckpt"
    trainer_of(epochs=3, **options).fit(ours, *loaders(samples=53), ckpt_path=path)
    train_alone(alone, samples=53, epochs=3, ckpt_path=path, **options)
    assert_equal(ours, alone)


@pytest.mark.world_size(2)
def test_a_checkpoint_goes_on_in_plain_lightning_in_one_process(world, shared_tmp_path):
    ours, alone, again = Model("adam", seed=world.rank), Model("adam"), Model("adam", seed=7)
    saved = ModelCheckpoint(dirpath=shared_tmp_path, filename="half")
    trainer_of(epochs=2, enable_checkpointing=True, callbacks=[saved]).fit(ours, *loaders())
    train_alone(alone, epochs=4)
    held = torch.load(shared_tmp_path / "half.ckpt", weights_only=True)
    plain = torch.optim.Adam(Model().parameters())
    plain.load_state_dict(held["optimizer_states"][0])
    train_alone(again, epochs=4, ckpt_path=shared_tmp_path / "half.ckpt")
    assert_equal(again, alone)


def test_running_statistics_are_equal_on_all_ranks_and_in_checkpoints(world, shared_tmp_path):
    model = Model(norm=True, seed=world.rank)
    saved = ModelCheckpoint(dirpath=shared_tmp_path, filename="norm")
    trainer_of(callbacks=[saved], enable_checkpointing=True).fit(model, *loaders(samples=48))
    assert_same_on_ranks(model)
    held = torch.load(shared_tmp_path / "norm.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(held["net.1.running_mean"], model.net[1].running_mean)
