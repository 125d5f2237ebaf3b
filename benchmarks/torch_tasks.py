"""The PyTorch models, and the loop that every hand-written peer shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from benchmarks import workloads
from benchmarks.turns import Finished, Turns

CHECK_SAMPLES = 64


class LeNet(nn.Sequential):
    """Two convolutions and two dense layers; 97,000 parameters."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(512, 160), nn.ReLU(), nn.Linear(160, 10),
        )  # fmt: skip


class MLP(nn.Sequential):
    """Two wide layers: 80 MB of gradients for little arithmetic; 20 million parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10))


class ConvNet(nn.Sequential):
    """Four blocks of two 3x3 convolutions; 4.7 million parameters.

    No BatchNorm: with it ranks would not equal one process, and DDP would send its buffers too.
    """

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        width = 3
        for block in (64, 128, 256, 512):
            layers += [nn.Conv2d(width, block, 3, padding=1), nn.ReLU()]
            layers += [nn.Conv2d(block, block, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            width = block
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Transformer(nn.Module):
    """A decoder of four layers, width 384; 10 million parameters. (batch, 128) tokens -> (batch * 128, 4096) logits."""

    def __init__(self, *, tokens: int = 4096, width: int = 384, layers: int = 4, length: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, tokens, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.embed(tokens) + self.position, mask=self.mask, is_causal=True)
        return self.head(hidden).transpose(1, 2)  # (batch, tokens, length), as cross_entropy wants it


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "lenet": LeNet,
    "mlp": MLP,
    "convnet": ConvNet,
    "transformer": Transformer,
    "tiny": lambda: nn.Linear(9, 1),
}


class Task:
    """A workload in PyTorch: the same model, optimizer and data for every peer."""

    def __init__(self) -> None:
        self.workload = workloads.of_this_process()
        torch.manual_seed(workloads.SEED)
        self.model = _MODELS[self.workload.model]()
        self.loss: nn.Module = nn.MSELoss() if self.workload.model == "tiny" else nn.CrossEntropyLoss()
        inputs, targets = (torch.from_numpy(array) for array in workloads.make_data(self.workload))
        if inputs.dim() == 4:
            # A clone, not .contiguous(): that leaves images of one channel with strides by which torch takes them for
            # channels last, where pooling is ten times as fast, and only where a loader keeps such strides.
            inputs = inputs.permute(0, 3, 1, 2).clone(memory_format=torch.contiguous_format)
        self.inputs, self.targets = inputs, targets

    def optimizer(self) -> torch.optim.Optimizer:
        """Return plain SGD over the model."""
        return torch.optim.SGD(self.model.parameters(), lr=workloads.LEARNING_RATE, momentum=workloads.MOMENTUM)

    def turns(self, *, rank: int) -> Turns:
        """Return the turns of this rank."""
        return Turns(rank=rank, weights=self._weights, loss=self._check_loss)

    def _weights(self) -> Iterable[Any]:
        return (parameter.detach().numpy() for parameter in self.model.parameters())

    def _check_loss(self) -> float:
        """Return the mean loss of the check's samples, taken in parts: a step's memory is to be the most there is."""
        size = self.workload.batch_size
        with torch.no_grad():
            parts = zip(self.inputs[:CHECK_SAMPLES].split(size), self.targets[:CHECK_SAMPLES].split(size), strict=True)
            sums = [float(self.loss(self.model(inputs), targets)) * len(inputs) for inputs, targets in parts]
        return sum(sums) / min(CHECK_SAMPLES, len(self.inputs))


def loop(
    task: Task,
    optimizer: Any,
    *,
    rank: int,
    size: int,
    model: nn.Module | None = None,
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
    batch_size: int | None = None,
) -> None:
    """Train as everybody's own loop does, until there are no more turns.

    Args:
        task: what to train.
        optimizer: plain, or the peer's.
        rank: this process's number.
        size: number of processes that share the data.
        model: what to call in the place of task.model: a peer's wrapper.
        backward: what takes the place of loss.backward().
        batch_size: samples of this rank in a step; the workload's by default.
    """
    turns = task.turns(rank=rank)
    model = model or task.model
    batch_size = batch_size or task.workload.batch_size
    indices = workloads.batches(len(task.inputs), batch_size=batch_size, rank=rank, size=size)
    turns.begin()
    with suppress(Finished):
        for each in indices:
            chosen = torch.from_numpy(each)
            optimizer.zero_grad()
            loss = task.loss(model(task.inputs[chosen]), task.targets[chosen])
            backward(loss)
            optimizer.step()
            turns.tick()
