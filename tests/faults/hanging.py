"""A training script of which one rank goes wrong: hanging.py FRAMEWORK FAULT VICTIM."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np

FAULT_STEP = 5
framework, fault, victim = sys.argv[1], sys.argv[2], int(sys.argv[3])


def go_wrong(hvd: Any, array: Any) -> None:
    print("FAULT", flush=True)
    match fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(1000)
        case "raise":
            raise ValueError(f"bad sample on rank {hvd.rank()}")
        case "end early":
            sys.exit(0)
        case "exit with 3":
            sys.exit(3)
        case "raise an exit with 3":
            raise SystemExit(3)
        case "other names":
            hvd.allreduce(array(3), name="only.here")
        case "other shapes":
            hvd.allreduce(array(4), name="of.all")


def before_step(step: int, hvd: Any, array: Any) -> None:
    if step != FAULT_STEP:
        return
    if hvd.rank() == victim:
        go_wrong(hvd, array)
    elif fault == "other shapes":
        hvd.allreduce(array(3), name="of.all")


def with_torch() -> None:
    import torch

    import hvdtrain.torch as hvd

    hvd.init()
    if fault == "raise first" and hvd.rank() == victim:
        print("FAULT", flush=True)
        raise ValueError(f"bad sample on rank {victim}")
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for step in range(10**6):
        before_step(step, hvd, torch.ones)
        optimizer.zero_grad()
        model(torch.rand(4, 8)).square().mean().backward()
        optimizer.step()


def with_keras() -> None:
    import keras

    import hvdtrain.keras as hvd

    hvd.init()
    if fault == "raise first" and hvd.rank() == victim:
        print("FAULT", flush=True)
        raise ValueError(f"bad sample on rank {victim}")

    class GoWrong(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            before_step(batch, hvd, lambda n: np.ones(n, np.float32))

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
    x = np.random.default_rng(0).random((4 * 10**5, 8), np.float32)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), GoWrong()]
    model.fit(x, x[:, :1], batch_size=4, epochs=100, callbacks=callbacks, verbose=0)


def with_cutoff() -> None:
    import torch

    import hvdtrain
    import hvdtrain.torch as hvd

    class Rows(torch.utils.data.Dataset[Any]):
        trainer: Any = None

        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, index: int) -> Any:
            if self.trainer is not None:
                before_step(self.trainer.global_step, hvd, torch.ones)
            return torch.ones(8), torch.ones(1)

    hvdtrain.init("torch")
    model, rows = torch.nn.Linear(8, 1), Rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # All ranks are needed, so a rank that goes wrong holds up its first step.
    rows.trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.MSELoss(), accumulate=2, cutoff=1.0)
    rows.trainer.fit(rows, batch_size=4, progress=False, run_dir=None)


def with_distributed() -> None:
    import torch
    import torch.distributed

    import hvdtrain
    import hvdtrain.torch as hvd

    world = hvdtrain.init("torch")
    hvd.Grid(shard=world.size)
    for step in range(10**6):
        numbers = 1
        if fault != "other lengths":
            before_step(step, hvd, torch.ones)
        elif step == FAULT_STEP and world.rank == victim:
            print("FAULT", flush=True)
            numbers = 2
        parts = [torch.empty(numbers) for _ in range(world.size)]
        torch.distributed.all_gather(parts, torch.ones(numbers))


def with_stages() -> None:
    import torch

    import hvdtrain
    import hvdtrain.torch as hvd
    from hvdtrain.callbacks import Callback

    class GoWrong(Callback):
        def on_step_begin(self, trainer: Any, step: int) -> None:
            before_step(step, hvd, torch.ones)

    grid = hvd.Grid(stages=hvdtrain.init("torch").size)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    model = grid.pipeline(layers, micro_batches=2)
    trainer = hvdtrain.Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), loss=torch.nn.MSELoss())
    rows = torch.ones(4 * 10**5, 8), torch.ones(4 * 10**5, 1)
    trainer.fit(rows, batch_size=4, callbacks=[GoWrong()], progress=False, run_dir=None)


SCRIPTS = {"torch": with_torch, "cutoff": with_cutoff, "distributed": with_distributed, "stages": with_stages}
SCRIPTS.get(framework, with_keras)()
