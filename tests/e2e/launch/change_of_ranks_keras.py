"""Train a Keras model with its optimizer state in shards: FOLDER MODE.

save: ranks train from the beginning, and are stopped in the middle of an epoch. Rank 0 writes the order of samples.
resume: other ranks, or one process, resume their checkpoint, with the same global batches.
plain: Keras alone trains from the beginning, and then again from the checkpoint.

Each writes the weights and the optimizer state before each step from there on, and at the end. Gradients are whole
numbers, so that sums over samples and ranks are exact, and have the same bits for any number of ranks.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np

FOLDER, MODE = Path(sys.argv[1]), sys.argv[2]
SAMPLES, GLOBAL_BATCH, STOP, EPOCHS = 48, 12, 6, 3
STEPS = SAMPLES // GLOBAL_BATCH
UNITS = (147, 3, 1)  # parts of uneven lengths, and ranks without a part

generator = np.random.default_rng(0)
x = generator.integers(-2, 3, (SAMPLES, 20)).astype(np.float32)
y = 12 * generator.integers(-1, 2, (SAMPLES, sum(UNITS))).astype(np.float32)  # a rank's mean is over 4, 6 or 12 samples


def loss(targets: Any, outputs: Any) -> Any:
    """Return a loss whose gradient is whole numbers: it does not depend on the weights."""
    return keras.ops.sum(targets * outputs, axis=-1)


def make() -> tuple[keras.Model, dict[str, Any]]:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((x.shape[1],))
    net = keras.Model(inputs, keras.layers.Concatenate()([keras.layers.Dense(units)(inputs) for units in UNITS]))
    return net, {"optimizer": keras.optimizers.AdamW(0.01, weight_decay=0.1, amsgrad=True), "loss": loss}


def on_ranks() -> None:
    import hvdtrain
    from hvdtrain.callbacks import Callback, Checkpoint
    from hvdtrain.data.sharding import EpochOrder

    world, found = hvdtrain.init(), dict[str, Any]()

    class StoppedError(Exception):
        """The end of the first part."""

    class Record(Callback):
        def on_step_begin(self, trainer: hvdtrain.Trainer, step: int) -> None:
            if trainer.global_step >= STOP:
                record(trainer)
                if MODE == "save":
                    raise StoppedError

    def record(trainer: hvdtrain.Trainer) -> None:
        arrays = trainer.state().copied().arrays
        for group in ("model", "optimizer"):
            names = sorted(name for name in arrays if name.startswith(f"{group}."))
            found.update({f"{trainer.global_step:02d}/{group}/{i}": arrays[name] for i, name in enumerate(names)})

    net, options = make()
    trainer = hvdtrain.Trainer(net, **options, shard="optimizer")
    with suppress(StoppedError):
        trainer.fit(
            (x, y), epochs=EPOCHS, batch_size=GLOBAL_BATCH // world.size, progress=False, run_dir=None,
            callbacks=[Checkpoint(FOLDER / "run", every_steps=STOP), Record()],
        )  # fmt: skip
        record(trainer)
    if world.is_root:
        np.savez(FOLDER / f"{MODE}-{world.size}.npz", **found)
        if MODE == "save":
            orders = [EpochOrder(SAMPLES, epoch=epoch).at(np.arange(SAMPLES)) for epoch in range(EPOCHS)]
            np.save(FOLDER / "order.npy", np.concatenate(orders))


def in_keras_alone() -> None:
    from safetensors.numpy import load_file

    batches = np.load(FOLDER / "order.npy").reshape(-1, GLOBAL_BATCH)
    for name, first in (("straight", 0), ("plain", STOP)):
        net, options = make()
        net.compile(**options)
        optimizer, found = net.optimizer, dict[str, Any]()
        optimizer.build(net.trainable_variables)
        if first:
            saved = FOLDER / "run" / f"epoch-{first // STEPS:06d}-step-{first % STEPS:08d}"
            weights, state = (load_file(saved / f"{group}.safetensors") for group in ("model", "optimizer"))
            net.set_weights([weights[each] for each in sorted(weights)])
            for variable, each in zip(optimizer.variables, sorted(state), strict=True):
                variable.assign(state[each])
        for step, batch in enumerate([*batches, None]):
            if step >= STOP:
                groups = {"model": net.weights, "optimizer": optimizer.variables}
                values = {f"{group}/{i}": v for group, variables in groups.items() for i, v in enumerate(variables)}
                found |= {f"{step:02d}/{key}": keras.ops.convert_to_numpy(v) for key, v in values.items()}
            if step >= first and batch is not None:
                net.train_on_batch(x[batch], y[batch])
        np.savez(FOLDER / f"{name}.npz", **found)
    assert not any(name.split(".")[0] == "hvdtrain" for name in sys.modules)


in_keras_alone() if MODE == "plain" else on_ranks()
