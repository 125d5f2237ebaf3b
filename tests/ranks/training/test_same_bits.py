"""What ranks sum is cut the same way in every run, whatever its timing, resumed or not: equal runs give equal bits.

On two ranks that does not show: a sum of two has one order. MPI's and Gloo's sum of three depends on a number's place
in what is sent.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from hvdtrain.callbacks import Callback, Checkpoint

BATCH, STEPS, STOP = 4, 4, 2
TIMES = {"samples_per_s", "seconds"}


class StoppedError(Exception):
    """Stands for a kill."""


class Steps(Callback):
    """Makes one rank late for steps, and ends the run before one of them."""

    def __init__(self, *, late, stop=None):
        self._late, self._stop = late, stop

    def on_step_begin(self, trainer, step):
        if self._late:
            time.sleep(0.01 * trainer.world.rank)
        if trainer.global_step == self._stop:
            raise StoppedError


def train(kit, world, *, late=False, stop=None, callbacks=(), **options):
    """Train a model of many small tensors; return everything that is left."""

    def on_gradient():
        if late:
            time.sleep(0.003 * (1 + world.rank))  # longer than a cycle of Horovod's: what comes next comes too late

    trainer = kit.trainer(kit.deep_model(on_gradient), **options)
    generator = np.random.default_rng(1)
    samples = world.size * BATCH * STEPS
    data = generator.normal(size=(samples, 6)).astype(np.float32), generator.integers(0, 3, samples)
    given = [*callbacks, Steps(late=late, stop=stop)]
    history = trainer.fit(data, epochs=1, batch_size=BATCH, callbacks=given, progress=False)
    return trainer.state().arrays, {name: values for name, values in history.items() if name not in TIMES}


def assert_same(ours, theirs):
    assert ours[0].keys() == theirs[0].keys()
    different = [name for name in ours[0] if not np.array_equal(ours[0][name], theirs[0][name])]
    assert not different
    assert ours[1] == theirs[1]


@pytest.mark.world_size(3)
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_timing_does_not_show_in_the_weights(kit, world, compression):
    in_time = train(kit, world, compression=compression)
    late = train(kit, world, compression=compression, late=True)
    assert_same(late, in_time)


@pytest.mark.world_size(2, 3)
def test_a_resumed_run_sums_as_the_one_before_would_have(kit, world, shared_tmp_path):
    straight = train(kit, world)
    with pytest.raises(StoppedError):
        train(kit, world, stop=STOP, callbacks=[Checkpoint(shared_tmp_path, every_steps=1)])
    assert_same(train(kit, world, callbacks=[Checkpoint(shared_tmp_path)]), straight)


@pytest.mark.world_size(3)
def test_a_sum_of_three_depends_on_a_numbers_place(world):
    """What the other tests would not see without: if this fails, they hold whatever is cut where."""
    numbers = np.random.default_rng(world.rank).normal(size=100_000).astype(np.float32)
    whole = world.allreduce(numbers, name="whole")
    parts = [world.allreduce(part, name="part") for part in np.array_split(numbers, 7)]
    assert not np.array_equal(np.concatenate(parts), whole)
