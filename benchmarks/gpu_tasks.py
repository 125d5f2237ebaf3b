"""The models for GPUs: ResNet-50 and a transformer of GPT-2's small size, and the loop of peers that have their own.

One rank a GPU; each rank has samples of its own.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import torch
from torch import nn

from benchmarks import workloads
from benchmarks.torch_tasks import Transformer
from benchmarks.turns import Clock, Finished, Turns

# For a trial of the scripts where no GPU is: the models in small.
_TRIAL = "BENCH_GPU_TRIAL" in os.environ


class Bottleneck(nn.Module):
    """A residual block of three convolutions (He et al. 2015); the stride is in the 3x3 one."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


class ResNet50(nn.Sequential):
    """25.6 million parameters, in a trial fewer; (batch, 3, 224, 224) -> (batch, 1000)."""

    def __init__(self) -> None:
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        ]  # fmt: skip
        inputs = 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            width, count = (width // 8, 1) if _TRIAL else (width, count)
            for index in range(count):
                layers.append(Bottleneck(inputs, width, stride if index == 0 else 1))
                inputs = 4 * width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class DeviceClock(Clock):
    """Tells when the device was done with a step, without making the host wait for it before the turn ends."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def spans(self, marks: list[Any]) -> list[float]:
        torch.cuda.synchronize()
        return [earlier.elapsed_time(later) / 1000 for earlier, later in itertools.pairwise(marks)]


class GpuTask:
    """A workload on a GPU: the same model, optimizer and data for every peer, the data in host memory.

    Args:
        rank: this process's number, which gives it data of its own.
        local_rank: the number of its GPU.
    """

    def __init__(self, rank: int = 0, local_rank: int = 0) -> None:
        self.rank = rank
        self.workload = workloads.of_this_process()
        self.batch_size = int(os.environ["BENCH_GPU_BATCH"])
        self.device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cpu" and not _TRIAL:
            raise SystemExit("No GPU: torch sees no CUDA device.")
        torch.manual_seed(workloads.SEED)
        samples = self.batch_size * self.workload.steps_per_epoch
        self.loss = nn.CrossEntropyLoss()
        if self.workload.model == "resnet50":
            side = 32 if _TRIAL else 224
            self.model: nn.Module = ResNet50()
            torch.manual_seed(workloads.SEED + rank)
            self.inputs = torch.randn(samples, 3, side, side)
            self.targets = torch.randint(0, 1000, (samples,))
        else:
            count, width, layers, length = (500, 64, 2, 16) if _TRIAL else (50304, 768, 12, 1024)
            self.model = Transformer(tokens=count, width=width, layers=layers, length=length)
            torch.manual_seed(workloads.SEED + rank)
            tokens = torch.randint(0, count, (samples, length + 1))
            self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self._order = torch.channels_last if self.workload.channels_last else torch.preserve_format
        self.model.to(self.device, memory_format=self._order)

    def optimizer(self) -> torch.optim.Optimizer:
        """Return plain SGD over the model."""
        return torch.optim.SGD(self.model.parameters(), lr=workloads.LEARNING_RATE, momentum=workloads.MOMENTUM)

    def turns(self, *, rank: int) -> Turns:
        """Return the turns of this rank."""
        clock = DeviceClock() if self.device.type == "cuda" else Clock()
        # Steps on GPUs do not repeat bit for bit, so there is no reference; ranks hold equal bits all the same.
        return Turns(rank=rank, weights=self._sums_of_bits, loss=lambda: 0.0, clock=clock)

    def _sums_of_bits(self) -> Iterator[Any]:
        """Yield a number for each weight that changes with each bit: half a gigabyte would take seconds to hash."""
        for parameter in self.model.parameters():
            yield parameter.detach().view(torch.int32).sum().cpu().numpy()

    def _to_device(self, rows: torch.Tensor) -> torch.Tensor:
        """As torch's manual has it: from pinned memory, while the device still computes."""
        order = self._order if rows.dim() == 4 else torch.preserve_format
        if self.device.type == "cpu":
            return rows.to(memory_format=order)
        return rows.pin_memory().to(self.device, non_blocking=True, memory_format=order)


def loop(task: GpuTask, optimizer: Any, *, model: nn.Module | None = None) -> None:
    """Train as everybody's own loop does, until there are no more turns."""
    model = model or task.model
    if task.workload.compiled:
        model = cast(nn.Module, torch.compile(model, backend="aot_eager" if _TRIAL else "inductor"))
    bf16 = task.workload.precision == "bf16"
    turns = task.turns(rank=task.rank)
    turns.begin()
    with suppress(Finished):
        for each in workloads.batches(len(task.inputs), batch_size=task.batch_size, rank=0, size=1):
            chosen = torch.from_numpy(each)
            inputs, targets = task._to_device(task.inputs[chosen]), task._to_device(task.targets[chosen])
            optimizer.zero_grad()
            with torch.autocast(task.device.type, dtype=torch.bfloat16, enabled=bf16):
                loss = task.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            turns.tick()
