"""A model whose mask reaches the loss trains as one process: batches weigh their time steps that are not masked."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras_jit import JIT

import hvdtrain
import hvdtrain.keras as hvd

pytestmark = pytest.mark.world_size(2, 3)

LENGTH, WORDS, BATCH = 7, 5, 12


def _data(samples, seed):
    generator = np.random.default_rng(seed)
    tokens = generator.integers(1, WORDS, (samples, LENGTH))
    tokens[np.arange(LENGTH) >= generator.integers(0, LENGTH + 1, (samples, 1))] = 0  # some have no token at all
    return tokens, (tokens + 1) % WORDS, generator.random((samples, LENGTH)).astype(np.float32)


def _model():
    model = keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            keras.layers.Embedding(WORDS, 4, mask_zero=True),
            keras.layers.SimpleRNN(6, return_sequences=True),
            keras.layers.Dense(WORDS, kernel_regularizer=keras.regularizers.L2(1e-3)),
        ]
    )
    generator = np.random.default_rng(0)
    model.set_weights([generator.normal(size=w.shape).astype(np.float32) * 0.5 for w in model.get_weights()])
    return model


_LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _together(data, held_out, **options):
    model = _model()
    how = {"loss": _LOSS, "metrics": ["accuracy"], **options}
    trainer = hvdtrain.Trainer(model, optimizer=keras.optimizers.SGD(0.3, momentum=0.9), **how)
    batch_size = BATCH // hvd.size() // options.get("accumulate", 1)
    shown = {"validation": held_out, "epochs": 2, "batch_size": batch_size, "progress": False}
    history = trainer.fit(data, **shown)
    return model, history


def _alone(data, held_out, accumulate):
    """Train with the samples of each step that all ranks take, in plain Keras."""
    from hvdtrain.data import sharding

    model = _model()
    model.compile(keras.optimizers.SGD(0.3, momentum=0.9), loss=_LOSS, metrics=["accuracy"], jit_compile=JIT)
    logs = {"loss": [], "accuracy": [], "val_loss": [], "val_accuracy": []}
    for epoch in range(2):
        order = sharding.shard(len(data[0]), rank=0, size=1, epoch=epoch, seed=0)
        model.reset_metrics()
        keep, model.reset_metrics = model.reset_metrics, lambda: None
        for begin in range(0, len(order), BATCH):
            rows = np.asarray(order[begin : begin + BATCH])
            found = model.train_on_batch(*(each[rows] for each in data), return_dict=True)
        del model.reset_metrics
        keep()
        held = model.evaluate(*held_out[:2], sample_weight=held_out[2] if len(held_out) > 2 else None, verbose=0,
                              batch_size=BATCH // accumulate, return_dict=True)  # fmt: skip
        for name in ("loss", "accuracy"):
            logs[name].append(float(found[name]))
            logs[f"val_{name}"].append(float(held[name]))
    return model, logs


@pytest.mark.three_ranks
@pytest.mark.parametrize(
    ("weighed", "accumulate"), [(False, 1), pytest.param(True, 1, marks=pytest.mark.every_backend), (True, 2)]
)
def test_a_model_with_a_mask_trains_as_one_process(kit, weighed, accumulate):
    data, held_out = (_data(number, seed)[: 2 + weighed] for number, seed in ((55, 1), (20, 2)))
    model, history = _together(data, held_out, accumulate=accumulate)
    expected, logs = _alone(data, held_out, accumulate)
    kit.assert_close(model, expected)
    for name, values in logs.items():
        assert history[name] == pytest.approx(values, rel=2e-5), name
    kit.assert_same_everywhere(model)
