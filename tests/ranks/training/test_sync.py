"""Ranks that step alone and synchronize every so many steps: the same tests for torch and Keras."""

from __future__ import annotations

import numpy as np
import pytest
from test_resume import StopAt, StoppedError, assert_same, train
from test_trainer import BATCH, assert_equal_on_all_ranks, data, one_process_groups

import hvdtrain
from hvdtrain import checkpoint
from hvdtrain.callbacks import Callback, Checkpoint, SyncCheck
from hvdtrain.errors import HvdTrainError, NonFiniteError

STRATEGIES = {
    "LocalSGD": hvdtrain.LocalSGD(3),
    "post-local": hvdtrain.LocalSGD(3, after_steps=2),
    "DiLoCo": hvdtrain.DiLoCo(3, lr=0.7, momentum=0.9),
    "streaming": hvdtrain.DiLoCo(6, fragments=2, overlap=2),
    "Delayed": hvdtrain.Delayed(),
}


def strategy_of(kit, name):
    if name == "streaming" and kit.__name__ == "keras_kit":
        with pytest.raises(ValueError, match=r"With sync=DiLoCo.*a Keras model: an exchange passes through the host"):
            kit.trainer(kit.model(), sync=STRATEGIES[name])
        pytest.skip("fragments and overlap are for torch")
    return STRATEGIES[name]


@pytest.mark.world_size(2)
def test_ranks_of_a_host_step_together_in_torch_alone(kit, world):
    sync = hvdtrain.LocalSGD(3, within="host")
    if kit.__name__ == "keras_kit":
        with pytest.raises(ValueError, match=r"With sync=LocalSGD.*a Keras model: its compiled step reduces over all"):
            kit.trainer(kit.model(), sync=sync)
        return
    x, y = data(53)
    net, reference = kit.model(seed=world.rank), kit.model(seed=0)
    kit.trainer(net, sync=sync).fit((x, y), epochs=3, batch_size=BATCH, progress=False)
    kit.optimizer_steps(reference, one_process_groups(x, y, size=world.size, epochs=3))
    for ours, theirs in zip(kit.weights(net), kit.weights(reference), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6, err_msg="one host is synchronous")


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    ("num_samples", "accumulate"),
    [pytest.param(53, 1, marks=pytest.mark.every_backend), (50, 3), pytest.param(2, 1, id="fewer-samples-than-ranks")],
)
def test_local_sgd_of_one_step_is_synchronous_training(kit, world, num_samples, accumulate):
    x, y = data(num_samples)
    net, reference = kit.model(seed=world.rank), kit.model(seed=0)
    trainer = kit.trainer(net, accumulate=accumulate, sync=hvdtrain.LocalSGD(1))
    trainer.fit((x, y), epochs=3, batch_size=BATCH, progress=False)
    kit.optimizer_steps(reference, one_process_groups(x, y, size=world.size, epochs=3, accumulate=accumulate))
    for ours, theirs in zip(kit.weights(net), kit.weights(reference), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
    assert_equal_on_all_ranks(world, kit.weights(net))


class Watch(Callback):
    """Notes at which steps ranks hold equal weights, by the trainer and in fact."""

    def __init__(self):
        self.said, self.seen = [], []

    def on_step_end(self, trainer, step):
        arrays = [array for name, array in sorted(trainer.state().arrays.items()) if name.startswith("model.")]
        flat = np.concatenate([np.ravel(array) for array in arrays])
        everybody = trainer.world.allgather(flat[None], name="watch")
        self.said += [trainer.global_step] * trainer.in_sync
        self.seen += [trainer.global_step] * bool((everybody == everybody[0]).all())


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("strategy", "steps"),
    # 53 samples make seven steps an epoch. A new epoch begins with equal ranks, but no step has ended then.
    [
        ("LocalSGD", [3, 6, 9, 12]),
        ("post-local", [1, 2, 5, 8, 11, 14]),
        ("DiLoCo", [3, 6, 9, 12]),
        ("streaming", []),
        ("Delayed", [*range(1, 15)]),
    ],
)
def test_ranks_hold_equal_weights_after_every_so_many_steps(kit, world, strategy, steps):
    watch, net = Watch(), kit.model()
    kit.trainer(net, sync=strategy_of(kit, strategy)).fit(
        data(53), epochs=2, batch_size=BATCH, progress=False, callbacks=[watch, SyncCheck(every=1)]
    )
    assert watch.said == watch.seen == steps
    assert_equal_on_all_ranks(world, kit.weights(net))


@pytest.mark.world_size(2)
def test_what_is_due_between_synchronizations_follows_the_next_one(kit, world, shared_tmp_path):
    trainer = kit.trainer(kit.model(), sync=STRATEGIES["LocalSGD"])
    history = trainer.fit(
        data(53), validation=data(10), validate_every=4, epochs=1, batch_size=BATCH, progress=False,
        callbacks=[Checkpoint(shared_tmp_path, every_steps=2, keep_last=None)],
    )  # fmt: skip
    assert [each["global_step"] for each in history.validations] == [6]
    steps = sorted(checkpoint.read(each).meta["position"]["global_step"] for each in shared_tmp_path.glob("epoch*"))
    assert steps == [3, 6, 7], list(shared_tmp_path.iterdir())


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "strategy",
    [
        "LocalSGD",
        "post-local",
        pytest.param("DiLoCo", marks=pytest.mark.every_backend),
        "streaming",
        pytest.param("Delayed", marks=pytest.mark.every_backend),
    ],
)
def test_a_run_that_was_stopped_ends_as_if_it_never_was(kit, world, shared_tmp_path, monkeypatch, strategy):
    make, sync = kit.trainer, strategy_of(kit, strategy)
    monkeypatch.setattr(kit, "trainer", lambda net, **options: make(net, sync=sync, **options))

    def saving(folder):  # where ranks hold equal weights only when asked to, checkpoints are part of the algorithm
        return Checkpoint(shared_tmp_path / folder, every_steps=1 if strategy != "streaming" else 5)

    straight = train(kit, world, seed=7, callbacks=[saving("straight")])
    with pytest.raises(StoppedError):
        train(kit, world, seed=7, callbacks=[saving("stopped"), StopAt(12)])
    resumed = train(kit, world, seed=99, callbacks=[saving("stopped")])
    assert_same(resumed, straight)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_rank_with_a_gradient_that_is_not_finite_reports_it_when_ranks_synchronize(kit, world, policy, caplog):
    x, y = data(48)
    x[0] = np.nan  # sample 0 is in the first epoch's step of one rank
    net = kit.model()
    trainer = kit.trainer(net, nan_policy=policy, sync=STRATEGIES["LocalSGD"])
    if policy == "raise":
        with pytest.raises(
            NonFiniteError, match=r"on rank [01] \(.*\) the gradient of .* is not finite, of the samples "
        ):
            trainer.fit((x, y), epochs=1, batch_size=BATCH, progress=False)
        return
    trainer.fit((x, y), epochs=1, batch_size=BATCH, progress=False)
    assert all(np.isfinite(each).all() for each in kit.weights(net))
    assert_equal_on_all_ranks(world, kit.weights(net))
    assert not world.is_root or "Skipped" in caplog.text


@pytest.mark.world_size(2)
def test_weights_that_differ_on_ranks_are_not_saved(kit, world, shared_tmp_path):
    class SaveAt(Callback):
        def on_step_end(self, trainer, step):
            if step == 3:
                trainer.save(shared_tmp_path / "saved")

    trainer = kit.trainer(kit.model(), sync=STRATEGIES["LocalSGD"])
    with pytest.raises(HvdTrainError, match=r"between two synchronizations of sync=.*Call it where trainer.in_sync"):
        trainer.fit(data(50), epochs=1, batch_size=BATCH, progress=False, callbacks=[SaveAt()])
    assert not (shared_tmp_path / "saved").exists()


@pytest.mark.world_size(2)
def test_a_trainer_is_loaded_with_its_strategy(kit, world, shared_tmp_path):
    options = {"batch_size": BATCH, "progress": False}
    trainer, straight = (kit.trainer(kit.model(), sync=STRATEGIES["DiLoCo"]) for _ in range(2))
    trainer.fit(data(50), epochs=1, **options)
    trainer.save(shared_tmp_path / "saved")
    net = kit.model(seed=5)
    again = hvdtrain.Trainer.load(
        shared_tmp_path / "saved", net, optimizer=kit.optimizer_of(net), loss=kit.loss(), metrics=["accuracy"]
    )
    assert again.config["sync"] == {"strategy": "DiLoCo", **vars(STRATEGIES["DiLoCo"])}
    again.fit(data(50), epochs=2, **options)
    straight.fit(data(50), epochs=2, **options)
    ours, theirs = straight.state(), again.state()
    assert any(name.startswith("sync.velocity.") for name in ours.arrays)
    for name, array in ours.arrays.items():
        np.testing.assert_array_equal(array, theirs.arrays[name], err_msg=name)
