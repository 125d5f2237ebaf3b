"""The models for GPUs: ResNet-50 and a transformer of GPT-2's small size, and the loop of peers that have their own."""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from typing import Any

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
    """25.6 million parameters; (batch, 3, 224, 224) -> (batch, 1000)."""

    def __init__(self) -> None:
        layers: list[nn.Module] = [
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        ]  # fmt: skip
        inputs = 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for index in range(count):
                layers.append(Bottleneck(inputs, width, stride if index == 0 else 1))
                inputs = 4 * width
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


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
    """A workload on a GPU: the same model, optimizer and data for every peer, the data in host memory."""

    def __init__(self) -> None:
        self.workload = workloads.of_this_process()
        self.batch_size = int(os.environ["BENCH_GPU_BATCH"])
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self.device.type == "cpu" and not _TRIAL:
            raise SystemExit("No GPU: torch sees no CUDA device.")
        torch.manual_seed(workloads.SEED)
        samples = self.batch_size * workloads.data_ranks() * self.workload.steps_per_epoch
        self.loss = nn.CrossEntropyLoss()
        if self.workload.model == "resnet50":
            side = 32 if _TRIAL else 224
            self.model: nn.Module = ResNet50()
            self.inputs = torch.randn(samples, 3, side, side)
            self.targets = torch.randint(0, 1000, (samples,))
        else:
            count, width, layers, length = (500, 64, 2, 16) if _TRIAL else (50304, 768, 12, 1024)
            self.model = Transformer(tokens=count, width=width, layers=layers, length=length)
            tokens = torch.randint(0, count, (samples, length + 1))
            self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.model.to(self.device)

    def optimizer(self) -> torch.optim.Optimizer:
        """Return plain SGD over the model."""
        return torch.optim.SGD(self.model.parameters(), lr=workloads.LEARNING_RATE, momentum=workloads.MOMENTUM)

    def turns(self, *, rank: int) -> Turns:
        """Return the turns of this rank."""
        clock = DeviceClock() if self.device.type == "cuda" else Clock()
        # bf16 on a GPU does not repeat bit for bit, and there is one rank: tests/gpu compare weights.
        return Turns(rank=rank, weights=lambda: (), loss=lambda: 0.0, clock=clock)

    def _to_device(self, rows: torch.Tensor) -> torch.Tensor:
        """As torch's manual has it: from pinned memory, while the device still computes."""
        return rows.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else rows


def loop(task: GpuTask, optimizer: Any, *, model: nn.Module | None = None) -> None:
    """Train in bf16 as everybody's own loop does, until there are no more turns."""
    model = model or task.model
    turns = task.turns(rank=0)
    turns.begin()
    with suppress(Finished):
        for each in workloads.batches(len(task.inputs), batch_size=task.batch_size, rank=0, size=1):
            chosen = torch.from_numpy(each)
            inputs, targets = task._to_device(task.inputs[chosen]), task._to_device(task.targets[chosen])
            optimizer.zero_grad()
            with torch.autocast(task.device.type, dtype=torch.bfloat16):
                loss = task.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            turns.tick()
