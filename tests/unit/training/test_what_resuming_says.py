"""What a person is told of a run that resumes, and of its best checkpoint."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain.callbacks import Callback, Checkpoint
from hvdtrain.checkpoint.store import Store

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 3


class Scores(Callback):
    def on_epoch_end(self, trainer, epoch, logs):
        logs["score"] = (1.0, 3.0, 2.0, 2.5)[epoch]
        trainer.history.setdefault("score", []).append(logs["score"])


def lines(capsys, make, *callbacks, **options):
    make().fit((X, Y), batch_size=2, run_dir=None, callbacks=callbacks, **options)
    return capsys.readouterr().out.splitlines()


@pytest.fixture(autouse=True)
def name(monkeypatch):
    monkeypatch.setenv("HVDTRAIN_RUN_NAME", "mine")


def test_a_resumed_run_says_from_where(make, tmp_path, capsys):
    assert "resumed" not in lines(capsys, make, checkpoint_dir=tmp_path, epochs=1)[0]
    assert lines(capsys, make, checkpoint_dir=tmp_path, steps=8)[0] == (
        f"resumed run mine from {tmp_path / 'epoch-000001'}, after epoch 1 (6 steps in all)"
    )
    first, second = lines(capsys, make, checkpoint_dir=tmp_path, steps=8)
    assert first == (
        f"resumed run mine from {tmp_path / 'epoch-000001-step-00000002'}, after step 2 of epoch 2 (8 steps in all)"
    )
    assert second.startswith("nothing is left to train with steps=8: a larger number continues, fit(resume=")


def test_the_best_checkpoint_is_named_and_linked(make, net, tmp_path, capsys):
    keep = Checkpoint(tmp_path, keep_last=1, best="score")
    told = lines(capsys, make, Scores(), keep, epochs=4)
    link = tmp_path / "best"
    assert told[-1] == (
        f'best checkpoint: {link} -> epoch-000002, score 3.0000; load it: Trainer.load("{link}", model, ...)'
    )
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = hvdtrain.Trainer.load(link, model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss())
    assert trainer.history["score"] == [1.0, 3.0]
    store = Store(tmp_path)
    assert [path.name for path in store.newest_first()] == ["epoch-000004", "epoch-000002"]
    store.set_aside()
    assert not os.path.lexists(link)
    assert (tmp_path / "old-1" / "best").is_dir()


def test_a_file_of_ones_own_with_the_links_name_stays(make, tmp_path, capsys):
    (tmp_path / "best").write_text("mine")
    assert "best checkpoint" not in lines(capsys, make, Scores(), Checkpoint(tmp_path, best="score"), epochs=2)[-1]
    assert (tmp_path / "best").read_text() == "mine"
