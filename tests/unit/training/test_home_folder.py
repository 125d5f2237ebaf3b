"""Paths that begin with "~", wherever scripts and commands take one: they are below the user's home folder."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hvdtrain import Trainer
from hvdtrain.callbacks import EMA, Checkpoint, CSVLogger, Profiler, RunFolder
from hvdtrain.cli import program

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 3


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Make a home folder, and work elsewhere, where no folder "~" must appear."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    for folder in (home, elsewhere):
        folder.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(elsewhere)
    yield home
    assert not [*elsewhere.iterdir()]


def test_a_trainers_files_are_written_and_read_in_the_home_folder(make, net, home, monkeypatch):
    trainer = make()
    hooks = [EMA(), Checkpoint("~/b"), CSVLogger("~/log.csv"), Profiler("~/profile", first=0, steps=1)]
    trainer.fit((X, Y), checkpoint_dir="~/a", run_dir="~/run", progress=False, callbacks=hooks)
    trainer.save("~/saved")
    model = net()
    options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss": torch.nn.CrossEntropyLoss()}
    Trainer.load("~/saved", model, **options)
    EMA.load("~/a/epoch-000001", net())
    monkeypatch.setenv("HVDTRAIN_RUNS", "~/runs")
    longer = make()
    longer.fit((X, Y), checkpoint_dir="~/a", epochs=2, progress=False, callbacks=[EMA()])
    assert len(longer.history["loss"]) == 2
    assert {path.name for path in home.iterdir()} == {"a", "b", "log.csv", "profile", "run", "runs", "saved"}
    assert (home / "b" / "epoch-000001").is_dir()


def test_commands_read_and_write_in_the_home_folder(make, home, monkeypatch):
    make().fit((X, Y), run_dir="~/run", progress=False, callbacks=[RunFolder("~/run")])
    monkeypatch.setattr(sys, "argv", ["hvdtrain", "report", "~/run", "--out=~/page.html"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert (ended.value.code, Path("~/page.html").expanduser().is_file()) == (0, True)
