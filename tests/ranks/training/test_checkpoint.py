"""Checkpoints take all ranks: what would keep some of them waiting is said before the first step."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import hvdtrain
from hvdtrain.adapter import HostArrays
from hvdtrain.callbacks import Checkpoint, SyncCheck
from hvdtrain.errors import DesyncError, HvdTrainError

DATA = (np.zeros((8, 6), np.float32), np.arange(8) % 3)


@pytest.mark.world_size(2, 3)
def test_a_checkpoint_on_rank_0_alone_is_an_error(kit, world, tmp_path):
    directory = str(tmp_path) if world.is_root else None
    with pytest.raises(DesyncError, match=r"checkpoints is .*on rank 0 but \[\] on rank 1"):
        kit.trainer(kit.model()).fit(DATA, batch_size=2, checkpoint_dir=directory, progress=False)


@pytest.mark.world_size(2)
def test_checkpoints_at_moments_of_each_ranks_own_are_an_error(kit, world, tmp_path):
    hooks = [Checkpoint(tmp_path, every_steps=1 + world.rank)]
    with pytest.raises(DesyncError, match="every_steps"):
        kit.trainer(kit.model()).fit(DATA, batch_size=2, callbacks=hooks, progress=False)


@pytest.mark.world_size(2)
def test_ranks_that_go_on_beside_ranks_that_start_anew_are_an_error(kit, world, tmp_path):
    resume = "auto" if world.is_root else "never"
    with pytest.raises(DesyncError, match="resume is 'auto' on rank 0 but 'never'"):
        kit.trainer(kit.model()).fit(DATA, batch_size=2, checkpoint_dir=str(tmp_path), resume=resume, progress=False)


@pytest.mark.every_backend
@pytest.mark.world_size(2)
def test_what_must_be_finite_is_what_gradients_change(kit, world):
    state = kit.trainer(kit.norm_model()).state()
    weights = {name for name in state.arrays if name.startswith("model.")} - state.per_rank
    assert state.trained == weights
    assert state.trained


@pytest.mark.world_size(2)
def test_state_may_communicate_wherever_checkpoints_are_written_or_read(kit, world, tmp_path, monkeypatch):
    """All ranks call it at the same point, so that an adapter can gather what its ranks have sharded."""

    def trainer():
        net = kit.model()
        next(iter(net.parameters())).requires_grad_(False)
        return kit.trainer(net)

    first, calls = trainer(), []
    adapter = type(first._adapter)
    alone = adapter.state

    def gathered(self, *where):
        calls.append(world.allgather_object(world.rank, name="sharded"))
        return alone(self, *where)

    monkeypatch.setattr(adapter, "state", gathered)
    first.fit(
        DATA, batch_size=2, callbacks=[Checkpoint(tmp_path / "runs", every_steps=1, frozen=False)], progress=False
    )
    again = trainer()
    hooks = [Checkpoint(tmp_path / "runs", frozen=False)]
    assert len(again.fit(DATA, batch_size=2, epochs=2, callbacks=hooks, progress=False)["loss"]) == 2
    again.save(str(tmp_path / "one"))
    for weights_only in (False, True):
        net = kit.model(seed=1)
        options = {"optimizer": kit.optimizer_of(net), "loss": kit.loss(), "weights_only": weights_only}
        loaded = hvdtrain.Trainer.load(str(tmp_path / "one"), net, **options)
        ours, theirs = loaded.state().arrays, again.state().arrays
        assert all((ours[name] == theirs[name]).all() for name in ours if name.startswith("model."))
    assert len(set(world.allgather_object(len(calls), name="calls"))) == 1


@pytest.mark.every_backend
@pytest.mark.world_size(2)
def test_only_the_rank_that_writes_reads_arrays(kit, world, tmp_path, monkeypatch):
    """Elsewhere a copy of everything on the host would be made for nothing."""
    trainer, read, one = kit.trainer(kit.model()), [], HostArrays.__getitem__
    monkeypatch.setattr(HostArrays, "__getitem__", lambda self, name: read.append(name) or one(self, name))
    hooks = [Checkpoint(tmp_path / "runs", every_steps=1), SyncCheck(every=0)]
    trainer.fit(DATA, batch_size=2, callbacks=hooks, progress=False)
    trainer.save(str(tmp_path / "one"))
    assert bool(read) == world.is_root


@pytest.mark.world_size(2)
def test_a_state_that_one_rank_cannot_return_ends_save_on_all(kit, world, tmp_path, monkeypatch):
    trainer = kit.trainer(kit.model())
    if world.rank == 1:
        monkeypatch.setattr(trainer._adapter, "state", lambda *_: 1 / 0)
    with pytest.raises((ZeroDivisionError, HvdTrainError), match="division by zero"):
        trainer.save(str(tmp_path / "one"))


@pytest.mark.world_size(2)
def test_a_folder_that_rank_0_cannot_write_ends_all_ranks_before_the_first_epoch(kit, world, tmp_path):
    if world.is_root:
        (tmp_path / "file").write_text("not a folder")
    trainer = kit.trainer(kit.model())
    with pytest.raises(HvdTrainError, match="Give a folder that this user can write to"):
        trainer.fit(DATA, batch_size=2, checkpoint_dir=str(tmp_path / "file" / "runs"), progress=False)
    assert trainer.global_step == 0


HELD = """
import sys, time
from pathlib import Path
from hvdtrain.checkpoint.lock import FolderLock, Holder
FolderLock(Path(sys.argv[1])).acquire(Holder("theirs", "train", None), is_own=lambda _: False, limit_s=0)
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.world_size(2)
def test_all_ranks_of_a_run_that_is_refused_end_with_the_same_words(kit, world, tmp_path):
    process = None
    if world.is_root:
        process = subprocess.Popen([sys.executable, "-c", HELD, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"held\n"
    try:
        with pytest.raises(HvdTrainError, match=r"Run train \(theirs\), process .* Give this run a folder of its own"):
            kit.trainer(kit.model()).fit(DATA, batch_size=2, checkpoint_dir=str(tmp_path), progress=False)
    finally:
        if process is not None:
            process.kill()
            process.communicate()
    world.barrier()
    kit.trainer(kit.model()).fit(DATA, batch_size=2, checkpoint_dir=str(tmp_path), progress=False)
