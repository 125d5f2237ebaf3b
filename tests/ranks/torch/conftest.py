"""What the PyTorch rank tests share: Horovod, started once, and a global batch that every rank can compute alone.

With HVDTRAIN_TEST_GPU=1, which `make gpus` sets for tests marked on_gpus, each rank has the GPU of its local rank.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hvdtrain
import hvdtrain.torch as hvdtrain_torch

sys.path.insert(0, str(Path(__file__).parent))  # for trainer_kit.py beside this file
if os.environ.get("HOROVOD_ENABLE_ASYNC_COMPLETION") != "1":  # with a timeline, Horovod waits for each result at once
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"  # read by init; the Trainer's tests in these ranks start one


@pytest.fixture(scope="session")
def hvd() -> Any:
    hvdtrain_torch.init()
    if os.environ.get("HVDTRAIN_TEST_GPU") == "1":
        assert hvdtrain_torch.nccl_built(), "Horovod was built without NCCL: run make gpus"
        torch.cuda.set_device(hvdtrain_torch.local_rank())
        torch.set_default_device(torch.device("cuda", hvdtrain_torch.local_rank()))
    return hvdtrain_torch


@pytest.fixture
def world(hvd: Any) -> Any:
    return hvdtrain.init("torch")


@pytest.fixture
def grid_of(world: Any) -> Iterator[Callable[..., Any]]:
    """Make a Grid; it is closed at the end of the test, unless the test has closed it."""
    made = []

    def make(**lengths: int) -> Any:
        made.append(hvdtrain_torch.Grid(**lengths))
        return made[-1]

    yield make
    for grid in made:
        if world.grid is grid:
            grid.close()


@pytest.fixture
def rank(hvd: Any) -> int:
    return int(hvd.rank())


@pytest.fixture
def size(hvd: Any) -> int:
    return int(hvd.size())


@pytest.fixture
def assert_same_on_all_ranks(hvd: Any) -> Callable[..., None]:
    """Fail unless these tensors hold the same bits on every rank."""

    def check(*tensors: Tensor) -> None:
        mine = [t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]
        everyones = hvd.allgather_object(mine)
        assert all(theirs == everyones[0] for theirs in everyones)

    return check


@dataclass
class Task:
    """A small model with data: each rank trains on its share of every global batch."""

    rank: int
    size: int
    local_batch: int = 4

    def model(self) -> torch.nn.Sequential:
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))

    def batches(self, steps: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(5)
        rows = self.size * self.local_batch

        def draw(width: int) -> Tensor:
            drawn = torch.randn(rows, width, generator=generator, device="cpu")  # alike on CPUs and GPUs
            return drawn.to(torch.get_default_device())

        return [(draw(6), draw(3)) for _ in range(steps)]

    def mine(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = batch
        return x[self.rank :: self.size], y[self.rank :: self.size]

    def loss(self, model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    def train_alone(self, model: torch.nn.Module, optimizer: Any, steps: int) -> None:
        """What one process does with the global batches."""
        for batch in self.batches(steps):
            optimizer.zero_grad()
            self.loss(model, batch).backward()
            optimizer.step()

    def train(self, model: torch.nn.Module, optimizer: Any, steps: int) -> None:
        for batch in self.batches(steps):
            optimizer.zero_grad()
            self.loss(model, self.mine(batch)).backward()
            optimizer.step()


@pytest.fixture
def task(rank: int, size: int) -> Task:
    return Task(rank, size)


def largest_difference(a: torch.nn.Module, b: torch.nn.Module) -> float:
    return max(
        float((p.detach() - q.detach()).abs().max()) for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )


@pytest.fixture
def difference() -> Callable[[torch.nn.Module, torch.nn.Module], float]:
    return largest_difference


class CountingLibrary:
    """Horovod's native library, with its calls counted by kind and by the name of the operation."""

    def __init__(self, library: Any) -> None:
        self.library = library
        self.calls: Counter[str] = Counter()
        self.names: list[str] = []
        self.bytes_sent: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.library, name)
        if "_async_" not in name:
            return function
        kind = name.removeprefix("horovod_torch_").partition("_async_")[0]

        def counted(*args: Any) -> Any:
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.calls[kind] += 1
            self.bytes_sent[kind] += sum(t.numel() * t.element_size() for t in tensors)
            self.names += [arg.decode() for arg in args if isinstance(arg, bytes)]
            return function(*args)

        return counted


@pytest.fixture
def native_calls(hvd: Any, monkeypatch: pytest.MonkeyPatch) -> CountingLibrary:
    from horovod.torch import mpi_ops

    library = CountingLibrary(mpi_ops.mpi_lib)
    monkeypatch.setattr(mpi_ops, "mpi_lib", library)
    return library
