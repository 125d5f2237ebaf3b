"""The tests' model and a reference loop in plain Keras; torch_kit.py is its twin."""

from __future__ import annotations

import importlib
import sys

import keras
import numpy as np
from keras_jit import JIT

import hvdtrain
from hvdtrain.distributed.launch_environment import engine_for
from hvdtrain.errors import DesyncError

LR, MOMENTUM, DECAY = 0.1, 0.9, 0.01


def model(seed=0, *, hidden=16):
    net = keras.Sequential([keras.Input((6,)), keras.layers.Dense(hidden, activation="tanh"), keras.layers.Dense(3)])
    generator = np.random.default_rng(seed)
    net.set_weights([generator.normal(size=w.shape).astype(np.float32) * 0.3 for w in net.get_weights()])
    return net


def optimizer(clip_norm=None):
    return keras.optimizers.SGD(LR, momentum=MOMENTUM, weight_decay=DECAY, global_clipnorm=clip_norm)


def optimizer_of(net):
    return keras.optimizers.SGD(LR, momentum=MOMENTUM, weight_decay=DECAY)


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def trainer(net, **options):
    options.setdefault("optimizer", optimizer_of(net))
    options.setdefault("loss", loss())
    return hvdtrain.Trainer(net, metrics=["accuracy"], **options)


def weights(net):
    return [np.array(w) for w in net.get_weights()]


everything = weights  # running statistics are among them


def trained(net):
    return [np.array(keras.ops.convert_to_numpy(v)) for v in net.trainable_variables]


def optimizer_steps(net, groups, *, clip_norm=None):
    """Train in one process: each group is a list of (x, y) whose samples all weigh the same in one step."""
    eagerly = keras.backend.backend() == "tensorflow"  # whose tracing takes most of a test's time
    net.compile(optimizer=optimizer(clip_norm), loss=loss(), jit_compile=JIT, run_eagerly=eagerly)
    for group in groups:
        net.train_on_batch(np.concatenate([x for x, _ in group]), np.concatenate([y for _, y in group]))


def outputs(net, x):
    return np.array(net.predict_on_batch(x))


def unequal_iterable(x, y, *, rank):
    """Return a dataset that can only be iterated, with rank-dependent length, in batches of 4."""

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return -(-len(x) // 4)

        def __getitem__(self, index):
            rows = slice(4 * index, 4 * index + 4)
            return x[rows], y[rows]

    return Batches()


def timeline():
    return importlib.import_module(f"horovod.{engine_for('keras')}")


def set_first_weight(net, value):
    first = net.get_weights()
    first[0][:] = value
    net.set_weights(first)


def batch_norm_model():
    norm = keras.layers.BatchNormalization()
    net = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), norm, keras.layers.Dense(3)])
    return net, lambda: [np.array(w) for w in norm.get_weights()[2:]]


def norm_model():
    layers = keras.layers
    net = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8), layers.BatchNormalization(), layers.ReLU(), layers.Dense(3)]
    )
    generator = np.random.default_rng(0)
    for variable in net.trainable_variables:
        variable.assign(generator.normal(size=variable.shape).astype(np.float32) * 0.3)
    return net


def first_name(net):
    return net.trainable_variables[0].path


def adam_of(net):
    return keras.optimizers.AdamW(LR, weight_decay=DECAY)


def loss_scale(run):
    return float(keras.ops.convert_to_numpy(run.model.optimizer.dynamic_scale))


def set_loss_scale(run, scale):
    run.model.optimizer.build(run.model.trainable_variables)
    run.model.optimizer.dynamic_scale.assign(scale)


def random_model():
    """A model that draws at random, keeps statistics of its own on each rank, and whose weights depend on both."""
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((6,)), layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(3)]
    )


def deep_model(on_gradient):
    """A model of many small tensors; within a step of Keras's nothing can be told of its gradients."""
    keras.utils.set_random_seed(0)
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(None)
    layers = [keras.layers.Dense(128, activation="tanh") for _ in range(9)]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])


def seed(number):
    keras.utils.set_random_seed(number)
    if "tensorflow" in sys.modules:  # which orders tf.data's shuffle too, and must be equal on all ranks
        sys.modules["tensorflow"].random.set_seed(None)


def own_loop(net, x, y, *, batch_size, epochs):
    """Contract C, as a user writes it."""
    net, optimizer, batches = hvdtrain.prepare(net, optimizer_of(net), (x, y), batch_size=batch_size)
    net.compile(optimizer=optimizer, loss=loss(), jit_compile=JIT)
    # Keras warns of shuffle=True, its default, for a tf.data.Dataset that it does not see shuffled.
    net.fit(batches, epochs=epochs, verbose=0, shuffle=keras.backend.backend() != "tensorflow")


def prepare_rows(net, x, y, **options):
    return hvdtrain.prepare(net, optimizer_of(net), (x, y), batch_size=4, **options)


def prepare_stream(net):
    return hvdtrain.prepare(net, optimizer_of(net), unequal_iterable(np.zeros((4, 6)), np.zeros(4), rank=0))


def datasets(num_samples):
    """Every kind of data that Keras users bring, over samples 0 to num_samples - 1."""
    import tensorflow as tf
    import torch

    x = np.arange(num_samples, dtype=np.float32)[:, None]
    rows = tf.data.Dataset.from_tensor_slices((x, x))
    loader = torch.utils.data.DataLoader(list(zip(x, x, strict=True)), batch_size=3, shuffle=True)
    return {
        "arrays": (x, x),
        "tf.data": rows.batch(3),
        "tf.data, shuffled": rows.shuffle(100, seed=1).batch(3).prefetch(2),
        "tf.data of unknown length": rows.filter(lambda x, y: True).batch(2),
        "PyDataset": unequal_iterable(x, x, rank=0),
        "torch DataLoader": loader,
    }


def streams(x, y):
    """Data that can only be iterated, in batches of 4."""
    import tensorflow as tf

    rows = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(100, seed=1).batch(4)
    return {"tf.data": rows, "other": unequal_iterable(x, y, rank=0)}


def check_random_orders(seen_by_all, *, num_samples):
    """tf.data's shuffle without a seed is another one on each rank: refused."""
    import pytest
    import tensorflow as tf

    rows = tf.data.Dataset.range(num_samples).map(lambda i: (i[None], i))
    with pytest.raises(ValueError, match=r"needs a seed.*rank [01]"):
        seen_by_all(rows.shuffle(100).batch(3))
    tf.random.set_seed(hvdtrain.init().rank)  # which tf.data adds to every shuffle's own
    with pytest.raises(DesyncError, match="seeds of shuffle"):
        seen_by_all(rows.shuffle(100, seed=1).batch(3))
    tf.random.set_seed(None)


def prepare_arrays(net, x, y):
    return hvdtrain.prepare(net, optimizer_of(net), (x, y))
