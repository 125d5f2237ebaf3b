"""Train from a checkpoint of another number of ranks: FOLDER RANKS-THAT-SAVE.

Each case is a run of its own. If so many ranks run it, it is stopped in the middle of an epoch. Other numbers of ranks
resume it, with the same global batches. Rank 0 writes what it found.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hvdtrain
from hvdtrain.callbacks import Callback, Checkpoint

FOLDER, SAVERS = Path(sys.argv[1]), int(sys.argv[2])
GLOBAL_BATCH, STOP, EPOCHS = 12, 5, 3
CASES: dict[str, dict[str, Any]] = {
    "topk": {"compression": "topk:0.01"},
    "powersgd": {"compression": "powersgd:2:0"},
    "gradients": {"shard": "gradients"},
    "none": {},
}

world = hvdtrain.init("torch")
generator = np.random.default_rng(0)
x = generator.normal(size=(96, 20)).astype(np.float32)
y = (x[:, :10].sum(1) > 0).astype(np.int64)


class StoppedError(Exception):
    """The end of the first part."""


class Place(Callback):
    """Notes the errors of all ranks where the run is stopped and resumed; stops it if these ranks have saved it."""

    sums: list[float] | None = None

    def on_step_begin(self, trainer: hvdtrain.Trainer, step: int) -> None:
        if trainer.global_step != STOP or self.sums is not None:
            return
        held = trainer._adapter.rank_state
        errors = [held[name].ravel() for name in sorted(held) if name.startswith("mean.error")]
        own = np.concatenate([*errors, np.zeros(1, np.float32)]).astype(np.float64)
        self.sums = list(world.allreduce(own, name="errors"))
        if world.size == SAVERS:
            raise StoppedError


def run(name: str) -> dict[str, Any]:
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.Tanh(), torch.nn.Linear(40, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    trainer = hvdtrain.Trainer(net, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss(), **CASES[name])
    place = Place()
    folder = FOLDER / f"{name}-{'saved' if world.size == SAVERS else world.size}"
    with suppress(StoppedError):
        trainer.fit(
            (x, y), epochs=EPOCHS, batch_size=GLOBAL_BATCH // world.size, progress=False, run_dir=None,
            callbacks=[Checkpoint(folder, every_steps=STOP), place],
        )  # fmt: skip
    weights = np.concatenate([p.detach().numpy().ravel() for p in net.parameters()])
    everyones = world.allgather(weights[None], name="weights")
    return {
        "sums": place.sums, "weights": weights.tolist(), "are_equal": bool((everyones == weights).all()),
        "step": trainer.global_step, "loss": trainer.history.get("loss", []),
    }  # fmt: skip


found = {name: run(name) for name in CASES}
if world.is_root:
    (FOLDER / f"found-{world.size}.json").write_text(json.dumps(found))
