"""What strategies leave to an epoch's end, or to a stop: faults, checkpoints; the same tests for torch and Keras."""

from __future__ import annotations

import numpy as np
import pytest
from test_trainer import BATCH, assert_equal_on_all_ranks, data

import hvdtrain
from hvdtrain import checkpoint
from hvdtrain.callbacks import Callback, Checkpoint
from hvdtrain.data import sharding
from hvdtrain.errors import HvdTrainError, NonFiniteError
from hvdtrain.training import nan_policy

FIRST = int(sharding.epoch_order(48, epoch=0, seed=0)[0])  # a sample of the first step


def poisoned(*rows):
    x, y = data(48)  # six steps an epoch at two ranks
    x[list(rows)] = np.nan
    return x, y


@pytest.mark.world_size(2)
@pytest.mark.on_keras
def test_a_step_left_out_after_the_last_synchronization_is_reported_when_the_epoch_ends(kit, world):
    trainer = kit.trainer(kit.model(), nan_policy="raise", sync=hvdtrain.LocalSGD(100))
    with pytest.raises(NonFiniteError, match=r"The last step of epoch 1.*: on rank [01] \(.*of the samples "):
        trainer.fit(poisoned(FIRST), epochs=2, batch_size=BATCH, progress=False)


@pytest.mark.world_size(2)
@pytest.mark.every_backend
def test_a_rank_whose_first_step_overflows_alone_steps_on_with_the_others(kit, world):
    """Loss scaling leaves out the step of this rank, and all that the other one does in it."""
    net = kit.model()
    trainer = kit.trainer(net, precision="fp16", sync=hvdtrain.LocalSGD(3))
    trainer.fit(poisoned(FIRST), epochs=1, batch_size=BATCH, progress=False)
    assert all(np.isfinite(each).all() for each in kit.weights(net))
    assert_equal_on_all_ranks(world, kit.weights(net))


class Begun(Callback):
    """Counts the steps that began."""

    def __init__(self):
        self.steps = 0

    def on_step_begin(self, trainer, step):
        self.steps += 1


@pytest.mark.world_size(2)
@pytest.mark.parametrize("sync", [hvdtrain.LocalSGD(3), hvdtrain.LocalSGD(100), hvdtrain.Delayed()], ids=str)
def test_a_run_that_a_late_fault_stops_has_used_the_samples_of_each_step_that_began(kit, world, shared_tmp_path, sync):
    """Else a resumed run would take the last step once more."""
    if sync == hvdtrain.Delayed() and kit.__name__ == "keras_kit":
        pytest.skip("on Keras, Delayed refuses nan_policy")
    begun, trainer = Begun(), kit.trainer(kit.model(), nan_policy="stop", sync=sync)
    hooks = [begun, Checkpoint(shared_tmp_path)]
    trainer.fit(poisoned(FIRST), epochs=2, batch_size=BATCH, progress=False, callbacks=hooks)
    assert trainer.global_step == begun.steps <= 6
    (saved,) = (checkpoint.read(each).meta["position"] for each in shared_tmp_path.glob("epoch*"))
    assert saved["global_step"] == begun.steps
    assert saved["consumed"]["samples"] == begun.steps * BATCH * world.size


@pytest.mark.world_size(2)
def test_ranks_that_can_take_no_step_end_the_run(kit, world, monkeypatch):
    monkeypatch.setattr(nan_policy, "_MOST_IN_A_ROW", 10)
    trainer = kit.trainer(kit.model(), nan_policy="skip", sync=hvdtrain.LocalSGD(4))
    with pytest.raises(NonFiniteError, match=r"That was the 1[26]th step in a row which could not be taken"):
        trainer.fit(poisoned(*range(48)), epochs=9, batch_size=BATCH, progress=False)


@pytest.mark.world_size(2)
def test_a_checkpoint_that_is_due_between_synchronizations_is_not_lost_at_the_epochs_end(kit, world, shared_tmp_path):
    trainer = kit.trainer(kit.model(), sync=hvdtrain.LocalSGD(100))
    keep = Checkpoint(shared_tmp_path, every_epochs=0, every_steps=5, keep_last=None)
    trainer.fit(data(48), epochs=2, batch_size=BATCH, progress=False, callbacks=[keep])
    steps = sorted(checkpoint.read(each).meta["position"]["global_step"] for each in shared_tmp_path.glob("epoch*"))
    assert steps == [6, 12]


@pytest.mark.world_size(2)
def test_ranks_with_different_weights_do_not_predict(kit, world):
    class PredictAt(Callback):
        def on_step_end(self, trainer, step):
            if step == 1:
                trainer.predict(data(8)[0])

    trainer = kit.trainer(kit.model(), sync=hvdtrain.LocalSGD(3))
    with pytest.raises(HvdTrainError, match=r"predict\(\) was called between two synchronizations of sync=.*in_sync"):
        trainer.fit(data(48), epochs=1, batch_size=BATCH, progress=False, callbacks=[PredictAt()])


@pytest.mark.world_size(2)
@pytest.mark.on_keras
def test_a_run_continues_without_its_strategy(kit, world, shared_tmp_path):
    options = {"batch_size": BATCH, "progress": False, "checkpoint_dir": str(shared_tmp_path)}
    kit.trainer(kit.model(), sync=hvdtrain.DiLoCo(3)).fit(data(48), epochs=1, **options)
    net = kit.model(seed=5)
    history = kit.trainer(net).fit(data(48), epochs=2, **options)
    assert len(history["loss"]) == 2
    assert_equal_on_all_ranks(world, kit.weights(net))
