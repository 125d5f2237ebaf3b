"""What ranks tell each other while they train: the same for torch and every Keras backend."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hvdtrain.callbacks import Callback, Stragglers
from hvdtrain.data.sources import IndexedSource

BATCH = 4
NAP_S = 0.05


def data(num_samples=48, seed=1):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(num_samples, 6)).astype(np.float32)
    return x, generator.integers(0, 3, num_samples)


class Listen(Callback):
    def __init__(self):
        self.heard = []

    def on_interval(self, trainer, interval):
        self.heard.append(interval)


@pytest.fixture
def every_step(monkeypatch):
    """Let each step end an interval."""
    monkeypatch.setattr("hvdtrain.telemetry.interval.INTERVAL_S", 0)


def fit(trainer, *callbacks, samples=48, epochs=2):
    return trainer.fit(data(samples), epochs=epochs, batch_size=BATCH, callbacks=callbacks, progress=False)


@pytest.mark.on_keras
@pytest.mark.usefixtures("every_step")
@pytest.mark.world_size(2, 3)
def test_intervals_are_equal_on_all_ranks_and_their_metrics_exact(kit, world):
    listen = Listen()
    history = fit(kit.trainer(kit.model()), listen, samples=44)  # a tail that is not whole
    steps = len(listen.heard) // 2
    assert [each.global_step for each in listen.heard] == list(range(1, 2 * steps + 1))
    assert sum(each.samples for each in listen.heard) == 2 * 44
    for epoch in (0, 1):
        last = listen.heard[(epoch + 1) * steps - 1]
        assert (last.epoch, last.step) == (epoch, steps)
        assert last.metrics == {name: history[name][epoch] for name in ("loss", "accuracy")}
    told = [[e.samples, e.seconds, e.metrics, *(t.tolist() for t in vars(e.times).values())] for e in listen.heard]
    assert world.allgather_object(told) == [told] * world.size
    assert all(len(each.times.own) == world.size for each in listen.heard)


@pytest.mark.world_size(2, 3)
def test_listening_changes_no_metric(kit, world, monkeypatch):
    quiet = fit(kit.trainer(kit.model()))
    monkeypatch.setattr("hvdtrain.telemetry.interval.INTERVAL_S", 0)
    heard = fit(kit.trainer(kit.model()), Listen())
    assert {name: heard[name] for name in ("loss", "accuracy")} == {name: quiet[name] for name in ("loss", "accuracy")}


@pytest.mark.usefixtures("every_step")
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    "what",
    [
        pytest.param("computing", marks=pytest.mark.on_keras),
        "waiting for data",
        "what it does between steps",
    ],
)
def test_a_slow_rank_is_found_by_all_and_for_the_right_reason(kit, world, monkeypatch, what):
    monkeypatch.setattr("hvdtrain.callbacks.stragglers._LONG_S", 2.0**-9)  # three intervals
    trainer = kit.trainer(kit.model())
    late = world.size - 1
    epoch, train_step = IndexedSource.epoch, trainer._adapter.train_step

    def slow_step(batches):
        time.sleep(NAP_S)
        train_step(batches)

    def slowly(*args, **kwargs):
        for batch in epoch(*args, **kwargs):
            time.sleep(NAP_S)
            yield batch

    class SlowCallback(Callback):
        def on_step_end(self, trainer, step):
            if world.rank == late and what.endswith("steps"):
                time.sleep(NAP_S)

    if world.rank == late and what == "computing":
        monkeypatch.setattr(trainer._adapter, "train_step", slow_step)
    if world.rank == late and what.endswith("data"):
        monkeypatch.setattr(IndexedSource, "epoch", slowly)
    slow, listen = Stragglers(), Listen()
    named = {}

    class Remember(Callback):
        def on_interval(self, trainer, interval):
            named.update(slow.slow)

    fit(trainer, slow, listen, Remember(), SlowCallback())
    assert f"{what} takes it" in named[late]
    said = [[rank, text] for rank, text in named.items()]
    assert world.allgather_object(said) == [said] * world.size
    # The others spend that time in the reduction, which is how it is found; in this test, what a callback takes, in the
    # exchange that follows each step.
    times = [each.times for each in listen.heard[2:]]
    seen = [each.other[late] if what.endswith("steps") else each.reduction[0] for each in times]
    assert np.median(seen) > NAP_S / 2
