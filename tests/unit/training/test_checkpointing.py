"""What a checkpoint written behind training holds, and what a run says of the one that it resumes from."""

from __future__ import annotations

import errno
import math
import os
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain.callbacks import Callback, Checkpoint
from hvdtrain.checkpoint import files, folders
from hvdtrain.errors import CheckpointError

X = np.zeros((12, 4), np.float32)
Y = np.arange(12) % 3
LOSS = torch.nn.CrossEntropyLoss()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_what_is_written_behind_training_is_of_the_moment_it_was_kept(make, monkeypatch, tmp_path):
    go, write = threading.Event(), files.write

    def late(*args):
        go.wait(30)
        write(*args)

    class LetGo(Callback):
        def on_epoch_end(self, trainer, epoch, logs):
            if epoch == 1:
                go.set()

    monkeypatch.setattr(files, "write", late)
    make().fit((X, Y), epochs=2, callbacks=[LetGo(), Checkpoint(tmp_path)], progress=False)
    assert len(files.read_meta(tmp_path / "epoch-000001")["history"]["loss"]) == 1


class Poison(Callback):
    """Make the weights NaN after an epoch."""

    def __init__(self, epoch):
        self.epoch = epoch

    def on_epoch_end(self, trainer, epoch, logs):
        if epoch + 1 == self.epoch:
            for parameter in trainer.model.parameters():
                parameter.data.fill_(math.nan)


def test_a_run_of_nan_keeps_its_last_finite_checkpoint_and_says_so_once(make, tmp_path, caplog):
    make().fit((X, Y), epochs=9, callbacks=[Poison(5)], checkpoint_dir=str(tmp_path), progress=False)
    assert sorted(os.listdir(tmp_path)) == [f"epoch-{epoch:06d}" for epoch in (4, 7, 8, 9)]
    assert caplog.text.count("Epoch 6: loss is nan.") == 1
    assert "Epoch 7" not in caplog.text
    assert 'nan_policy="skip"' in caplog.text


def test_a_run_that_resumes_from_nan_says_so_and_resumes_as_before(make, tmp_path, caplog):
    make().fit((X, Y), epochs=2, callbacks=[Poison(2)], checkpoint_dir=str(tmp_path), progress=False)
    trainer = make()
    assert len(trainer.fit((X, Y), epochs=3, checkpoint_dir=str(tmp_path), progress=False)["loss"]) == 3
    assert f"{tmp_path / 'epoch-000002'} will be restored, though it holds NaN" in caplog.text
    assert f"to resume from {tmp_path / 'epoch-000001'}, move later ones away" in caplog.text
    caplog.clear()
    hvdtrain.Trainer.load(tmp_path / "epoch-000003", trainer.model, optimizer=sgd(trainer.model), loss=LOSS)
    assert "epoch-000003 will be restored, though it holds NaN" in caplog.text


def test_a_mask_of_infinities_is_no_bad_weight(make, net, tmp_path, caplog):
    model = net()
    model.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
    make(model).fit((X, Y), epochs=5, checkpoint_dir=str(tmp_path), progress=False)
    assert len(os.listdir(tmp_path)) == 3
    assert files.is_finite(tmp_path / "epoch-000005")
    assert "NaN" not in caplog.text


class Began(Callback):
    """Count epochs."""

    epochs = 0

    def on_epoch_begin(self, trainer, epoch):
        self.epochs += 1


def test_a_folder_that_cannot_be_written_ends_fit_before_the_first_epoch(make, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    began = Began()
    with pytest.raises(CheckpointError, match="Give a folder that this user can write to"):
        make().fit((X, Y), callbacks=[began], checkpoint_dir=str(tmp_path / "file" / "runs"), progress=False)
    assert began.epochs == 0


def test_a_disk_too_small_for_one_checkpoint_ends_fit_before_the_first_epoch(make, tmp_path, monkeypatch):
    began = Began()
    monkeypatch.setattr(folders, "free_bytes", lambda path: 200)
    with pytest.raises(CheckpointError, match="MB are free"):
        make().fit((X, Y), callbacks=[began], checkpoint_dir=str(tmp_path), progress=False)
    assert began.epochs == 0


def test_a_full_disk_at_the_start_is_an_error_with_sizes_and_a_way_out(make, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(
        CheckpointError, match=r"No space left on device \(it takes at least .* free\)\. Free some space"
    ):
        make().fit((X, Y), checkpoint_dir=str(tmp_path), progress=False)


@pytest.fixture
def full_disk(monkeypatch):
    """Give a set; the disk is full for each folder whose name contains one of its words."""
    words, real = set(), folders.put

    def put(source, target):
        if any(word in target.name for word in words):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    monkeypatch.setattr(folders, "put", put)
    return words


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(make, tmp_path, caplog, full_disk, background):
    full_disk |= {"000002", "000003"}
    folder = Checkpoint(tmp_path, background=background)
    history = make().fit((X, Y), epochs=4, callbacks=[folder], progress=False)
    assert len(history["loss"]) == 4
    assert sorted(os.listdir(tmp_path)) == ["epoch-000001", "epoch-000004"]
    lines = [each.getMessage() for each in caplog.records]
    (line,) = (each for each in lines if each.startswith(f"Checkpoint {tmp_path}/epoch-000002 was not written"))
    assert re.search(r"No space left on device \(it takes at least [0-9.,]+ MB, and [0-9.,]+ MB are free\)", line)
    assert [each for each in lines if "2 checkpoints were not written" in each and "epoch-000003" in each]


def test_a_full_disk_at_the_end_of_a_run_is_an_error_after_all_callbacks(make, tmp_path, full_disk):
    class Ended(Callback):
        is_called = False

        def on_fit_end(self, trainer):
            self.is_called = True

    full_disk |= {"000002"}
    ended, trainer = Ended(), make()
    with pytest.raises(CheckpointError, match=r"1 checkpoint was not written.* the newest one there is epoch-000001"):
        trainer.fit((X, Y), epochs=2, callbacks=[ended], checkpoint_dir=str(tmp_path), progress=False)
    assert ended.is_called
    full_disk.clear()
    assert len(make().fit((X, Y), epochs=2, checkpoint_dir=str(tmp_path), progress=False)["loss"]) == 2


def test_a_run_that_is_complete_needs_no_space(make, tmp_path, monkeypatch):
    make().fit((X, Y), epochs=1, checkpoint_dir=str(tmp_path), progress=False)
    monkeypatch.setattr(folders, "free_bytes", lambda path: 200)
    assert len(make().fit((X, Y), epochs=1, checkpoint_dir=str(tmp_path), progress=False)["loss"]) == 1


def test_a_model_without_weights_yet_keeps_checkpoints_too(make, tmp_path):
    model = torch.nn.Sequential(torch.nn.LazyLinear(3))
    make(model).fit((X, Y), checkpoint_dir=str(tmp_path), progress=False)
    assert os.listdir(tmp_path) == ["epoch-000001"]


def test_a_checkpoint_that_a_callback_saves_by_itself_is_saved_at_no_other_moment(make, tmp_path):
    own = Checkpoint(tmp_path, background=False)

    class Save(Callback):
        def on_epoch_end(self, trainer, epoch, logs):
            if epoch == 0:
                own.save(trainer)

    make().fit((X, Y), epochs=3, callbacks=[Save()], progress=False)
    assert os.listdir(tmp_path) == ["epoch-000001"]


def test_a_callback_that_stands_after_a_checkpoint_is_part_of_it(make, tmp_path):
    class Counts(Callback):
        epochs = 0

        def on_epoch_end(self, trainer, epoch, logs):
            self.epochs += 1

        def state(self):
            return {"epochs": self.epochs}

    make().fit((X, Y), callbacks=[Checkpoint(tmp_path), Counts()], progress=False)
    assert ["Counts", {"epochs": 1}] in files.read_meta(tmp_path / "epoch-000001")["callbacks"]
