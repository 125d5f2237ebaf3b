"""The workloads: names, sizes and data, without a framework. The models are in torch_tasks.py and keras_tasks.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdtrain.data import sharding

SEED = 0
LEARNING_RATE = 0.01
MOMENTUM = float(os.environ.get("BENCH_MOMENTUM", "0.9"))


@dataclass(frozen=True)
class Workload:
    """A model with its batch.

    Attributes:
        name: as on the command line.
        framework: "torch" or "keras".
        model: which model of that framework.
        title: for people.
        batch_size: samples a rank takes in a step.
        backend: Keras's.
        steps_per_epoch: how often data is shuffled anew.
        precision: on GPUs, "bf16" (autocast) or "fp32".
        compiled: on GPUs, by torch.compile.
        channels_last: on GPUs, images and weights are in this order.
    """

    name: str
    framework: str
    model: str
    title: str
    batch_size: int
    backend: str = ""
    steps_per_epoch: int = 64
    precision: str = "bf16"
    compiled: bool = False
    channels_last: bool = False


_TORCH = (
    Workload("lenet", "torch", "lenet", "LeNet 0.1M, batch 32", 32),
    Workload("mlp", "torch", "mlp", "MLP 784-4096-4096-10, 20M, batch 64", 64),
    Workload("convnet", "torch", "convnet", "ConvNet of four blocks, 4.7M, 32x32, batch 16", 16),
    Workload("transformer", "torch", "transformer", "Transformer 10M, sequence 128, batch 2", 2),
)
_KERAS = tuple(
    Workload(f"keras-{backend}-{each.model}", "keras", each.model, f"Keras on {backend}: {each.title}",
             each.batch_size, backend)
    for backend in ("tensorflow", "torch", "jax")
    for each in _TORCH[:2]
)  # fmt: skip
# Not among the comparisons: for the Trainer's own cost, where nearly all of a step is the loop around it.
TINY = Workload("tiny", "torch", "tiny", "10 parameters, batch 8", 8, steps_per_epoch=4096)
# Between hosts: an epoch, at whose end ranks synchronize too, is longer than a strategy's cycle.
LINK_MLP = replace(_TORCH[1], name="link-mlp", steps_per_epoch=400)
LINK_MLPS = (
    LINK_MLP,
    *(replace(each, name=f"link-{each.name}", steps_per_epoch=400) for each in _KERAS if each.model == "mlp"),
)
GPU = (
    Workload("gpu-resnet50", "torch", "resnet50", "ResNet-50, 224x224, bf16, batch 128", 128, steps_per_epoch=16),
    Workload("gpu-transformer", "torch", "gpt", "Transformer 124M, sequence 1024, bf16, batch 8", 8,
             steps_per_epoch=16),
)  # fmt: skip
# Of several GPUs. Each rank has data of its own, few of them: eight ranks of three peers hold them at once.
GPUS = tuple(
    replace(each, name=f"gpus-{each.model}{'-compiled' * compiled}-{precision}", steps_per_epoch=4,
            title=f"{each.title.replace('bf16', precision)}{', compiled' * compiled}", precision=precision,
            compiled=compiled, channels_last=each.model == "resnet50")
    for each, compiled in ((GPU[0], False), (GPU[1], True), (GPU[1], False))
    for precision in ("bf16", "fp32")
)  # fmt: skip
WORKLOADS = {each.name: each for each in (*_TORCH, *_KERAS)}
EVERY = {**WORKLOADS, TINY.name: TINY, **{each.name: each for each in (*LINK_MLPS, *GPU, *GPUS)}}


def of_this_process() -> Workload:
    """Return the workload that the runner named."""
    return EVERY[os.environ["BENCH_WORKLOAD"]]


def data_ranks() -> int:
    """Return for how many ranks there is data: the same number of samples for every peer of a comparison."""
    return int(os.environ["BENCH_DATA_RANKS"])


def make_data(workload: Workload) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return (inputs, targets), the same in every process. Images are channels last: (samples, height, width, c)."""
    random = np.random.default_rng(SEED)
    samples = workload.batch_size * data_ranks() * workload.steps_per_epoch
    if workload.model == "transformer":
        tokens = random.integers(0, 4096, (samples, 129))
        return tokens[:, :-1].copy(), tokens[:, 1:].copy()
    if workload.model == "tiny":
        return random.random((samples, 9), np.float32), random.random((samples, 1), np.float32)
    shape = {"lenet": (28, 28, 1), "mlp": (784,), "convnet": (32, 32, 3)}[workload.model]
    return random.standard_normal((samples, *shape), np.float32), random.integers(0, 10, samples)


def batches(samples: int, *, batch_size: int, rank: int, size: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield the indices of one batch after another, epoch after epoch, without end.

    The order is the Trainer's, so that all peers take the same steps; it needs nothing of hvdtrain but NumPy.
    """
    epoch = 0
    while True:
        indices = sharding.shard_indices(samples, rank=rank, size=size, epoch=epoch, seed=SEED)
        for start in range(0, len(indices) - batch_size + 1, batch_size):
            yield indices[start : start + batch_size]
        epoch += 1
