"""Trainings between ranks beside one process's: what proves a host's GPUs, and that steps need not wait for them.

The device is an argument, so that the same trainings run on CPUs too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import hvdtrain.torch as hvd
from hvdtrain.distributed.world import World

Weights = dict[str, NDArray[Any]]

_STEPS, _LOCAL_BATCH, _LR, _MOMENTUM = 6, 4, 0.05, 0.9
_TOLERANCE = 1e-6  # ranks add in another order than one process
# The largest relative error of a rounding to the type in which gradients travel.
_ROUNDING = {"fp16": 2.0**-11, "bf16": 2.0**-8}
_LAG_CYCLES = 20_000_000  # about 10 ms of a GPU's time: a step's host needs less
_COMMIT_EVERY, _FAULT_STEP = 2, 3  # the fault is one step after a commit


class Case:
    """One training: the same model and samples for all ranks together, and for one process."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name, self._options = name, options

    def model(self, device: torch.device, norm: type[nn.Module] = nn.Identity) -> nn.Module:
        """Return the model, alike on all ranks; its largest gradient is 1 MiB, and others are small."""
        generator = torch.Generator().manual_seed(1)
        model = nn.Sequential(
            nn.Linear(32, 512), nn.Unflatten(1, (32, 4, 4)), norm(32), nn.Flatten(), nn.Tanh(), nn.Linear(512, 512),
            nn.Tanh(), nn.Linear(512, 8),
        )  # fmt: skip
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
        return model.to(device)

    def optimizer(self, model: nn.Module) -> Any:
        """Return the ranks' optimizer."""
        options = dict(self._options)
        if options.pop("alone", False):  # each gradient in an operation of its own
            options["groups"] = [[parameter] for parameter in model.parameters()]
        return hvd.DistributedOptimizer(_sgd(model), named_parameters=model.named_parameters(), **options)

    def ours(self, world: World, device: torch.device) -> Weights:
        """Train with the other ranks."""
        model = self.model(device, hvd.SyncBatchNorm if self.name == "SyncBatchNorm" else nn.Identity)
        optimizer = self.optimizer(model)
        for step in range(_STEPS):
            _lag(device, world.rank + step)
            optimizer.zero_grad()
            _loss(model, _batch(step, world.size, device), slice(world.rank, None, world.size)).backward()
            optimizer.step()
        return _weights(model)

    def theirs(self, sizes: list[int], device: torch.device) -> tuple[Weights, float]:
        """Train as one process on the samples of all ranks, with plain PyTorch.

        Args:
            sizes: the number of ranks in each step.
            device: on which it trains.

        Returns:
            weights, and by how much a rank's weight may differ. A gradient that travels in half precision is rounded
            on its rank and after each addition. The errors add up as the gradients do, by SGD's formula; half of the
            bound is for gradients at weights that differ already.
        """
        model = self.model(device, nn.BatchNorm2d if self.name == "SyncBatchNorm" else nn.Identity)
        optimizer, velocity, distance = _sgd(model), 0.0, 0.0
        for step, size in enumerate(sizes):
            batch = _batch(step, size, device)
            if self.name in _ROUNDING:
                shares = (_loss(model, batch, slice(rank, None, size)) for rank in range(size))
                velocity = _MOMENTUM * velocity + max(_largest_gradient(model, loss) for loss in shares)
                distance += _LR * velocity
            optimizer.zero_grad()
            _loss(model, batch, slice(None)).backward()
            optimizer.step()
        roundings = 2 * (max(sizes) + 1) * _ROUNDING.get(self.name, 0.0)
        return _weights(model), _TOLERANCE + roundings * distance


CASES = (
    Case("plain", alone=True),
    Case("buckets"),
    Case("fp16", compression=hvd.Compression.fp16),
    Case("bf16", compression=hvd.Compression.bf16),
    Case("SyncBatchNorm"),
)


def train(world: World) -> Iterator[tuple[str, Weights, Weights, float]]:
    """Train each case; yield its name and this rank's weights, with one process's and the tolerance on rank 0."""
    device = _prepare(world)
    for case in CASES:
        ours = case.ours(world, device)
        theirs, tolerance = case.theirs([world.size] * _STEPS, device) if world.is_root else ({}, 0.0)
        yield case.name, ours, theirs, tolerance


def lose_a_rank(world: World, *, victim: Callable[[], bool]) -> tuple[list[int], Weights, Weights, float]:
    """Train as an elastic job, in which the `victim` dies; return the sizes of the steps, and what `train` yields."""
    device, whole, case = _prepare(world), world.size, Case("buckets")
    model = case.model(device)
    optimizer = case.optimizer(model)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sizes=[])

    def advance(state: Any) -> None:
        while len(state.sizes) < _STEPS:
            step, size = len(state.sizes), int(hvd.size())
            if step == _FAULT_STEP and size == whole and victim():
                os.kill(os.getpid(), signal.SIGKILL)
            _lag(device, hvd.rank() + step)
            optimizer.zero_grad()
            _loss(model, _batch(step, size, device), slice(hvd.rank(), None, size)).backward()
            optimizer.step()
            state.sizes.append(size)
            if len(state.sizes) % _COMMIT_EVERY == 0:
                state.commit()

    hvd.elastic.run(advance)(state)
    theirs, tolerance = case.theirs(state.sizes, device) if hvd.rank() == 0 else ({}, 0.0)
    return state.sizes, _weights(model), theirs, tolerance


def _prepare(world: World) -> torch.device:
    """Let the device compute in float32 as it says, and return it."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return torch.device(world.device)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=_LR, momentum=_MOMENTUM, weight_decay=0.01)


def _batch(step: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the samples of a step of so many ranks."""
    generator, rows = torch.Generator().manual_seed(step + 2), size * _LOCAL_BATCH
    pair = (torch.randn(rows, n, generator=generator, dtype=torch.float32, device="cpu") for n in (32, 8))
    inputs, targets = (each.to(device) for each in pair)
    return inputs, targets


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor], part: slice) -> Tensor:
    return nn.functional.mse_loss(model(batch[0][part]), batch[1][part])


def _largest_gradient(model: nn.Module, loss: Tensor) -> float:
    return max(float(each.abs().max()) for each in torch.autograd.grad(loss, list(model.parameters())))


def _weights(model: nn.Module) -> Weights:
    return {name: value.detach().cpu().numpy().copy() for name, value in model.state_dict().items()}


def _lag(device: torch.device, turn: int) -> None:
    """Let a GPU fall behind its host, on another rank in each step: so a missing wait gives wrong numbers."""
    if device.type == "cuda":
        torch.cuda._sleep(_LAG_CYCLES * (turn % 3))
