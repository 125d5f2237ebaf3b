"""Trainings that loggers listen to: every step is an interval, and one may end in the middle."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.callbacks import Callback, Checkpoint

X = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
Y = np.arange(12) % 3


class StopError(RuntimeError):
    pass


class StopAt(Callback):
    """Raise after a global step, when what is logged of it has been."""

    def __init__(self, step):
        self.step = step

    def on_interval(self, trainer, interval):
        if interval.global_step == self.step:
            raise StopError


@pytest.fixture
def fit(make, net, monkeypatch):
    """Return what trains for epochs of 3 steps, each an interval that is logged, and returns the history."""
    monkeypatch.setattr("hvdtrain.telemetry.interval.INTERVAL_S", 0)

    def run(*callbacks, epochs=2, **options):
        options.setdefault("run_dir", None)
        return make().fit(
            (X, Y), validation=(X, Y), epochs=epochs, batch_size=4, callbacks=callbacks, progress=False, **options
        )

    return run


@pytest.fixture
def fit_until(fit):
    """Return what trains until a step's end, where a callback raises."""

    def run(step, *callbacks, **options):
        with pytest.raises(StopError):
            fit(*callbacks, StopAt(step), **options)

    return run


@pytest.fixture
def killed_and_gone_on(fit, fit_until, tmp_path):
    """Train with a new `logger()` each time: 5 steps, of which the checkpoint has 4; then the rest, from there."""

    def run(logger):
        kept = tmp_path / "checkpoints"
        fit_until(5, logger(), Checkpoint(kept, every_steps=2, background=False), epochs=3)
        return fit(logger(), Checkpoint(kept, every_steps=2, background=False), epochs=3)

    return run
