"""Bad arguments are refused by name, before anything trains."""

from __future__ import annotations

import pytest

keras = pytest.importorskip("keras")

import numpy as np  # noqa: E402

import hvdtrain.keras as hvd  # noqa: E402
from hvdtrain.keras import reduction  # noqa: E402
from hvdtrain.keras.reduction import GradientReduction  # noqa: E402
from hvdtrain.keras.variables import without_counters  # noqa: E402

pytestmark = pytest.mark.usefixtures("solo")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": 2}, "Average or hvd.Sum"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "gradient_predivide_factor"),
        ({"groups": 0}, "groups"),
        ({"groups": "all"}, "groups"),
        ({"compression": "fp12"}, "compression"),
        ({"compression": "topk:2"}, "compression"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        hvd.DistributedOptimizer(keras.optimizers.SGD(), **options)


def test_only_keras_optimizers_are_taken_and_only_once():
    with pytest.raises(TypeError, match="Keras 3 optimizer"):
        hvd.DistributedOptimizer(object())
    once = hvd.DistributedOptimizer("adam")
    assert isinstance(once, keras.optimizers.Adam)
    with pytest.raises(ValueError, match="already distributed"):
        hvd.DistributedOptimizer(once)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_bad_weight_is_refused(weight):
    with pytest.raises(ValueError, match="finite and >= 0"):
        hvd.DistributedOptimizer("sgd").set_batch_weight(weight)


def test_the_original_stays_unbuilt_and_plain():
    original = keras.optimizers.SGD(0.1, momentum=0.9)
    twin = hvd.DistributedOptimizer(original)
    twin.build([keras.Variable(np.zeros(2, "float32"))])
    assert not original.built
    assert len(original.variables) == 2
    assert len(twin.variables) == 3
    assert hvd.distributed_part(original) is None


def test_learning_rates_and_exclusions_survive():
    original = keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.1, 10), weight_decay=0.1)
    original.exclude_from_weight_decay(var_names=["bias"])
    twin = hvd.DistributedOptimizer(original)
    assert not twin._use_weight_decay(keras.Variable(np.zeros(1), name="bias"))
    assert keras.saving.serialize_keras_object(twin) == keras.saving.serialize_keras_object(original)


def test_accumulators_of_a_built_optimizer_stand_where_keras_puts_them():
    variable = keras.Variable(np.zeros(2, "float32"))
    built = keras.optimizers.Adam(0.1)
    built.build([variable])
    twin = hvd.DistributedOptimizer(built, backward_passes_per_step=3)
    fresh = keras.optimizers.Adam(0.1, gradient_accumulation_steps=3)
    fresh.build([variable])
    assert [v.path.split("/")[-1] for v in twin.variables] == [v.path.split("/")[-1] for v in fresh.variables]


def test_groups_cut_evenly_and_by_variable():
    variables = [keras.Variable(np.zeros(1, "float32")) for _ in range(5)]
    assert GradientReduction(groups=2).buckets(variables) == [[0, 1], [2, 3, 4]]
    assert GradientReduction(groups=9).buckets(variables) == [[0], [1], [2], [3], [4]]
    assert GradientReduction(groups=[[variables[3], variables[0]]]).buckets(variables) == [[0, 3], [1], [2], [4]]
    assert GradientReduction().buckets(variables) is None


def test_counters_in_paths_do_not_matter():
    assert without_counters("sequential_3/dense_12/kernel") == "sequential/dense/kernel"
    assert without_counters("conv2d/kernel") == "conv2d/kernel"


def test_globals_need_a_model():
    with pytest.raises(ValueError, match="no global variables"):
        hvd.broadcast_global_variables(0)


def test_warmup_needs_to_know_its_steps():
    callback = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1)
    callback.set_params({"steps": None})
    with pytest.raises(ValueError, match="steps_per_epoch"):
        callback.on_train_begin()


@pytest.mark.parametrize("name", ["none", "fp16", "bf16", "int8"])
def test_compression_may_be_a_name_as_for_the_trainer(name):
    by_name, by_object = (reduction.resolve(each) for each in (name, getattr(hvd.Compression, name)))
    assert type(by_name) is type(by_object)
    assert by_name.name == name
    hvd.DistributedOptimizer(keras.optimizers.SGD(), compression=name)
