"""The models for GPUs: ResNet-50 and a transformer of GPT-2's small size, with data in host memory."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from benchmarks import workloads
from benchmarks.torch_tasks import Transformer
from benchmarks.turns import Turns

# For a trial of the scripts where no GPU is: this many samples a step, in small.
_TRIAL = int(os.environ.get("BENCH_GPU_TRIAL", "0"))


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


class GpuTask:
    """A workload on a GPU: the same model, optimizer and data for every peer."""

    def __init__(self) -> None:
        self.workload = workloads.of_this_process()
        self.batch_size = _TRIAL or self.workload.batch_size
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(workloads.SEED)
        samples = self.batch_size * workloads.data_ranks() * self.workload.steps_per_epoch
        self.loss = nn.CrossEntropyLoss()
        if self.workload.model == "resnet50":
            side = 32 if _TRIAL else 224
            self.model: nn.Module = ResNet50()
            self.inputs = torch.randn(samples, 3, side, side)
            self.targets = torch.randint(0, 1000, (samples,))
        else:
            length = 16 if _TRIAL else 1024
            self.model = Transformer(tokens=50304, width=768, layers=2 if _TRIAL else 12, length=length)
            tokens = torch.randint(0, 50304, (samples, length + 1))
            self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def optimizer(self) -> torch.optim.Optimizer:
        """Return plain SGD over the model."""
        return torch.optim.SGD(self.model.parameters(), lr=workloads.LEARNING_RATE, momentum=workloads.MOMENTUM)

    def turns(self, *, rank: int) -> Turns:
        """Return the turns of this rank."""
        return Turns(rank=rank, weights=self._weights, loss=lambda: 0.0, settle=self._settle)

    def _weights(self) -> Any:
        return (parameter.detach().cpu().numpy() for parameter in self.model.parameters())

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
