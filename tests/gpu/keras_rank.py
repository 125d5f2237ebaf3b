"""One rank that reduces, on Keras; test_keras.py starts it with KERAS_BACKEND. Takes where the weights are to be.

The drop-in and the Trainer against plain Keras, for SGD with clipping, for AdamW, in bfloat16, and with accumulation.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import keras
import numpy as np

import hvdtrain
import hvdtrain.keras as hvd

SAMPLES, BATCH, EPOCHS = 48, 8, 2
OPTIMIZERS = {
    "SGD, clipped": lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01, global_clipnorm=0.1),
    "AdamW": lambda: keras.optimizers.AdamW(1e-3, weight_decay=0.01),
    "accumulated": lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2),
}


def data() -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(SAMPLES, 6)).astype(np.float32), generator.integers(0, 3, SAMPLES)


def model(dtype: str = "float32") -> Any:
    layers = [keras.layers.Dense(300, activation="tanh", dtype=dtype), keras.layers.Dense(3, dtype=dtype)]
    net = keras.Sequential([keras.Input((6,)), *layers])
    generator = np.random.default_rng(1)
    net.set_weights([generator.normal(size=w.shape).astype(np.float32) * 0.3 for w in net.get_weights()])
    return net


def loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fit(optimizer: Any, dtype: str = "float32") -> Any:
    net = model(dtype)
    net.compile(optimizer=optimizer, loss=loss(), jit_compile=False)
    net.fit(*data(), batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    return net


def difference(ours: Any, theirs: Any) -> float:
    pairs = zip(ours.get_weights(), theirs.get_weights(), strict=True)
    return float(np.max([np.abs(a - b).max() / np.abs(b).max() for a, b in pairs]))


def trainer(world: hvdtrain.World) -> float:
    ours, theirs = model(), model()
    made = hvdtrain.Trainer(ours, optimizer=OPTIMIZERS["AdamW"](), loss=loss(), seed=0)
    made.fit(data(), epochs=EPOCHS, batch_size=BATCH, progress=False, run_dir=None)
    theirs.compile(optimizer=OPTIMIZERS["AdamW"](), loss=loss(), jit_compile=False)
    x, y = data()
    for epoch in range(EPOCHS):
        order = hvdtrain.sampling.shard_indices(SAMPLES, rank=0, size=world.size, epoch=epoch, seed=0)
        for start in range(0, SAMPLES, BATCH):
            theirs.train_on_batch(x[order[start : start + BATCH]], y[order[start : start + BATCH]])
    return difference(ours, theirs)


def device_of(net: Any) -> str:
    value = net.trainable_variables[0].value
    if keras.backend.backend() == "torch":
        return str(value.device.type)
    return "cpu" if next(iter(value.devices())).platform == "cpu" else "cuda"


def main() -> None:
    world = hvdtrain.init("keras")
    hvd.init()
    assert os.environ["HVDTRAIN_REDUCE_ALONE"] == "1"
    assert device_of(model()) == sys.argv[1], device_of(model())
    sent = []
    native = sys.modules["horovod.torch"]
    for name in ("allreduce_async_", "grouped_allreduce_async_"):
        call = getattr(native.mpi_ops, name)
        note = lambda tensor, *a, _call=call, **o: sent.append(tensor) or _call(tensor, *a, **o)  # noqa: E731
        setattr(native, name, note)
        setattr(native.mpi_ops, name, note)
    found = {}
    for name, make in OPTIMIZERS.items():
        found[name] = difference(fit(hvd.DistributedOptimizer(make())), fit(make()))
    assert sent, "nothing was reduced"
    where = {tensor.device.type for each in sent for tensor in (each if isinstance(each, (list, tuple)) else [each])}
    # JAX has no Horovod of its own: its gradients travel as host arrays.
    assert where == {sys.argv[1] if keras.backend.backend() == "torch" else "cpu"}, where
    found["Trainer"] = trainer(world)
    for name, error in found.items():
        assert error <= 1e-4, f"{name}: {error:.1e}"
    mixed = OPTIMIZERS["SGD, clipped"]
    error = difference(fit(hvd.DistributedOptimizer(mixed()), "mixed_bfloat16"), fit(mixed(), "mixed_bfloat16"))
    assert error <= 2e-2, f"mixed_bfloat16: {error:.1e}"
    print("equal to plain Keras:", ", ".join(f"{name} {error:.1e}" for name, error in found.items()))


if __name__ == "__main__":
    main()
