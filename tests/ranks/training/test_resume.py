"""A run that was stopped at any step ends as one that never was: bit for bit, with everything random in it."""

from __future__ import annotations

import numpy as np
import pytest
from stopping import StopAt, StoppedError

import hvdtrain
from hvdtrain.callbacks import Callback, Checkpoint, EarlyStopping
from hvdtrain.errors import HvdTrainError

BATCH = 4
TIMES = {"samples_per_s", "seconds"}


def data(num_samples=50):
    generator = np.random.default_rng(1)
    return generator.normal(size=(num_samples, 6)).astype(np.float32), generator.integers(0, 3, num_samples)


def train(kit, world, *, seed, accumulate=1, **options):
    """Train a model that draws at random, with ranks that are seeded alike; return all that is left."""
    kit.seed(seed)
    trainer = kit.trainer(kit.random_model(), accumulate=accumulate)
    given = {"validation": data(10), "epochs": 3, "batch_size": BATCH, "progress": False, **options}
    history = trainer.fit(data(), **given)
    state = trainer.state()
    return state.arrays, state.meta, {name: values for name, values in history.items() if name not in TIMES}


def assert_same(ours, theirs):
    assert ours[0].keys() == theirs[0].keys()
    for name in ours[0]:
        np.testing.assert_array_equal(ours[0][name], theirs[0][name], err_msg=name)
    assert ours[1:] == theirs[1:]


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    ("stop", "accumulate"),
    [(1, 1), pytest.param(6, 1, marks=pytest.mark.every_backend), (9, 1), (14, 1), (4, 2)],
)
def test_a_run_that_was_stopped_ends_as_if_it_never_was(kit, world, shared_tmp_path, stop, accumulate):
    straight = train(kit, world, seed=7, accumulate=accumulate)
    with pytest.raises(StoppedError):
        train(
            kit,
            world,
            seed=7,
            accumulate=accumulate,
            callbacks=[Checkpoint(shared_tmp_path, every_steps=1), StopAt(stop)],
        )
    resumed = train(kit, world, seed=99, accumulate=accumulate, callbacks=[Checkpoint(shared_tmp_path, every_steps=1)])
    assert_same(resumed, straight)


class Scores(Callback):
    """A metric that is best after the second epoch."""

    def on_epoch_end(self, trainer, epoch, logs):
        logs["score"] = (1.0, 2.0, 1.5, 1.0, 1.0)[epoch]
        trainer.history.setdefault("score", []).append(logs["score"])


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("step", [1, 6])
def test_the_best_weights_outlive_a_stop(kit, world, shared_tmp_path, step):
    def stopping():
        return [Scores(), EarlyStopping("score", patience=1, restore_best=True)]

    straight = train(kit, world, seed=7, epochs=5, callbacks=stopping())
    steps = -(-50 // (BATCH * world.size))
    keep = Checkpoint(shared_tmp_path, every_steps=5)
    with pytest.raises(StoppedError):
        train(kit, world, seed=7, epochs=5, callbacks=[*stopping(), keep, StopAt(2 * steps + step)])
    resumed = train(kit, world, seed=99, epochs=5, callbacks=[*stopping(), Checkpoint(shared_tmp_path)])
    assert resumed[2]["score"] == [1.0, 2.0, 1.5, 1.0]
    assert_same(resumed, straight)


class StopBeforeTheEpochsEndIsKept(Callback):
    """Stands for a kill during validation."""

    def on_epoch_end(self, trainer, epoch, logs):
        if epoch == 1:
            raise StoppedError


@pytest.mark.on_keras
@pytest.mark.world_size(2)
def test_a_run_that_was_stopped_between_an_epochs_last_step_and_its_end_ends_likewise(kit, world, shared_tmp_path):
    straight = train(kit, world, seed=7)
    hooks = [Checkpoint(shared_tmp_path, every_steps=1), StopBeforeTheEpochsEndIsKept()]
    with pytest.raises(StoppedError):
        train(kit, world, seed=7, callbacks=hooks)
    assert_same(train(kit, world, seed=99, callbacks=[Checkpoint(shared_tmp_path, every_steps=1)]), straight)


@pytest.mark.world_size(2)
def test_a_run_that_is_stopped_again_and_again_comes_to_the_same_end(kit, world, shared_tmp_path):
    straight = train(kit, world, seed=7)
    for stop in (3, 4, 11):
        with pytest.raises(StoppedError):
            train(
                kit,
                world,
                seed=stop if stop > 3 else 7,
                callbacks=[Checkpoint(shared_tmp_path, every_steps=1), StopAt(stop)],
            )
    assert_same(train(kit, world, seed=99, checkpoint_dir=str(shared_tmp_path)), straight)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("copies", [0, 2])
def test_a_trainer_loaded_within_an_epoch_goes_on_there(kit, world, shared_tmp_path, copies):
    class SaveAt5(Callback):
        def on_step_end(self, trainer, step):
            if trainer.global_step == 5:
                trainer.save(str(shared_tmp_path / "five"))

    def load(path):
        kit.seed(99)
        net = kit.random_model()
        return hvdtrain.Trainer.load(
            str(path), net, optimizer=kit.optimizer_of(net), loss=kit.loss(), metrics=["accuracy"]
        )

    straight = train(kit, world, seed=7, callbacks=[SaveAt5()])
    trainer = load(shared_tmp_path / "five")
    for copy in range(copies):
        trainer.save(str(shared_tmp_path / f"copy-{copy}"))
        trainer = load(shared_tmp_path / f"copy-{copy}")
    assert trainer.global_step == 5
    history = trainer.fit(data(), validation=data(10), epochs=3, batch_size=BATCH, progress=False)
    state = trainer.state()
    assert_same(
        (state.arrays, state.meta, {name: values for name, values in history.items() if name not in TIMES}), straight
    )


@pytest.mark.on_keras
@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", ["tf.data", "other"])
def test_ranks_without_a_batch_in_the_rest_of_an_epoch_take_its_steps(kit, world, shared_tmp_path, kind):
    batches = 2 * world.size + 1  # in the last step all ranks but one are without

    def run(seed, *callbacks):
        kit.seed(seed)
        trainer = kit.trainer(kit.random_model())
        stream = kit.streams(*data(4 * batches))[kind]
        history = trainer.fit(stream, epochs=3, callbacks=callbacks, progress=False)
        state = trainer.state()
        return state.arrays, state.meta, {name: values for name, values in history.items() if name not in TIMES}

    straight = run(7)
    with pytest.raises(StoppedError):
        run(7, Checkpoint(shared_tmp_path, every_steps=1), StopAt(5))  # the second epoch's last step
    assert_same(run(99, Checkpoint(shared_tmp_path)), straight)


@pytest.mark.world_size(2)
def test_the_rest_of_an_epoch_is_not_shared_out_of_other_data(kit, world, shared_tmp_path):
    with pytest.raises(StoppedError):
        train(kit, world, seed=7, callbacks=[Checkpoint(shared_tmp_path, every_steps=1), StopAt(2)])
    trainer = kit.trainer(kit.random_model())
    with pytest.raises(HvdTrainError, match=r"number of samples was 50\. Received: 49"):
        trainer.fit(data(49), epochs=3, batch_size=BATCH, progress=False, checkpoint_dir=str(shared_tmp_path))


@pytest.mark.world_size(2)
def test_what_cannot_be_written_is_an_error_on_every_rank_and_loses_nothing(kit, world, shared_tmp_path):
    directory = shared_tmp_path / "run"
    train(kit, world, seed=7, epochs=1, checkpoint_dir=str(directory))
    if world.is_root:
        (directory / "epoch-000002").write_text("a file is in the way")
    world.barrier()
    trainer = kit.trainer(kit.random_model())
    with pytest.raises(HvdTrainError, match="epoch-000002"):
        trainer.fit(data(), epochs=3, batch_size=BATCH, progress=False, checkpoint_dir=str(directory))
    assert np.isfinite(trainer.evaluate(data(), batch_size=BATCH)["loss"])
    world.barrier()
    if world.is_root:
        (directory / "epoch-000002").unlink()
    world.barrier()
    history = train(kit, world, seed=1, checkpoint_dir=str(directory))[2]
    assert len(history["loss"]) == 3
