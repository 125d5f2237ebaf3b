"""Where a Grid divides models, Keras's whole ones are refused."""

from __future__ import annotations

import keras
import pytest

import hvdtrain.keras
from hvdtrain.distributed import world as worlds
from hvdtrain.errors import HvdTrainError


@pytest.fixture
def divided(monkeypatch):
    world = worlds.SoloWorld()
    world.grid = "Grid(stages=2)"
    monkeypatch.setattr(worlds, "_world", world)


def test_an_optimizer_over_all_ranks_is_refused(divided):
    with pytest.raises(HvdTrainError, match=r"takes every rank's model for a whole one.* Received: Grid\(stages=2\)"):
        hvdtrain.keras.DistributedOptimizer(keras.optimizers.SGD(0.1))


def test_a_trainer_is_refused(divided):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with pytest.raises(HvdTrainError, match="A Trainer of a Keras model takes every rank's model"):
        hvdtrain.Trainer(model, optimizer="sgd", loss="mse")
