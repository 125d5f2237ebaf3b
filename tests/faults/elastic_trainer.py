"""`Trainer.fit` in an elastic job, and alone with the same global batches: FOLDER SCENARIO FRAMEWORK [MORE].

If MORE is a number of seconds, these end the run and no number of epochs does. If it is "local", ranks step alone and
synchronize after every two steps. If it is "cutoff", steps may close early; here none does. "optimizer" and "gradients"
are what is sharded, without checkpoints after ",unsaved". "topk:0.1" is a compression.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from contextlib import suppress
from typing import Any

import numpy as np
from elastic_job import FOLDER, HOST, SCENARIO, changes_hosts, dies, say

import hvdtrain
from hvdtrain.callbacks import Callback, Checkpoint, Logger
from hvdtrain.training import elastic
from hvdtrain.training.checkpointing import Snapshot

FRAMEWORK = sys.argv[3]
MORE, _, SAVED = sys.argv[4].partition(",") if len(sys.argv) > 4 else ("", "", "")
SYNC = hvdtrain.LocalSGD(2) if MORE == "local" else None
CUTOFF = 1.0 if MORE == "cutoff" else None
HOW: dict[str, Any] = {"shard": MORE} if MORE in ("optimizer", "gradients") else {}
HOW |= {"compression": MORE} if MORE.startswith("topk") else {}
SECONDS = float(MORE) if MORE.isdigit() else None
SAMPLES, BATCH, EPOCHS, COMMIT_EVERY, FAULT_STEP = 96, 4, 3, 3, 7
# Global batches before and after what happens, and the step from which the run goes on.
BEFORE, AFTER, GOES_ON_AT = (BATCH, 2 * BATCH, 7) if SCENARIO.startswith("grow") else (2 * BATCH, BATCH, 6)

world = hvdtrain.init(FRAMEWORK)
generator = np.random.default_rng(0)
x = generator.normal(size=(SAMPLES, 6)).astype(np.float32)
y = (x.sum(1) > 0).astype(np.int64)


def make() -> hvdtrain.Trainer:
    if FRAMEWORK == "torch":
        import torch

        torch.manual_seed(5 + (world.rank if HOST != "alone" else 0))
        net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
        optimizer, loss = torch.optim.Adam(net.parameters(), lr=0.01), torch.nn.CrossEntropyLoss()
        return hvdtrain.Trainer(
            net, optimizer=optimizer, loss=loss, metrics=["accuracy"], sync=SYNC, cutoff=CUTOFF, **HOW
        )
    import keras

    keras.utils.set_random_seed(5 + (world.rank if HOST != "alone" else 0))
    layers = keras.layers
    net = keras.Sequential([keras.Input((6,)), layers.Dense(16, activation="tanh"), layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return hvdtrain.Trainer(net, optimizer=keras.optimizers.Adam(0.01), loss=loss, metrics=["accuracy"], **HOW)


def place(trainer: hvdtrain.Trainer) -> dict[str, Any]:
    arrays = trainer.state().arrays
    found = hashlib.sha256(b"".join(name.encode() + arrays[name].tobytes() for name in sorted(arrays)))
    return {"rank": world.rank, "size": world.size, "step": trainer.global_step, "digest": found.hexdigest()}


class FitState(elastic.FitState):
    """Notes the training time of the epoch, up to the commit from which a round continues."""

    spent_s = 0.0

    def find(self, *, lr_factor: float) -> Snapshot | None:
        found = super().find(lr_factor=lr_factor)
        self.spent_s = found.meta["position"]["seconds"] if found is not None else 0.0
        commits.append(self)
        return found


def mean_error(trainer: hvdtrain.Trainer) -> list[float]:
    """Return the mean over ranks of what compression has left out of the gradients; a collective."""
    held = trainer._adapter.rank_state
    own = np.concatenate([held[name].ravel() for name in sorted(held) if name.startswith("mean.error")])
    return list(world.allreduce(own.astype(np.float64), "mean", name="errors"))


commits: list[FitState] = []
elastic.FitState = FitState


class Script(Callback):
    """Says where each round begins, and brings the scenario about."""

    def on_fit_begin(self, trainer: hvdtrain.Trainer) -> None:
        say("begin", spent_s=commits[-1].spent_s, **place(trainer))
        if HOST != "alone" and world.is_root and not SAVED:
            say("holds", own=json.loads((FOLDER / "checkpoints" / ".lock").read_text())["pid"] == os.getpid())

    def on_step_begin(self, trainer: hvdtrain.Trainer, step: int) -> None:
        if "compression" in HOW and trainer.global_step == GOES_ON_AT:
            say("errors", mean=mean_error(trainer), **place(trainer))
        if trainer.global_step == FAULT_STEP:
            dies(rank=world.rank, size=world.size)

    def on_step_end(self, trainer: hvdtrain.Trainer, step: int) -> None:
        if SECONDS:
            time.sleep(0.05)
        if SCENARIO == "grow-to-3" and world.size == 2:
            time.sleep(0.2)  # the time of steps decides how many pass before ranks hear from the root of new hosts
            say("step", **place(trainer))
        if trainer.global_step == FAULT_STEP and world.is_root and changes_hosts():
            while not commits[-1].hosts_have_changed:
                time.sleep(0.05)


class Log:
    """Says under which id the run is logged."""

    def open(self, run: Any) -> None:
        say("logs", id=run.id, step=run.global_step)

    def write(self, record: Any) -> None:
        pass

    def close(self, *, finished: bool) -> None:
        say("logged", finished=finished)


class PartEndedError(Exception):
    """The end of what one process does with the global batch of before."""


class Part(Callback):
    """Ends a run when it comes to a step."""

    def on_step_begin(self, trainer: hvdtrain.Trainer, step: int) -> None:
        if trainer.global_step == GOES_ON_AT:
            raise PartEndedError


def fit(*callbacks: Callback, batch_size: int = BATCH) -> hvdtrain.Trainer:
    trainer = make()
    limits = {"seconds": SECONDS} if SECONDS else {"epochs": EPOCHS}
    data = {"train": (x, y), "validation": (x[:30], y[:30]), "batch_size": batch_size}
    trainer.fit(**data, **limits, callbacks=callbacks, progress=False)
    return trainer


def fit_alone() -> hvdtrain.Trainer:
    """Go on from a checkpoint of the step from which the elastic job goes on."""
    checkpoint = Checkpoint(FOLDER / "alone", every_steps=GOES_ON_AT, background=False)
    with suppress(PartEndedError):
        fit(Part(), checkpoint, batch_size=BEFORE)
    return fit(checkpoint, batch_size=AFTER)


if HOST == "alone":
    trainer = fit_alone()
else:
    saves = [] if SAVED else [Checkpoint(FOLDER / "checkpoints", every_steps=COMMIT_EVERY)]
    trainer = fit(Script(), Logger(Log()), *saves)
history = {name: values for name, values in trainer.history.items() if name not in ("seconds", "samples_per_s")}
weights = {name: array.ravel().tolist() for name, array in trainer.state().arrays.items() if "model." in name}
say("end", **place(trainer), seconds=sum(trainer.history["seconds"]), history=history, weights=weights)
