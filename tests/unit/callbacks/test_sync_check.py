"""When SyncCheck checks, and what that may cost; that it finds differences is tested on real ranks."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from hvdtrain.adapter import State
from hvdtrain.callbacks import sync_check
from hvdtrain.callbacks.sync_check import SyncCheck
from hvdtrain.distributed.world import SoloWorld


class Clock:
    """Stands in for the module `time`."""

    now = 0.0

    def perf_counter(self):
        return self.now

    def perf_counter_ns(self):
        return round(1e9 * self.now)


class Two(SoloWorld):
    """Two ranks that agree, on a clock of their own."""

    size = 2

    def __init__(self, clock, exchange_s):
        super().__init__()
        self._clock, self._exchange_s = clock, exchange_s

    def allreduce(self, array, op="sum", *, name="host"):
        self._clock.now += self._exchange_s
        return np.array(array)

    def allgather_object(self, obj, *, name="object"):
        return [obj, obj]


class FakeTrainer:
    """Knows what SyncCheck asks a Trainer for."""

    in_sync = True

    def __init__(self, clock, *, hash_s=0.0, exchange_s=0.0):
        self.clock, self.hash_s = clock, hash_s
        self.world = Two(clock, exchange_s)
        self.steps, self.checked = 0, []

    def state(self, *, copy):
        assert not copy
        self.clock.now += self.hash_s
        self.checked.append(self.steps)
        return State({"weight": np.ones(2)})

    def fit(self, check, *, steps, step_s=0.1, epochs=1):
        check.on_fit_begin(self)
        for epoch in range(epochs):
            self.clock.now += 100.0  # validation
            check.on_epoch_begin(self, epoch)
            for step in range(steps):
                self.steps += 1
                self.clock.now += step_s(self.steps) if callable(step_s) else step_s
                check.on_step_end(self, step)
        check.on_fit_end(self)
        return self.checked


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(sync_check, "time", clock)
    return clock


def test_a_number_of_steps_is_kept(clock):
    assert FakeTrainer(clock).fit(SyncCheck(every=3), steps=4, epochs=2) == [1, 4, 7, 8]


def test_auto_keeps_within_its_budget(clock):
    # 2.2 ms to hash and 0.5 ms to exchange, in steps of 100 ms: 2.7 ms are less than 0.4 % of 7 steps.
    trainer = FakeTrainer(clock, hash_s=0.0022, exchange_s=0.0005)
    # After the second check no exchange is known yet.
    assert trainer.fit(SyncCheck(), steps=32) == [1, 11, 17, 24, 31, 32]


def test_auto_forgets_what_the_first_check_and_the_first_step_took(clock):
    trainer = FakeTrainer(clock, hash_s=0.0022)
    before = trainer.world.allreduce

    def slow_at_first(array, op="sum", *, name="host"):
        clock.now += 5.0 if len(trainer.checked) == 1 else 0.0
        return before(array, op, name=name)

    trainer.world.allreduce = slow_at_first
    checked = trainer.fit(SyncCheck(), steps=3000, step_s=lambda step: 60.0 if step == 1 else 0.1)
    assert checked == [1, *range(11, 3000, 6), 3000]


def test_a_check_that_costs_next_to_nothing_is_made_at_every_step(clock):
    assert FakeTrainer(clock, hash_s=1e-6).fit(SyncCheck(), steps=15)[1:] == [11, 12, 13, 14, 15, 15]


def test_zero_switches_off_all_checks(clock):
    assert FakeTrainer(clock).fit(SyncCheck(every=0), steps=5) == []


def test_one_process_compares_nothing(clock):
    trainer = FakeTrainer(clock)
    trainer.world = SoloWorld()
    assert trainer.fit(SyncCheck(every=1), steps=5) == []


def test_a_second_fit_begins_anew(clock):
    check = SyncCheck(every=4)
    trainer = FakeTrainer(clock)
    trainer.fit(check, steps=3)
    assert trainer.fit(check, steps=3) == [1, 3, 4, 6]


def test_the_interval_is_logged_once(clock, caplog):
    with caplog.at_level(logging.INFO, logger="hvdtrain"):
        FakeTrainer(clock, hash_s=0.0022).fit(SyncCheck(), steps=60)
    assert [record.message for record in caplog.records] == [
        "weights and optimizer state compared over ranks every 6 steps"
    ]


@pytest.mark.parametrize(
    "wrong", [{"every": -1}, {"every": True}, {"every": 2.5}, {"every": "often"}, {"on_divergence": "ignore"}]
)
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ValueError, match="Received: " + next(iter(wrong))):
        SyncCheck(**wrong)
