"""One rank is asked to stop: all do, at the same place, with a checkpoint."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from hvdtrain.callbacks import Callback, Checkpoint
from hvdtrain.checkpoint.store import Store
from hvdtrain.training import preemption

DATA = (np.zeros((24, 6), np.float32), np.arange(24) % 3)


class Ask(Callback):
    """Sends the last rank a signal at one moment."""

    def __init__(self, *, step=None, epoch=None, end=None):
        self._step, self._epoch, self._end = step, epoch, end

    def on_step_end(self, trainer, step):
        if trainer.global_step == self._step:
            self._ask(trainer)

    def on_epoch_end(self, trainer, epoch, logs):
        if epoch == self._epoch:
            self._ask(trainer)

    def on_fit_end(self, trainer):
        self._trainer = trainer
        if self._end == "on_fit_end":
            self._ask(trainer)

    def close(self):
        if self._end == "close":
            self._ask(self._trainer)

    def _ask(self, trainer):
        if trainer.world.rank == trainer.world.size - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def stopped_at(kit, directory, ask, *, data=DATA, **options):
    """Return the position that is kept, once the run has ended as it should."""
    with pytest.raises(SystemExit) as ending:
        kit.trainer(kit.model()).fit(
            data, batch_size=2, callbacks=[ask, Checkpoint(directory, every_epochs=5)], progress=False, **options
        )
    assert ending.value.code == preemption.EXIT_CODE
    return Store(directory).newest_whole()[1].meta["position"]


@pytest.mark.world_size(2)
def test_within_an_epoch_it_is_after_a_step(kit, world, shared_tmp_path):
    samples = 10**6  # minutes of steps: who does not hear of it goes on for as long
    data = np.zeros((samples, 6), np.float32), np.arange(samples) % 3
    position = stopped_at(kit, shared_tmp_path, Ask(step=2), data=data, epochs=1)
    assert position["epoch"] == 0
    assert 2 <= position["step"] < samples // 4


@pytest.mark.world_size(2)
@pytest.mark.parametrize("epochs", [1, 2])
def test_what_is_asked_after_an_epochs_last_step_is_heard_before_the_next(kit, world, shared_tmp_path, epochs):
    position = stopped_at(kit, shared_tmp_path, Ask(epoch=0), epochs=epochs)
    assert (position["epoch"], position["step"]) == (1, 0)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("end", ["on_fit_end", "close"])
def test_what_is_asked_while_the_run_ends_is_heard_once_all_is_kept(kit, world, shared_tmp_path, capfd, end):
    position = stopped_at(kit, shared_tmp_path, Ask(end=end), epochs=2)
    assert (position["epoch"], position["step"]) == (2, 0)
    said = "stopped on request after epoch 2, the last; a checkpoint is written" in capfd.readouterr().err
    assert said is world.is_root
