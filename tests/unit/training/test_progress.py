"""Where a run goes on within an epoch: with batches of another size, too, whoever chose it."""

from __future__ import annotations

import numpy as np
import torch

from hvdtrain.callbacks import Callback, Checkpoint
from hvdtrain.checkpoint.store import Store

X = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
Y = np.arange(24) % 3


class StopAt(Callback):
    """Stands for a kill before a step."""

    def __init__(self, global_step):
        self.global_step = global_step

    def on_step_begin(self, trainer, step):
        if trainer.global_step == self.global_step:
            raise InterruptedError


class Rates(Callback):
    """What the rate is at each step."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, trainer, step):
        self.seen.append((step, trainer._adapter.learning_rates[0]))


def fit(make, data, folder=None, *, stop=None, batch_size=32, **options):
    rates = Rates()
    hooks = [rates, StopAt(stop)]
    if folder is not None:
        hooks.append(Checkpoint(folder, every_steps=1))
    try:
        make(**options).fit(data, epochs=1, batch_size=batch_size, callbacks=hooks, progress=False)
    except InterruptedError:
        pass
    return rates.seen


def test_a_loaders_own_batches_count_and_not_those_that_fit_was_not_asked_for(make, tmp_path):
    rows = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    straight = fit(make, loader, warmup_epochs=1)
    before = fit(make, loader, tmp_path, stop=5, warmup_epochs=1)
    assert before + fit(make, loader, tmp_path, warmup_epochs=1) == straight


def test_larger_batches_go_on_with_names_that_come_after_those_of_smaller_ones(make, tmp_path):
    fit(make, (X, Y), tmp_path, stop=4, batch_size=2)
    fit(make, (X, Y), tmp_path, stop=5, batch_size=8)
    place, contents = Store(tmp_path).newest_whole()
    assert place.name == "epoch-000000-step-00000005"
    assert contents.meta["position"]["consumed"]["samples"] == 16


def test_the_rate_of_a_warmup_is_that_of_the_place_in_the_epoch(make, tmp_path):
    straight = fit(make, (X, Y), batch_size=8, warmup_epochs=1)
    fit(make, (X, Y), tmp_path, stop=4, batch_size=2, warmup_epochs=1)
    resumed = fit(make, (X, Y), tmp_path, batch_size=8, warmup_epochs=1)
    assert [rate for _, rate in resumed] == [rate for _, rate in straight[1:]]
