"""A rank of the proof on GPUs, with a defect that must make it fail: its name, then what the proof's own rank takes."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import hvdtrain.torch as hvd
from hvdtrain.horovod_build import gpu_proof
from hvdtrain.torch.elastic import state

DEFECT = sys.argv[1]
plain = hvd.DistributedOptimizer
is_second = os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1"


class Ignoring:
    """An optimizer that takes part in each reduction, and steps with its own gradients."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        own = [param.grad.clone() for param in params]
        self.optimizer.synchronize()
        for param, gradient in zip(params, own, strict=True):
            param.grad = gradient
        with self.optimizer.skip_synchronize():
            self.optimizer.step()


def without_reduction(optimizer: Any, **options: Any) -> Any:
    return optimizer


if DEFECT == "a sum":
    hvd.DistributedOptimizer = functools.partial(plain, op=hvd.Sum)
elif DEFECT == "ignores" and is_second:
    hvd.DistributedOptimizer = lambda *args, **options: Ignoring(plain(*args, **options))
elif DEFECT == "skips" and is_second:
    hvd.DistributedOptimizer = without_reduction
elif DEFECT == "does not go back":
    state.StateHandler.restore = lambda self: None
elif DEFECT == "raises" and is_second:
    hvd.DistributedOptimizer = None

sys.exit(gpu_proof.rank_main(sys.argv[2], sys.argv[3], Path(sys.argv[4])))
