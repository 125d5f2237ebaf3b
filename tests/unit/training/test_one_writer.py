"""Two runs and one folder of checkpoints: the second is refused while the first is in `fit`, and not after."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from hvdtrain.callbacks import Callback
from hvdtrain.checkpoint import files
from hvdtrain.errors import CheckpointError

X = np.zeros((12, 4), np.float32)
Y = np.arange(12) % 3

OTHER_JOB = f"""
import sys, time
import numpy as np
import torch
import hvdtrain
from hvdtrain.callbacks import Callback, Checkpoint

class Wait(Callback):
    def on_epoch_begin(self, trainer, epoch):
        if epoch == 2:
            print("training", flush=True)
            time.sleep(120)

model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss())
x, y = np.zeros({X.shape}, np.float32), np.arange({len(Y)}) % 3
trainer.fit((x, y), epochs=3, callbacks=[Wait(), Checkpoint(sys.argv[1], background=False)], progress=False)
"""


@pytest.fixture
def job(tmp_path):
    """A job that is in the third epoch of its fit, with checkpoints of two in `tmp_path`."""
    process = subprocess.Popen([sys.executable, "-c", OTHER_JOB, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "training\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_a_run_is_refused_the_folder_of_one_that_is_training_and_changes_nothing(make, tmp_path, job):
    before = sorted(os.listdir(tmp_path))
    assert before == [".lock", "epoch-000001", "epoch-000002"]
    for resume in ("auto", "never"):
        trainer = make()
        with pytest.raises(CheckpointError, match=rf"process {job.pid} on host .*Give this run a folder of its own"):
            trainer.fit((X, Y), epochs=9, checkpoint_dir=str(tmp_path), resume=resume, progress=False)
        assert trainer.global_step == 0
        assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.slow
def test_the_folder_of_a_run_that_was_killed_is_resumed_from_at_once(make, tmp_path, job):
    held = json.loads((tmp_path / ".lock").read_text())
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    trainer = make()
    history = trainer.fit((X, Y), epochs=3, checkpoint_dir=str(tmp_path), progress=False)
    assert len(history["loss"]) == 3
    assert trainer.run.id == held["run"] == files.read_meta(tmp_path / "epoch-000003")["run"]["id"]
    assert not (tmp_path / ".lock").exists()


class Inside(Callback):
    """See who holds the folder, and fail."""

    def __init__(self, folder):
        self.folder = folder

    def on_epoch_end(self, trainer, epoch, logs):
        self.held = json.loads((self.folder / ".lock").read_text())
        raise ValueError("the user's own")


def test_the_lock_names_the_run_and_goes_with_an_error(make, tmp_path):
    inside = Inside(tmp_path)
    trainer = make()
    with pytest.raises(ValueError, match="the user's own"):
        trainer.fit((X, Y), callbacks=[inside], checkpoint_dir=str(tmp_path), progress=False)
    assert (inside.held["pid"], inside.held["run"]) == (os.getpid(), trainer.run.id)
    assert not (tmp_path / ".lock").exists()


def test_a_run_that_resumes_names_the_run_that_it_resumes(make, tmp_path):
    make().fit((X, Y), checkpoint_dir=str(tmp_path), progress=False)
    first = files.read_meta(tmp_path / "epoch-000001")["run"]["id"]
    inside = Inside(tmp_path)
    with pytest.raises(ValueError, match="the user's own"):
        make().fit((X, Y), epochs=2, callbacks=[inside], checkpoint_dir=str(tmp_path), progress=False)
    assert inside.held["run"] == first


class Fork(Callback):
    """Leave a process behind, as a DataLoader's worker is that has not yet seen its parent end."""

    def on_epoch_end(self, trainer, epoch, logs):
        self.process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        self.process.start()


def test_a_fork_of_fit_does_not_keep_the_folder(make, tmp_path):
    fork = Fork()
    make().fit((X, Y), callbacks=[fork], checkpoint_dir=str(tmp_path), progress=False)
    try:
        make().fit((X, Y), epochs=2, checkpoint_dir=str(tmp_path), progress=False)
    finally:
        fork.process.kill()
        fork.process.join()
