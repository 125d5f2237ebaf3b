from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest

from hvdtrain.distributed.recorder import Clock, Recorder
from hvdtrain.telemetry import step_times
from hvdtrain.telemetry.step_times import WARMUP_STEPS, RankReport, Spread, StepTimes


class Steps(StepTimes):
    """Steps by a clock that moves when a step is taken."""

    def __init__(self, **options: Any) -> None:
        self.now = 100.0
        super().__init__(Recorder(Clock(lambda: self.now)), **options)
        for _ in range(WARMUP_STEPS):
            self.take(compute=50.0)

    def take(self, *, compute: float, wait: float = 0.0, data: float = 0.0, backward: float = 0.0) -> None:
        self.now += data
        self.recorder.ended("data")
        self.now += compute - backward
        self.recorder.ended("compute")
        if backward:
            self.now += backward
            self.recorder.ended("backward")
        with self.recorder.waiting():
            self.now += wait
        self.recorder.step_done()


def test_parts_add_up_to_the_median_step() -> None:
    times = Steps()
    for n in range(9):
        times.take(compute=1.0 + 0.1 * n, wait=0.5, data=0.25)
    summary = times.summary()
    assert summary is not None
    assert summary.step_s.median == pytest.approx(1.4 + 0.75)
    parts = summary.compute_s + summary.communication_s + summary.data_s
    assert parts == pytest.approx(summary.step_s.median)
    assert summary.communication_s == pytest.approx(0.5, rel=0.05)
    assert summary.data_s == pytest.approx(0.25, rel=0.05)


def test_exchanges_of_weights_count_in_the_steps_between_them() -> None:
    times = Steps()
    assert times.recorder.exchanges is None
    times.recorder.exchanges = 0
    for n in range(22):
        if n % 4 == 2:  # between two steps
            with times.recorder.waiting():
                times.now += 8.0
            times.recorder.exchanged()
        times.take(compute=1.0)
    summary = times.summary()
    assert summary is not None
    assert summary.step_s == Spread(3.0, 3.0, 3.0), "1 + 8 / 4; most steps have no exchange"
    assert summary.communication_s == pytest.approx(2.0)
    assert summary.compute_s == pytest.approx(1.0)
    assert summary.exchanges == 5


def test_steps_without_an_exchange_yet_say_so() -> None:
    times = Steps()
    times.recorder.exchanges = 0
    for _ in range(5):
        times.take(compute=1.0)
    summary = times.summary()
    assert summary is not None
    assert (summary.step_s.median, summary.exchanges) == (1.0, 0)


def test_a_ranks_own_spread_is_without_its_waits_for_the_others() -> None:
    times = Steps()
    for n in range(9):
        times.take(compute=1.0 + 0.01 * n, wait=float(n), data=0.25)
    summary = times.summary()
    assert summary is not None
    assert dataclasses.astuple(summary.own_s) == pytest.approx((1.29, 1.27, 1.31))
    assert summary.step_s.high - summary.step_s.low > 4


def test_warm_up_steps_do_not_count() -> None:
    times = Steps()
    assert times.summary() is None
    for _ in range(4):
        times.take(compute=1.0)
    summary = times.summary()
    assert summary is not None
    assert (summary.steps, summary.step_s) == (4, Spread(1.0, 1.0, 1.0))
    assert times.steps_taken == WARMUP_STEPS + 4


def test_an_evaluation_between_two_steps_does_not_change_the_split() -> None:
    times = Steps()
    for n in range(11):
        times.take(compute=1.0, wait=1.0, data=30.0 if n == 5 else 0.0)
    summary = times.summary()
    assert summary is not None
    assert (summary.data_s, summary.compute_s, summary.communication_s) == (0.0, 1.0, 1.0)


def test_backward_is_unknown_until_it_is_seen() -> None:
    times = Steps()
    for _ in range(3):
        times.take(compute=1.0)
    assert times.summary().backward_s is None  # type: ignore[union-attr]
    for _ in range(30):
        times.take(compute=1.0, backward=0.6)
    assert times.summary().backward_s == pytest.approx(0.6, rel=0.15)  # type: ignore[union-attr]


def test_the_limit_counts_measured_steps() -> None:
    ended: list[int] = []
    times = Steps(limit=4, on_limit=lambda: ended.append(1))
    for n in range(5):
        assert len(ended) == max(0, n - 3)
        times.take(compute=1.0)
    assert len(ended) == 2  # again, where a script caught the first


def test_reports_survive_their_way_to_the_launcher() -> None:
    times = Steps()
    for _ in range(4):
        times.take(compute=1.0, wait=0.5)
    sent = RankReport(1, 2, times.steps_taken, times.summary(), {"host": "a", "cores": 2})
    assert RankReport.from_json(sent.to_json()) == sent
    assert "\n" not in sent.to_json()
    unused = RankReport(0, 1, 0, None)
    assert RankReport.from_json(unused.to_json()) == unused


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rank": 0, "summary": {"steps": 1}}'])
def test_a_damaged_report_is_an_error_of_known_kind(text: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        RankReport.from_json(text)


def test_spread_of_many_values_is_their_quartiles_and_of_few_their_range() -> None:
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0)
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 100.0]) == Spread(3.0, 2.0, 4.0)
    assert str(Spread(1.0, 0.9996, 1.25)) == "1.000 [1.000-1.250]"


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "HVDTRAIN_SOLO": "1", **environment}, capture_output=True,
        text=True, timeout=60,
    )  # fmt: skip


@pytest.mark.slow
def test_nothing_of_the_recorder_is_loaded_where_it_is_not_asked_for() -> None:
    code = "import sys, hvdtrain.torch; print([m for m in sys.modules if m.endswith(('.step_times', '.step_marks'))])"
    assert python(code).stdout.strip() == "[]"


@pytest.mark.slow
def test_a_script_ends_after_the_steps_asked_for_and_reports_them() -> None:
    code = """
import torch
import hvdtrain.torch as hvd
hvd.init()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1000):
    model(torch.rand(8, 4)).sum().backward()
    optimizer.step()
print("not reached")
"""
    done = python(code, **{step_times.VARIABLE: "5"})
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    assert len(lines) == 1
    told = RankReport.from_json(lines[0].removeprefix(step_times.MARK))
    assert told.summary is not None
    assert (told.rank, told.size, told.steps_taken, told.summary.steps) == (0, 1, WARMUP_STEPS + 5, 5)
    assert told.facts["samples_per_step"] == 8
    assert told.facts["gradient_bytes"] == 5 * 4
    assert told.facts["framework"] == "torch"
    assert told.facts["stopped"] is True
    assert told.summary.backward_s is not None
    assert 0 < told.summary.backward_s < told.summary.step_s.median


@pytest.mark.slow
def test_a_number_of_steps_that_is_none_is_an_error() -> None:
    done = python("import hvdtrain.torch", **{step_times.VARIABLE: "many"})
    assert done.returncode != 0
    assert "HVDTRAIN_STEP_TIMES must be a number of steps, 0 for all of them. Received: 'many'" in done.stderr


@pytest.mark.slow
def test_a_step_of_several_batches_holds_all_their_samples_and_waits() -> None:
    code = """
import time
import torch
import hvdtrain.torch as hvd
from hvdtrain.telemetry import step_times
from hvdtrain.torch import step_marks
hvd.init()
times = step_times.StepTimes()
step_marks.attach(times)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    for _ in range(2):
        time.sleep(0.1)  # the loader
        model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
# One wait takes 0.1 s, two take 0.2; the summary scales them to the median step.
print(times.facts["samples_per_step"], times.summary().data_s > 0.13)
"""
    done = python(code)
    assert done.stdout.split() == ["6", "True"], done.stderr


KERAS_FIT = """
import keras, numpy as np
from hvdtrain.telemetry import step_times
from hvdtrain.keras import step_marks
for passes, together in CASES:
    times = step_times.StepTimes()
    detach = step_marks.attach(times)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=passes)
    model.compile(optimizer=optimizer, loss="mse", steps_per_execution=together)
    model.fit(np.ones((24 * 4, 3)), np.ones((24 * 4, 1)), batch_size=4, verbose=0)
    print(times.steps_taken, times.facts["samples_per_step"], times.facts["gradient_bytes"] // 16)
    detach()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "cases", "told"),
    [
        # (batches an update, batches an execution): steps, samples a step, updates a step
        ("tensorflow", [(3, 1), (None, 2)], ["8 12 1", "12 8 2"]),
        ("torch", [(3, 1)], ["8 12 1"]),
        ("jax", [(3, 1), (2, 4)], ["8 12 1", "6 16 2"]),
    ],
)
def test_a_keras_step_is_what_updates_the_weights(backend: str, cases: list[Any], told: list[str]) -> None:
    done = python(f"CASES = {cases}\n{KERAS_FIT}", KERAS_BACKEND=backend)
    assert done.stdout.splitlines() == told, done.stderr
