"""Layers that a callback freezes or unfreezes stay so in a run that is resumed, which equals one never stopped."""

from __future__ import annotations

import numpy as np
import pytest

keras = pytest.importorskip("keras")

import hvdtrain  # noqa: E402
from hvdtrain.callbacks import Callback, Checkpoint  # noqa: E402
from hvdtrain.errors import CheckpointError  # noqa: E402
from hvdtrain.keras import trained  # noqa: E402

pytestmark = pytest.mark.usefixtures("alone")

BACKEND = keras.backend.backend()
GENERATOR = np.random.default_rng(0)
DATA = GENERATOR.normal(size=(12, 4)).astype(np.float32), GENERATOR.integers(0, 3, 12)
QUIET = {"batch_size": 4, "progress": False, "run_dir": None, "epochs": 5}
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.05),
}


class Change(Callback):
    """Freezes and unfreezes layers at the beginning of epochs.

    It also builds the optimizer again (True), compiles the step again (False), or does neither (None).
    """

    def __init__(self, changes, *, builds=True):
        self.changes, self.builds = changes, builds

    def on_epoch_begin(self, trainer, epoch):
        model = trainer.model
        for name, trainable in self.changes.get(epoch, {}).items():
            model.get_layer(name).trainable = trainable
        if epoch in self.changes and self.builds is not None:
            model.train_function = None
            if self.builds:
                optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
                optimizer.built = False
                optimizer.build(model.trainable_variables)


class Stop(Callback):
    def on_epoch_end(self, trainer, epoch, logs):
        if epoch == 3:
            raise KeyboardInterrupt


def make(optimizer="momentum", *, frozen=(), before=False, **options):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(6, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(6, "tanh")]
    names = ["bottom", "norm", "middle"]
    layers = [type(each).from_config({**each.get_config(), "name": n}) for each, n in zip(layers, names, strict=True)]
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(3, name="head")])
    made = OPTIMIZERS[optimizer]()
    if before:
        made.build(model.trainable_variables)
    for name in frozen:
        model.get_layer(name).trainable = False
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return hvdtrain.Trainer(model, optimizer=made, loss=loss, **options)


def weights(trainer):
    return [np.array(keras.ops.convert_to_numpy(each)) for each in trainer.model.weights]


def assert_resumes(folder, changes, *, builds=True, resumed=None, **how):
    straight = make(**how)
    straight.fit(DATA, callbacks=[Change(changes, builds=builds)], **QUIET)
    stopped, hooks = make(**how), [Change(changes, builds=builds), Checkpoint(folder), Stop()]
    with pytest.raises(KeyboardInterrupt):
        stopped.fit(DATA, callbacks=hooks, **QUIET)
    last = resumed or make(**how)
    last.fit(DATA, callbacks=[Change(changes, builds=builds), Checkpoint(folder)], **QUIET)
    for one, two in zip(weights(straight), weights(last), strict=True):
        np.testing.assert_array_equal(one, two)
    return last


UNFREEZE = {1: {"middle": True}}
GRADUAL = {1: {"middle": True}, 2: {"norm": True, "bottom": True}}
FREEZE = {1: {"bottom": False, "norm": False}}


@pytest.mark.parametrize(("changes", "optimizer"), [(UNFREEZE, "sgd"), (GRADUAL, "momentum"), (GRADUAL, "adam")])
def test_unfrozen_layers_train_on_after_a_resume(tmp_path, changes, optimizer):
    last = assert_resumes(tmp_path, changes, optimizer=optimizer, frozen=["bottom", "norm", "middle"])
    assert last.model.get_layer("middle").trainable


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.skipif(BACKEND == "jax", reason="Keras's optimizer remembers the weights of before, and raises")
def test_frozen_layers_stay_frozen_after_a_resume(tmp_path, optimizer):
    last = assert_resumes(tmp_path, FREEZE, optimizer=optimizer)
    assert not last.model.get_layer("bottom").trainable


@pytest.mark.parametrize("options", [{"accumulate": 2}, *([{"precision": "fp16"}] if BACKEND != "jax" else [])])
def test_options_keep_it(tmp_path, options):
    assert_resumes(tmp_path, UNFREEZE, frozen=["bottom", "norm", "middle"], **options)


@pytest.mark.skipif(BACKEND == "jax", reason="Keras wants an optimizer over exactly the trained weights")
def test_an_optimizer_over_frozen_weights_too_need_not_be_built_again(tmp_path):
    assert_resumes(tmp_path, GRADUAL, builds=False, before=True, frozen=["bottom", "norm", "middle"])


@pytest.mark.skipif(BACKEND == "jax", reason="Keras wants an optimizer over exactly the trained weights")
def test_layers_can_be_frozen_without_building_the_optimizer(tmp_path):
    assert_resumes(tmp_path, FREEZE, builds=False)


@pytest.mark.parametrize("changes", [GRADUAL, FREEZE])
def test_a_callback_need_only_freeze_or_unfreeze_layers(tmp_path, changes):
    frozen = ["bottom", "norm", "middle"] if changes is GRADUAL else []
    last = assert_resumes(tmp_path, changes, builds=None, frozen=frozen)
    assert all(layer.trainable == (changes is GRADUAL) for layer in last.model.layers[:2])


def test_what_trains_on_keeps_its_state_when_other_layers_join():
    trainer = make("momentum", frozen=["bottom", "norm", "middle"])
    trainer.fit(DATA, **QUIET)
    before = keras.ops.convert_to_numpy(_momentum(trainer, "head"))
    trainer.model.get_layer("middle").trainable = True
    assert "keep their state" in trained.follow(trainer.model)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(_momentum(trainer, "head")), before)
    assert before.any()
    assert not keras.ops.convert_to_numpy(_momentum(trainer, "middle")).any()


def _momentum(trainer, layer):
    """Return the last momentum of a layer's kernel that the optimizer has made."""
    return [v for v in trainer.model.optimizer.variables if f"{layer}_kernel_momentum" in v.path][-1]


@pytest.mark.skipif(BACKEND != "jax", reason="other backends take it")
def test_on_jax_an_optimizer_over_frozen_weights_is_refused():
    with pytest.raises(ValueError, match=r"exactly the weights that are trained.*bottom/kernel, which is frozen"):
        make(before=True, frozen=["bottom"])


def test_the_script_may_have_unfrozen_the_layers_itself(tmp_path):
    assert_resumes(tmp_path, UNFREEZE, frozen=["bottom", "norm", "middle"], resumed=make(frozen=["bottom", "norm"]))


def test_another_optimizers_state_is_refused_and_nothing_changes(tmp_path):
    make("adam").fit(DATA, callbacks=[Checkpoint(tmp_path)], **{**QUIET, "epochs": 1})
    other = make("momentum", frozen=["bottom"])
    before = weights(other)
    with pytest.raises(CheckpointError, match="of another model"):
        other.fit(DATA, callbacks=[Checkpoint(tmp_path)], **QUIET)
    assert not other.model.get_layer("bottom").trainable
    for one, two in zip(before, weights(other), strict=True):
        np.testing.assert_array_equal(one, two)
