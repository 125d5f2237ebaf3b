"""The memory that a rank says it holds of a Keras model, and what an error says of it."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvdtrain

WEIGHTS = 4 * (64 * 256 + 256 + 256 * 8 + 8)  # bytes


def fit(**options):
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256), keras.layers.Dense(8)])
    trainer = hvdtrain.Trainer(model, optimizer="adam", loss="mse", **options)
    x = np.ones((16, 64), np.float32)
    trainer.fit((x, x[:, :8]), batch_size=4, progress=False, run_dir=None)
    return trainer.memory


@pytest.mark.world_size(2)
@pytest.mark.every_backend
def test_a_keras_model_is_counted_by_its_variables():
    memory = fit(compression="topk:0.5")
    assert memory["buckets"] == pytest.approx(WEIGHTS, rel=0.1)  # the errors of the gradients
    assert (memory["weights"], memory["gradients"]) == (WEIGHTS, WEIGHTS)
    assert memory["optimizer"] == pytest.approx(2 * WEIGHTS, abs=64)  # and a few counts
    assert memory["activations"] is None or memory["activations"] >= 0


@pytest.mark.world_size(2)
def test_a_sharded_state_counts_the_part_of_a_rank():
    memory = fit(shard="optimizer")
    assert memory["weights"] == WEIGHTS
    assert memory["optimizer"] <= WEIGHTS + 4 * 2 * 4 * 64 + 64  # four weights of two slots, rounded to 64 numbers


class FailingModel(keras.Sequential):
    def train_step(self, *args):
        raise MemoryError("Unable to allocate 2.00 KiB for an array")


@pytest.mark.world_size(2)
@pytest.mark.every_backend
def test_an_error_of_memory_names_what_keras_can_do():
    model = FailingModel([keras.Input((64,)), keras.layers.Dense(8)])
    trainer = hvdtrain.Trainer(model, optimizer="sgd", loss="mse")
    x = np.ones((16, 64), np.float32)
    with pytest.raises(MemoryError) as caught:
        trainer.fit((x, x[:, :8]), batch_size=4, progress=False, run_dir=None)
    note = str(caught.value).rpartition("\n")[2]
    assert note.startswith(f"hvdtrain: memory of rank {trainer.world.rank}: ")
    assert "weights 2.08 kB" in note
    assert "micro_batch" not in note
    assert 'shard="gradients"' not in note
