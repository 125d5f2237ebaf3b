"""Horovod for Keras's backend, and a small model whose training on ranks is compared with one process's."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras.ops import convert_to_numpy as to_numpy

import hvdtrain.keras as hvd

os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"  # lets a test start one
hvd.init()


BATCH = 24  # of all ranks together; divides by 2 and by 3


class Kit:
    """The common part of the tests here."""

    backend = keras.backend.backend()
    # For what one process trains, to compare with: TensorFlow's tracing takes most of a test's time.
    untraced = {"run_eagerly": True} if backend == "tensorflow" else {}

    def data(self, batches: int = 2, seed: int = 0) -> tuple[Any, Any]:
        """Return inputs and targets, equal on all ranks; shapes (batches * BATCH, 5) and (batches * BATCH, 3)."""
        rng = np.random.default_rng(seed)
        count = batches * BATCH
        return rng.normal(size=(count, 5)).astype("float32"), rng.normal(size=(count, 3)).astype("float32")

    def shard(self, array: Any) -> Any:
        """Return this rank's rows, in batches of BATCH // size that together make the global batches."""
        local = BATCH // hvd.size()
        batches = array.reshape(-1, hvd.size(), local, *array.shape[1:])
        return batches[:, hvd.rank()].reshape(-1, *array.shape[1:])

    def model(self, seed: int = 1, units: int = 7, **options: Any) -> Any:
        """Return a model with weights that depend on `seed` alone."""
        initial = [keras.initializers.GlorotUniform(seed=seed + i) for i in range(2)]
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((5,)),
                layers.Dense(units, activation="tanh", kernel_initializer=initial[0], name="hidden", **options),
                layers.Dense(3, kernel_initializer=initial[1], name="head", dtype="float32"),
            ]
        )

    def alone(self, model: Any, optimizer: Any, epochs: int = 3, **options: Any) -> Any:
        """Train as one process on whole batches; return the model."""
        x, y = self.data()
        model.compile(optimizer=optimizer, **{"loss": "mse", **self.untraced, **options})
        model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)
        return model

    def together(self, model: Any, optimizer: Any, epochs: int = 3, callbacks: Any = None, **options: Any) -> Any:
        """Train on this rank's shard, with `optimizer` as given; return the model."""
        x, y = self.data()
        model.compile(optimizer=optimizer, **{"loss": "mse", **options})
        local = BATCH // hvd.size()
        model.fit(
            self.shard(x), self.shard(y), batch_size=local, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks
        )
        return model

    def flat(self, thing: Any) -> Any:
        """Return all weights of a model, or the values of a list of variables, as one vector; that vector as it is."""
        if isinstance(thing, np.ndarray):
            return thing
        variables = thing if isinstance(thing, list) else thing.weights
        return np.concatenate([np.asarray(to_numpy(v), np.float64).ravel() for v in variables])

    def digest(self, variables: list[Any]) -> str:
        """Return a hash of the values' bits."""
        total = hashlib.sha256()
        for variable in variables:
            total.update(np.ascontiguousarray(to_numpy(variable)).tobytes())
        return total.hexdigest()

    def assert_same_everywhere(self, model: Any) -> None:
        """Check that weights and optimizer state are equal on all ranks, bit for bit."""
        # Not the accumulators: they hold local gradients, and between them zeros of either sign.
        state = [v for v in model.optimizer.variables if "gradient_accumulator" not in v.path]
        mine = self.digest([*model.weights, *state])
        assert hvd.allgather_object(mine) == [mine] * hvd.size()

    def assert_close(self, model: Any, reference: Any, tolerance: float = 1e-6) -> None:
        """Check that weights, of models or as `flat` returned them, differ by at most `tolerance`."""
        assert np.abs(self.flat(model) - self.flat(reference)).max() <= tolerance

    def count_calls(self, monkeypatch: Any) -> list[str]:
        """Return a list that grows by one entry for each reduction that really runs on this rank."""
        calls: list[str] = []
        for place, function in _native_functions():
            monkeypatch.setattr(place, function, _counted(getattr(place, function), calls))
        return calls


def _counted(original: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(original.__name__)
        return original(*args, **kwargs)

    return counted


def _native_functions() -> list[tuple[Any, str]]:
    if Kit.backend == "tensorflow":
        from horovod.tensorflow import mpi_ops

        return [(mpi_ops, "_allreduce"), (mpi_ops, "_grouped_allreduce")]
    import horovod.torch as native

    return [(native, "allreduce_async_"), (native, "allreduce_async"), (native, "allreduce")]


@pytest.fixture
def kit() -> Kit:
    return Kit()


@pytest.fixture(autouse=True)
def _clean_state() -> Any:
    yield
    keras.config.set_dtype_policy("float32")
    keras.utils.clear_session(free_memory=False)
