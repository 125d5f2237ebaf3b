"""Elastic states of a loop with a tape, and Horovod's names."""

from __future__ import annotations

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.tensorflow as hvd

pytestmark = [pytest.mark.world_size(2, 3), pytest.mark.in_graphs]


def keras_state():
    """Return a state whose model and optimizer differ between ranks, and its variables."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01 * (1 + hvd.rank()))
    return hvd.elastic.TensorFlowKerasState(model, optimizer, batch=hvd.rank()), lambda: [
        *model.variables,
        *optimizer.variables,
    ]


def plain_state():
    them = [tf.Variable(np.full(3, 1.0 + hvd.rank())), keras.Variable(np.full(2, 5.0 + hvd.rank()))]
    return hvd.elastic.TensorFlowState(variables=them, batch=hvd.rank()), lambda: them


@pytest.mark.parametrize("make", [keras_state, plain_state])
def test_a_run_begins_with_the_roots_values_and_a_restore_returns_to_the_commit(kit, make):
    state, variables = make()

    @hvd.elastic.run
    def train(state):
        kit.assert_same_everywhere(variables())
        assert state.batch == 0
        state.batch = 7
        state.commit()
        committed = kit.digest(variables())
        state.batch = 8
        for variable in variables():
            variable.assign(variable + tf.cast(1, variable.dtype))
        assert kit.digest(variables()) != committed
        state.restore()
        assert (kit.digest(variables()), state.batch) == (committed, 7)
        return "done"

    assert train(state) == "done"


def test_what_is_tensorflow_1s_is_refused():
    with pytest.raises(ValueError, match="no global variables"):
        hvd.elastic.TensorFlowState()
    with pytest.raises(ValueError, match="Sessions are TensorFlow 1's"):
        hvd.elastic.TensorFlowState([tf.Variable(1.0)], session=3)
    with pytest.raises(ValueError, match="backend is for TensorFlow 1"):
        hvd.elastic.TensorFlowKerasState(keras.Sequential([keras.Input((1,))]), backend=3)


def test_a_sharded_state_is_refused_without_its_optimizer():
    from hvdtrain.keras import DistributedOptimizer

    optimizer = DistributedOptimizer(keras.optimizers.Adam(), shard_state=True)
    optimizer.build([keras.Variable(np.zeros(3))])
    with pytest.raises(ValueError, match="Use TensorFlowKerasState"):
        hvd.elastic.TensorFlowState(optimizer.variables)


def test_every_public_name_of_horovod_is_here_with_its_order_of_arguments():
    import horovod.tensorflow as native

    public = [name for name in dir(native) if not name.startswith("_")]
    names = {name for name in public if not inspect.ismodule(getattr(native, name))}
    assert names <= set(dir(hvd))
    assert {"TensorFlowKerasState", "TensorFlowState", "run"} <= set(dir(hvd.elastic))
    for name in sorted(names):
        ours, theirs = getattr(hvd, name), getattr(native, name)
        if not inspect.isfunction(theirs) or name in ("init", "shutdown", "check_extension") or name.endswith("_op"):
            continue
        wanted = list(inspect.signature(theirs).parameters)
        assert list(inspect.signature(ours).parameters)[: len(wanted)] == wanted, name
    for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product"):
        assert getattr(hvd, name) == getattr(native, name)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = hvd.nonsense


def test_scripts_may_let_every_gpus_memory_grow_after_init(monkeypatch):
    """TensorFlow refuses what would change a setting once it runs. Horovod's examples set this for all GPUs."""
    from hvdtrain.keras.collectives import pick_device

    grown = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["first", "second"])
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda device, kind: None)
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda device, on: grown.append(device))
    pick_device(1)
    assert grown == ["first", "second"]


def test_modules_of_horovods_names_can_be_imported():
    import hvdtrain.tensorflow.keras as hvd_keras
    from hvdtrain.tensorflow.compression import Compression
    from hvdtrain.tensorflow.functions import broadcast_object
    from hvdtrain.tensorflow.mpi_ops import size

    assert hvd_keras.__name__ == "hvdtrain.keras"
    assert Compression.fp16 is hvd.Compression.fp16
    assert broadcast_object(hvd.rank(), root_rank=1) == 1
    assert size() == hvd.size()
