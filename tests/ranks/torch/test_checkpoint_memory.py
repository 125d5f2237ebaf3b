"""Checkpoints are written and read array by array: what ranks hold meanwhile, and what they do if a disk fails."""

from __future__ import annotations

import errno

import pytest
import torch
from peak_memory import Measured, arrays_of

import hvdtrain
from hvdtrain import checkpoint
from hvdtrain.callbacks import EMA, Callback, Checkpoint
from hvdtrain.checkpoint.array_file import ArrayFile
from hvdtrain.errors import CheckpointError, HvdTrainError

pytestmark = [pytest.mark.world_size(2), pytest.mark.usefixtures("hvd")]

WIDTH, LAYERS = 2900, 4
ARRAY = WIDTH * WIDTH * 4  # bytes


def parts(width=WIDTH, seed=0):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    return net, {"optimizer": torch.optim.Adam(net.parameters(), lr=1e-4), "loss": torch.nn.MSELoss()}


def make(width=WIDTH, **options):
    net, others = parts(width)
    return hvdtrain.Trainer(net, **others, **options)


def fit(trainer, *callbacks, epochs=1):
    x = torch.ones(12, trainer.model[0].in_features)
    trainer.fit((x, x), batch_size=12 // trainer.world.size, epochs=epochs, callbacks=callbacks, progress=False)


def held_meanwhile(world, peak):
    return arrays_of(world, peak, ARRAY)


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_saving_shards_takes_the_memory_of_one_array_on_rank_0(world, shared_tmp_path, shard):
    trainer = make(shard=shard)
    fit(trainer)
    trainer.save(shared_tmp_path / "warm")
    with Measured() as saving:
        trainer.save(shared_tmp_path / "one")
    root, *others = held_meanwhile(world, saving.peak)
    assert root <= 1.0, (root, others)
    assert max(others) <= 1 / world.size, others


def test_saving_shards_in_the_background_takes_the_memory_of_one_array_on_rank_0(world, shared_tmp_path):
    found = []

    class Save(Callback):
        to = Checkpoint(shared_tmp_path / "runs", every_epochs=100).checkpoint

        def on_epoch_end(self, trainer, epoch, logs):
            with Measured() as saving:
                trainer.save_checkpoint(self.to)
            found.append(held_meanwhile(world, saving.peak))

    fit(make(shard="optimizer"), Save(), epochs=2)
    root, *others = found[-1]
    assert root <= 1.0, found
    assert max(others) <= 1 / world.size, found


def full_after(monkeypatch, arrays):
    """Let the disk be full once it has so many arrays."""
    put, taken = ArrayFile.put, []

    def full(self, name, array):
        taken.append(name)
        if len(taken) > arrays:
            raise OSError(errno.ENOSPC, "No space left on device")
        put(self, name, array)

    monkeypatch.setattr(ArrayFile, "put", full)


@pytest.mark.parametrize("arrays", [0, 3, 11])
def test_a_disk_that_is_full_in_the_middle_ends_a_save_on_all_ranks(world, rank, shared_tmp_path, monkeypatch, arrays):
    trainer = make(width=64, shard="optimizer")
    fit(trainer)
    trainer.save(shared_tmp_path / "one")
    with monkeypatch.context() as patch:
        full_after(patch, arrays)
        with pytest.raises(CheckpointError if rank == 0 else HvdTrainError, match="No space left on device"):
            trainer.save(shared_tmp_path / "one")
    if rank == 0:
        assert checkpoint.read(shared_tmp_path / "one").meta["position"]["global_step"] == 1
        assert [each.name for each in shared_tmp_path.iterdir()] == ["one"]
    world.barrier()
    fit(trainer)
    trainer.save(shared_tmp_path / "one")


def test_a_checkpoint_that_a_full_disk_does_not_take_costs_no_later_one(rank, shared_tmp_path, monkeypatch, caplog):
    class Full(Callback):
        def on_epoch_end(self, trainer, epoch, logs):
            monkeypatch.undo()
            if epoch == 0:
                full_after(monkeypatch, 5)

    trainer = make(width=64, shard="optimizer")
    fit(trainer, Full(), Checkpoint(shared_tmp_path), epochs=2)
    if rank == 0:
        assert "No space left on device" in caplog.text
        assert [each.name for each in checkpoint.Store(shared_tmp_path).newest_first()] == ["epoch-000002"]


def test_another_error_of_the_writer_ends_the_run_on_all_ranks(shared_tmp_path, monkeypatch):
    monkeypatch.setattr(ArrayFile, "put", lambda *_: 1 / 0)
    trainer = make(width=64, shard="optimizer")
    with pytest.raises((ZeroDivisionError, HvdTrainError), match="division by zero"):
        fit(trainer, Checkpoint(shared_tmp_path), epochs=3)


@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_loading_takes_the_memory_of_one_array_beyond_what_a_rank_keeps(world, size, shared_tmp_path, shard):
    trainer = make(shard=shard)
    fit(trainer)
    trainer.save(shared_tmp_path / "one")
    del trainer
    for _ in range(2):  # once to warm up
        net, others = parts()
        with Measured() as loading:
            loaded = hvdtrain.Trainer.load(shared_tmp_path / "one", net, shard=shard, **others)
        kept = 2 * LAYERS * ARRAY / (1 if shard is None else size)
        held = held_meanwhile(world, loading.peak - kept)
        del loaded, net, others
    assert max(held) <= 1.0, held


def test_loading_weights_takes_the_memory_of_one_array(world, shared_tmp_path):
    trainer = make()
    fit(trainer)
    trainer.save(shared_tmp_path / "one")
    for _ in range(2):
        net, others = parts()
        with Measured() as loading:
            hvdtrain.Trainer.load(shared_tmp_path / "one", net, weights_only=True, **others)
        held = held_meanwhile(world, loading.peak)
        del net, others
    assert max(held) <= 1.0, held


@pytest.mark.parametrize("shard", [None, "optimizer"])
@pytest.mark.parametrize("name", ["model", "optimizer", "ranks"])
def test_a_damaged_file_changes_no_weight(world, rank, shared_tmp_path, shard, name):
    trainer = make(width=64, shard=shard)
    fit(trainer)
    trainer.save(shared_tmp_path / "one")
    if rank == 0:
        file = shared_tmp_path / "one" / f"{name}.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    world.barrier()
    net, others = parts(64, seed=1)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    with pytest.raises(HvdTrainError, match=rf"{name}.safetensors is damaged"):
        hvdtrain.Trainer.load(shared_tmp_path / "one", net, shard=shard, **others)
    assert all(map(torch.equal, before, net.parameters()))
    assert not others["optimizer"].state


@pytest.mark.parametrize("shard", [None, "optimizer"])
@pytest.mark.parametrize("arrays", [2, 7])
def test_a_disk_that_fails_while_a_rank_reads_ends_all_ranks(world, shared_tmp_path, fail_reads, shard, arrays):
    trainer = make(width=64, shard=shard)
    fit(trainer)
    trainer.save(shared_tmp_path / "one")
    done = fail_reads(after=arrays, message="model.safetensors cannot be read (Input/output error)")
    net, others = parts(64)
    with pytest.raises(HvdTrainError, match="Input/output error"):
        hvdtrain.Trainer.load(shared_tmp_path / "one", net, shard=shard, **others)
    assert bool(done) == world.is_root


def test_loading_averages_takes_the_memory_of_one_array_beyond_them(world, shared_tmp_path):
    net, others = parts()
    others["optimizer"] = torch.optim.SGD(net.parameters(), lr=1e-4)
    fit(hvdtrain.Trainer(net, **others), EMA(), Checkpoint(shared_tmp_path, background=False))
    for _ in range(2):
        with Measured() as loading:
            loaded = hvdtrain.Trainer.load(shared_tmp_path / "epoch-000001", net, **others)
        held = held_meanwhile(world, loading.peak - LAYERS * ARRAY)
        del loaded
    assert max(held) <= 1.0, held
