"""The files that a script writes and reads under `hvdtrain bench`, instead of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import hvdtrain
from hvdtrain.callbacks import Checkpoint, CSVLogger, RunFolder
from hvdtrain.system import scratch

X = np.zeros((12, 4), np.float32)
Y = np.arange(12) % 3


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Do as bench does; return what ends it."""
    monkeypatch.setenv(scratch.VARIABLE, str(tmp_path / "scratch"))
    monkeypatch.setattr(scratch, "_own", None)
    return lambda: monkeypatch.delenv(scratch.VARIABLE)


def test_without_bench_every_path_is_its_own(tmp_path):
    assert scratch.place("kept") == scratch.found("kept") == scratch.Path("kept")


def test_a_trainer_leaves_the_scripts_folders_alone_and_finds_what_it_wrote(make, bench, tmp_path):
    hooks = [Checkpoint(tmp_path / "kept"), CSVLogger(tmp_path / "log.csv"), RunFolder(tmp_path / "run")]
    trainer = make()
    trainer.fit((X, Y), epochs=2, callbacks=hooks, checkpoint_dir=str(tmp_path / "other"), progress=False)
    trainer.save(str(tmp_path / "model"))
    assert os.listdir(tmp_path) == ["scratch"]
    for name in ("kept/epoch-000002", "other/epoch-000001", "model"):
        hvdtrain.Trainer.load(
            str(tmp_path / name),
            trainer.model,
            optimizer=trainer._adapter._update.optimizer,
            loss=trainer._adapter._step._loss,
        )


def test_a_script_does_not_resume_under_bench_but_loads_what_it_names(make, bench, tmp_path, monkeypatch):
    with monkeypatch.context() as without:
        without.delenv(scratch.VARIABLE)
        make().fit((X, Y), epochs=3, checkpoint_dir=str(tmp_path / "kept"), progress=False)
    trainer = make()
    history = trainer.fit((X, Y), epochs=3, checkpoint_dir=str(tmp_path / "kept"), progress=False)
    assert trainer.global_step == len(history["loss"])  # a step an epoch, none of them before
    (scratch.place(tmp_path / "kept") / "epoch-000003").rename(tmp_path / "moved")
    options = {"optimizer": trainer._adapter._update.optimizer, "loss": trainer._adapter._step._loss}
    assert hvdtrain.Trainer.load(str(tmp_path / "kept" / "epoch-000003"), trainer.model, **options).global_step == 3


@pytest.mark.parametrize("name", ["ModelCheckpoint", "BackupAndRestore", "CSVLogger", "TensorBoard", "EarlyStopping"])
def test_keras_callbacks_that_write_are_left_out(name):
    kind = type(name, (), {"__module__": "keras.src.callbacks.some"})
    own = type("Own", (kind,), {})
    assert scratch.is_keras_writer(own()) is (name != "EarlyStopping")
    assert not scratch.is_keras_writer(type(name, (), {})())


def test_a_process_deletes_what_it_wrote_and_an_empty_folder_with_it(tmp_path):
    lines = (
        "from hvdtrain.system import scratch; place = scratch.place('kept'); place.mkdir(parents=True); print(place)"
    )
    environment = {**os.environ, scratch.VARIABLE: str(tmp_path / "scratch")}
    done = subprocess.run(
        [sys.executable, "-c", lines], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(str(tmp_path / "scratch"))
    assert os.listdir(tmp_path) == []
