"""Two Trainers of one script and one folder of checkpoints: none takes the other's finished run for its own."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.callbacks import Checkpoint
from hvdtrain.errors import FolderInUseError

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 3


@pytest.fixture(autouse=True)
def restarts(monkeypatch):
    """Let another Trainer be one of the same script, not a restart."""
    monkeypatch.setattr("hvdtrain.training.checkpointing._users", {})


def fit(trainer, folder, **options):
    return trainer.fit((X, Y), checkpoint_dir=folder, run_dir=None, progress=False, **options)


@pytest.mark.parametrize("end", [{"epochs": 2}, {"steps": 1}])
def test_a_second_trainer_is_refused_a_finished_run_as_often_as_it_tries(make, tmp_path, end):
    fit(make(), tmp_path, **end)
    trainer = make()
    for same in (tmp_path, f"{tmp_path}/../{tmp_path.name}"):
        with pytest.raises(FolderInUseError, match=r"Another Trainer of this script.*Give each Trainer a folder"):
            fit(trainer, same, **end)
    with pytest.raises(FolderInUseError):
        trainer.fit((X, Y), **end, callbacks=[Checkpoint(tmp_path)], run_dir=None, progress=False)


def test_a_restart_that_finds_the_run_finished_is_refused_it_a_second_time(make, tmp_path, monkeypatch):
    fit(make(), tmp_path, epochs=1)
    monkeypatch.setattr("hvdtrain.training.checkpointing._users", {})  # another process
    assert len(fit(make(), tmp_path, epochs=1)["loss"]) == 1
    with pytest.raises(FolderInUseError):
        fit(make(), tmp_path, epochs=1)


def test_the_same_trainer_longer_runs_new_starts_and_other_folders_are_allowed(make, tmp_path):
    first, second = make(), make()
    for _ in range(2):
        assert len(fit(first, tmp_path / "a", epochs=2)["loss"]) == 2
    fit(second, tmp_path / "b", epochs=2)
    assert len(fit(second, tmp_path / "a", epochs=3)["loss"]) == 3
    with pytest.raises(FolderInUseError):  # now it is the second's run
        fit(first, tmp_path / "a", epochs=3)
    for resume in ("never", "auto"):
        assert len(fit(first, tmp_path / "a", epochs=1, resume=resume)["loss"]) == 1
