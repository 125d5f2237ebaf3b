"""Compare horovod.keras on Keras 3 with hvdtrain.keras. TensorFlow alone: Horovod's Keras knows no other."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvdtrain.keras as hvd

pytestmark = [
    pytest.mark.world_size(2),
    pytest.mark.in_graphs,
    pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="horovod.keras needs the TensorFlow backend"),
]


@pytest.fixture
def theirs():
    return pytest.importorskip("horovod.tensorflow.keras")


def test_theirs_trains_without_averaging_and_ours_averages(kit, theirs):
    digests = {}
    for name, module in (("theirs", theirs), ("ours", hvd)):
        model = kit.together(kit.model(), module.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9)))
        digests[name] = set(hvd.allgather_object(kit.digest(model.weights)))
    assert len(digests["theirs"]) == 2  # no error, no averaging
    assert len(digests["ours"]) == 1


def test_their_optimizer_forgets_its_state_and_ours_keeps_it(kit, theirs):
    trained = kit.alone(kit.model(), keras.optimizers.SGD(0.1, momentum=0.9), epochs=1)
    assert len(hvd.DistributedOptimizer(trained.optimizer).variables.copy()) == len(trained.optimizer.variables)
    assert not theirs.DistributedOptimizer(trained.optimizer).built


CALLBACKS = {
    "broadcast": lambda module: module.callbacks.BroadcastGlobalVariablesCallback(0),
    "warmup": lambda module: module.callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=1),
    "schedule": lambda module: module.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5),
    "metrics": lambda module: module.callbacks.MetricAverageCallback(),
    "best": lambda module: module.callbacks.BestModelCheckpoint(monitor="loss"),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_their_callbacks_raise_and_ours_work(kit, theirs, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((AttributeError, TypeError, ValueError)):
        kit.together(kit.model(), keras.optimizers.SGD(0.1), epochs=1, callbacks=[CALLBACKS[name](theirs)])
    kit.together(kit.model(), keras.optimizers.SGD(0.1), epochs=1, callbacks=[CALLBACKS[name](hvd)])


def test_their_variables_broadcast_raises_and_ours_works(kit):
    import horovod.tensorflow as native

    model = kit.model(seed=1 + hvd.rank())
    with pytest.raises(AttributeError):
        native.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(model.variables, root_rank=0)
    assert len(set(hvd.allgather_object(kit.digest(model.weights)))) == 1


def test_their_elastic_state_raises_and_ours_works(kit, theirs):
    model = kit.alone(kit.model(), keras.optimizers.SGD(0.1), epochs=1)
    with pytest.raises((TypeError, AttributeError)):
        theirs.elastic.KerasState(model, epoch=0)
    assert hvd.elastic.KerasState(model, epoch=0).epoch == 0


def test_their_load_model_gives_a_model_that_is_not_averaged(kit, theirs, tmp_path):
    kit.alone(kit.model(), keras.optimizers.SGD(0.1), epochs=1).save(tmp_path / "model.keras")
    x, y = kit.data()
    digests = {}
    for name, module in (("theirs", theirs), ("ours", hvd)):
        model = module.load_model(tmp_path / "model.keras")
        model.fit(kit.shard(x), kit.shard(y), batch_size=12, epochs=1, verbose=0)
        digests[name] = set(hvd.allgather_object(kit.digest(model.weights)))
    assert len(digests["theirs"]) == 2
    assert len(digests["ours"]) == 1


def test_an_argument_that_horovods_pages_name_and_keras_no_longer_has_is_ignored(kit):
    model = kit.model()
    model.compile(optimizer=hvd.DistributedOptimizer("sgd"), loss="mse", experimental_run_tf_function=False)
    assert np.isfinite(model.train_on_batch(*kit.data()))


def test_reductions_in_a_graph_write_over_nothing_that_is_read_again():
    """A reduction may write over its input, which saves a copy, only where nobody else reads that."""
    import tensorflow as tf

    native = pytest.importorskip("horovod.tensorflow")

    @tf.function
    def reduced(x):
        kept = x * 2.0  # read again after the reduction
        lost = x * 3.0  # read by nobody else
        alone = [native.allreduce(value, op=native.Sum, name=name) for value, name in ((kept, "kept"), (lost, "lost"))]
        group = native.grouped_allreduce([kept, x * 5.0], op=native.Sum, name="group")
        return *alone, *group, kept, x

    own = hvd.rank() + 1.0
    x = tf.fill([1000], own)
    expected = [factor * 3.0 for factor in (2, 3, 2, 5)] + [2 * own, own]  # ranks hold 1 and 2
    for _ in range(3):
        for got, want in zip(reduced(x), expected, strict=True):
            np.testing.assert_array_equal(got, np.full(1000, want))
    np.testing.assert_array_equal(x, np.full(1000, own))
