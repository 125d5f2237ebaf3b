"""What a checkpoint written behind training holds."""

from __future__ import annotations

import threading

import numpy as np

from hvdtrain.callbacks import Callback, Checkpoint
from hvdtrain.checkpoint import files

X = np.zeros((12, 4), np.float32)
Y = np.arange(12) % 3


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
