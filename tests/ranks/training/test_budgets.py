"""Steps, seconds and validation within epochs: on all ranks the same, and training does not notice."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hvdtrain.callbacks import Callback, Checkpoint
from hvdtrain.errors import DesyncError

BATCH = 4
TIMES = {"samples_per_s", "seconds"}


class StoppedError(Exception):
    """Stands for a kill."""


class StopInValidation(Callback):
    def on_validation_end(self, trainer, logs):
        if trainer.global_step == 9:
            raise StoppedError


def data(num_samples=50, seed=1):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(num_samples, 6)).astype(np.float32), generator.integers(0, 3, num_samples)


def train(kit, world, *callbacks, seed=7, accumulate=1, **options):
    """Train a model that draws at random, on uneven shards; return weights and history."""
    kit.seed(seed + world.rank)
    trainer = kit.trainer(kit.random_model(), accumulate=accumulate)
    given = {"validation": {"a": data(10), "b": data(7, seed=2)}, "batch_size": BATCH, "progress": False, **options}
    history = trainer.fit(data(), callbacks=callbacks, **given)
    return trainer.state().arrays, history


def assert_same(ours, theirs):
    assert ours[0].keys() == theirs[0].keys()
    for name in ours[0]:
        np.testing.assert_array_equal(ours[0][name], theirs[0][name], err_msg=name)
    assert {name: v for name, v in ours[1].items() if name not in TIMES} == {
        name: v for name, v in theirs[1].items() if name not in TIMES
    }


@pytest.mark.on_keras
@pytest.mark.world_size(2, 3)
def test_validation_within_an_epoch_is_that_of_a_run_that_ends_there_and_training_does_not_notice(kit, world):
    plain = train(kit, world, steps=11)
    validated = train(kit, world, steps=11, validate_every=3)
    assert_same(validated, plain)
    assert [each["global_step"] for each in validated[1].validations] == [3, 6, 9]
    ended = train(kit, world, steps=3)[1]
    here = validated[1].validations[0]
    assert {"val_a_loss", "val_b_loss", "val_a_accuracy", "val_b_accuracy"} < here.keys()
    assert {name: ended[name][-1] for name in here if name != "global_step"} == pytest.approx(
        {name: value for name, value in here.items() if name != "global_step"}, rel=1e-6
    )


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_kill_during_validation_resumes_bit_for_bit(kit, world, shared_tmp_path, accumulate):
    options = {"accumulate": accumulate, "steps": 11, "validate_every": 3}
    straight = train(kit, world, **options)
    keep = Checkpoint(shared_tmp_path, every_steps=2, best="val_b_loss")
    with pytest.raises(StoppedError):
        train(kit, world, keep, StopInValidation(), **options)
    resumed = train(kit, world, keep, seed=99, **options)
    assert_same(resumed, straight)
    assert resumed[1].validations == straight[1].validations


@pytest.mark.world_size(2, 3)
def test_a_longer_run_resumes_what_steps_have_ended(kit, world, shared_tmp_path):
    straight = train(kit, world, steps=11)
    train(kit, world, Checkpoint(shared_tmp_path), steps=4)
    assert_same(train(kit, world, Checkpoint(shared_tmp_path), seed=99, steps=11), straight)


@pytest.mark.world_size(2)
def test_seconds_end_all_ranks_after_the_same_step(kit, world):
    class Slow(Callback):
        def on_step_end(self, trainer, step):
            time.sleep(0.001 * (1 + world.rank))

    trainer = kit.trainer(kit.model())
    history = trainer.fit(data(10**5), seconds=0.2, batch_size=1, callbacks=[Slow()], progress=False)
    steps = world.allgather(np.array([trainer.global_step]))
    assert (steps == steps[0]).all()
    assert history["seconds"][0] >= 0.2
    assert 1 <= steps[0] < 5000  # one, where the first step takes so long because it is compiled


@pytest.mark.world_size(2)
def test_ranks_with_other_limits_are_told(kit, world):
    with pytest.raises(DesyncError, match="steps is 3 on rank 0 but 4 on rank 1"):
        kit.trainer(kit.model()).fit(data(), steps=3 + world.rank, progress=False)
    with pytest.raises(DesyncError, match=r"validation is \[''\] on rank 0 but \['a'\] on rank 1"):
        kit.trainer(kit.model()).fit(data(), validation=data() if world.is_root else {"a": data()}, progress=False)
