"""Checkpoints take all ranks: what would keep some of them waiting is said before the first step."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from hvdtrain.callbacks import Checkpoint
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
    weights = {name for name in state.arrays if name.startswith("model.")} - state.unsettled
    assert state.trained == weights
    assert state.trained


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
