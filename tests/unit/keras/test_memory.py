"""What an out-of-memory error says of a Keras script without a Trainer, in one process."""

from __future__ import annotations

import weakref

import keras
import numpy as np
import pytest

import hvdtrain.keras as hvd
from hvdtrain.distributed.watchdog import tracebacks
from hvdtrain.keras import memory
from hvdtrain.telemetry import rank_memory

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(autouse=True)
def alone_in_script(monkeypatch):
    """Let nothing speak for this process, before and afterwards, and other tests' models not count."""
    rank_memory.forget()
    monkeypatch.setattr(memory, "_models", weakref.WeakSet())
    monkeypatch.setattr(memory, "_optimizers", weakref.WeakSet())
    yield
    rank_memory.forget()


def explained():
    """Return what is added to an error that ends this process."""
    error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 2147483648 bytes.")
    tracebacks.explain(error)
    return str(error).splitlines()[1]


def test_an_error_of_a_model_with_a_distributed_optimizer_says_what_takes_the_memory():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    x = np.ones((8, 4), np.float32)
    model.fit(x, x, verbose=0)
    note = explained()
    assert note.startswith("hvdtrain: memory of rank 0: activations 2.")
    assert "weights 144 B, gradients 112 B" in note
    assert note.endswith("computes a batch in parts, or keras.remat computes them again in backward")


def test_an_error_of_a_custom_loop_says_what_takes_the_memory():
    weights = [keras.Variable(np.ones((4, 4), np.float32))]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(momentum=0.9))
    optimizer.build(weights)
    assert "weights 64 B, gradients 64 B" in explained()
