"""The script that tests/faults kills while it trains: training.py FRAMEWORK FOLDER STEP_S [WORD ...].

It trains three epochs with a checkpoint often.
With the word "fixed" it draws nothing at random, with "validating" it validates within epochs. With the name of a
strategy ranks synchronize as it says, with "unequal" they take unequal parts of a step. With "cutoff" rank 1 stalls now
and then, and steps close early; or they close as the file record.json says.

It says which process each rank is, and in the end what everything comes to, bit for bit.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import hvdtrain
from hvdtrain.callbacks import Callback, Checkpoint

FRAMEWORK, FOLDER, STEP_S = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
GLOBAL_BATCH, EPOCHS, SAMPLES, SEED = 16, 3, 250, 11
HELD_STEP = 45  # from here on, near the end, it waits while there is a file "hold": for whoever has yet to kill it
HELD_VALIDATION = 20  # in the validation after this step it waits while there is a file "hold-validation"
VALIDATE_EVERY = 5 if "validating" in sys.argv else None
TIMES = {"samples_per_s", "seconds"}
STRATEGIES = {"LocalSGD": hvdtrain.LocalSGD(5), "DiLoCo": hvdtrain.DiLoCo(5), "Delayed": hvdtrain.Delayed()}
SYNC = next((STRATEGIES[word] for word in sys.argv if word in STRATEGIES), None)

RECORD = FOLDER / "record.json"
CUTOFF = {}
if "cutoff" in sys.argv:
    CUTOFF = {"cutoff": json.loads(RECORD.read_text()) if RECORD.exists() else 0.5, "accumulate": 2}
BATCH = itertools.count()
BATCHES = CUTOFF.get("accumulate", 1)

world = hvdtrain.init("torch" if FRAMEWORK == "torch" else "keras")
(FOLDER / f"pid-{world.rank}").write_text(str(os.getpid()))
generator = np.random.default_rng(0)
x = generator.normal(size=(SAMPLES, 6)).astype(np.float32)
y = (x.sum(1) > 0).astype(np.int64)


def torch_trainer():
    import torch

    torch.manual_seed(SEED + world.rank)
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 64), torch.nn.ReLU(), torch.nn.Dropout(DROPOUT), torch.nn.Linear(64, 2)
    )
    if CUTOFF and world.rank == 1 and not RECORD.exists():
        net.register_forward_pre_hook(lambda *_: time.sleep(0.05 * (next(BATCH) % 5 == 0)))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    loss = torch.nn.CrossEntropyLoss()
    return hvdtrain.Trainer(net, optimizer=optimizer, loss=loss, metrics=["accuracy"], sync=SYNC, **CUTOFF)


def keras_trainer():
    import keras

    keras.utils.set_random_seed(SEED + world.rank)
    layers = keras.layers
    net = keras.Sequential(
        [keras.Input((6,)), layers.Dense(64, activation="relu"), layers.Dropout(DROPOUT), layers.Dense(2)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return hvdtrain.Trainer(net, optimizer=keras.optimizers.Adam(0.01), loss=loss, metrics=["accuracy"])


class Pace(Callback):
    """Takes as long for a step as it is told, and says that it has come to one."""

    def on_step_end(self, trainer, step):
        (FOLDER / f"step-{trainer.world.rank}").write_text(str(trainer.global_step))
        time.sleep(STEP_S)
        while trainer.global_step >= HELD_STEP and (FOLDER / "hold").exists():
            time.sleep(0.01)

    def on_validation_step_end(self, trainer, step):
        held = FOLDER / "hold-validation"
        if trainer.global_step == HELD_VALIDATION and step == 1 and held.exists():
            (FOLDER / f"validating-{trainer.world.rank}").touch()
            while held.exists():
                time.sleep(0.01)


# What is drawn differs with the number of ranks: a run that changes it draws nothing.
DROPOUT = 0.0 if "fixed" in sys.argv else 0.3
trainer = torch_trainer() if FRAMEWORK == "torch" else keras_trainer()
history = trainer.fit(
    (x, y),
    validation=(x[:50], y[:50]),
    epochs=EPOCHS,
    batch_size=GLOBAL_BATCH // world.size // BATCHES,
    validate_every=VALIDATE_EVERY,
    balance=[3, 1] if "unequal" in sys.argv else None,
    callbacks=[Pace(), Checkpoint(FOLDER / "checkpoints", every_steps=2)],
    progress=False,
)
state = trainer.state()
if world.is_root:
    digest = hashlib.sha256()
    for name in sorted(state.arrays):
        digest.update(name.encode() + np.ascontiguousarray(state.arrays[name]).tobytes())
    end = {
        "sha256": digest.hexdigest(),
        "history": {name: values for name, values in history.items() if name not in TIMES},
        "validations": history.validations,
        "cutoffs": history.cutoffs,
        "weights": {name: state.arrays[name].ravel().tolist() for name in sorted(state.arrays) if "model." in name},
    }
    (FOLDER / "end.json").write_text(json.dumps(end))
