"""Ranks that take unequal parts of a step: the same tests for torch and Keras."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_resume import StopAt, StoppedError, assert_same, train
from test_trainer import BATCH, assert_equal_on_all_ranks, data, one_process_groups

from hvdtrain.callbacks import Callback, Checkpoint
from hvdtrain.sync.balance import Balance
from hvdtrain.telemetry import interval

SHARES = {2: [3, 1], 3: [3, 1, 2]}


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    ("num_samples", "accumulate", "clip_norm"),
    [
        pytest.param(53, 1, None, marks=pytest.mark.every_backend),
        pytest.param(50, 3, 0.05, marks=pytest.mark.on_keras),
        (2, 1, None),
    ],
)
def test_unequal_parts_train_the_weights_of_one_process(kit, world, num_samples, accumulate, clip_norm):
    x, y = data(num_samples)
    net, reference = kit.model(seed=world.rank), kit.model(seed=0)
    trainer = kit.trainer(net, accumulate=accumulate, clip_norm=clip_norm)
    given = {"epochs": 3, "batch_size": BATCH, "progress": False}
    trainer.fit((x, y), balance=SHARES[world.size], **given)
    groups = one_process_groups(x, y, size=world.size, epochs=3, accumulate=accumulate)
    kit.optimizer_steps(reference, groups, clip_norm=clip_norm)
    for ours, theirs in zip(kit.weights(net), kit.weights(reference), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
    assert_equal_on_all_ranks(world, kit.weights(net))
    equal = kit.trainer(kit.model(), accumulate=accumulate, clip_norm=clip_norm).fit((x, y), **given)
    np.testing.assert_allclose(trainer.history["loss"], equal["loss"], rtol=1e-5)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("stop", [5, 9])
def test_a_run_of_unequal_parts_that_was_stopped_ends_as_if_it_never_was(kit, world, shared_tmp_path, stop, caplog):
    def keep():
        return Checkpoint(shared_tmp_path, every_steps=1)

    straight = train(kit, world, seed=7, balance=[3, 1])
    with pytest.raises(StoppedError):
        train(kit, world, seed=7, balance=[3, 1], callbacks=[keep(), StopAt(stop)])
    assert_same(train(kit, world, seed=99, balance=[3, 1], callbacks=[keep()]), straight)
    assert ("BatchNorm normalizes each rank's part of a step by itself" in caplog.text) == world.is_root


class Rows:
    """Samples that know who read them."""

    def __init__(self, num_samples=2000):
        self.x, self.y = data(num_samples)
        self.read = []

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        self.read.append(row)
        return self.x[row], self.y[row]


def measure_a_slow_rank(monkeypatch):
    """Let rank 1 have taken three times as long as rank 0 for each sample, whatever this machine does meanwhile."""
    observe, nothing = Balance.observe, np.zeros(2)

    def observe_slow(self, times):
        seconds = np.array(self.shares or [16, 16]) * [0.001, 0.003]
        return observe(self, replace(times, data=nothing, train=seconds, reduction=nothing))

    monkeypatch.setattr(Balance, "observe", observe_slow)
    monkeypatch.setattr(interval, "INTERVAL_S", 0.0)  # after each step


class Watch(Callback):
    """Notes the shares of each step, and the samples of this rank."""

    def __init__(self, rows):
        self._rows, self.shares, self.read = rows, [], []

    def on_fit_begin(self, trainer):
        self._rows.read.clear()  # what ranks compared

    def on_step_end(self, trainer, step):
        self.shares.append(trainer.shares)
        self.read = list(self._rows.read)


@pytest.mark.world_size(2)
def test_a_slow_rank_takes_less_and_each_sample_is_read_once(kit, world, shared_tmp_path, monkeypatch):
    measure_a_slow_rank(monkeypatch)
    rows = Rows(), Rows()
    first, second = map(Watch, rows)
    trainer, again = kit.trainer(kit.model()), kit.trainer(kit.model(seed=3))
    options = {"epochs": 1, "batch_size": 16, "progress": False, "balance": "speed"}
    keep = Checkpoint(shared_tmp_path, every_steps=1)
    with pytest.raises(StoppedError):
        trainer.fit(rows[0], callbacks=[first, keep, StopAt(40)], **options)
    again.fit(rows[1], callbacks=[second, Checkpoint(shared_tmp_path)], **options)
    shares = first.shares + second.shares
    everybodys = world.allgather_object((first.read + second.read, shares), name="read")
    assert sorted(row for read, _ in everybodys for row in read) == list(range(len(rows[0])))
    assert everybodys[0][1] == everybodys[1][1]
    assert shares[0] is None, "equal parts are kept until speeds are known"
    assert first.shares[-1] == [24, 8]
    assert {sum(each) for each in shares if each} == {32}
    assert second.shares[0] == first.shares[-1]
    assert not world.is_root or any("balance: from here on ranks take" in each for each in trainer.decisions)
