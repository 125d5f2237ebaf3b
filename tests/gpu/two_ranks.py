"""One of two ranks that share a GPU; test_two_ranks.py starts it under horovodrun. Takes the device: "cuda" or "cpu".

Each rank trains on its half of every global batch, and then trains a twin on the whole batch in plain PyTorch.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable

import numpy as np
import torch

import hvdtrain
import hvdtrain.torch as hvd

LOCAL, STEPS = 8, 5
TRAINER_SAMPLES, EPOCHS = 48, 2


def deep() -> torch.nn.Sequential:
    torch.manual_seed(0)
    # The second one, of 8.4 MB, is above what travels in buckets.
    layers = [torch.nn.Linear(8, 7000), torch.nn.Tanh(), torch.nn.Linear(7000, 300), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(300, 5))


def normalized(norm: Callable[[int], torch.nn.Module]) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), norm(16), torch.nn.Tanh(), torch.nn.Linear(16, 5))


def optimizer_of(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def batches(device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(2 * LOCAL, 8, generator=generator).to(device),
            torch.randint(0, 5, (2 * LOCAL,), generator=generator).to(device),
        )
        for _ in range(STEPS)
    ]


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, part: slice) -> None:
    for x, y in batches(next(net.parameters()).device):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x[part]), y[part]).backward()
        optimizer.step()


def difference(ours: torch.nn.Module, theirs: torch.nn.Module) -> float:
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    return float(np.max([float((a - b).abs().max() / b.abs().max().clamp(min=1e-3)) for a, b in pairs]))


def drop_in(device: torch.device, compression: str) -> float:
    ours = deep().to(device)
    theirs = copy.deepcopy(ours)
    hvd.broadcast_parameters(ours.state_dict(), root_rank=0)
    compressor = getattr(hvd.Compression, compression)
    optimizer = hvd.DistributedOptimizer(optimizer_of(ours), ours.named_parameters(), compression=compressor)
    train(ours, optimizer, slice(hvd.rank(), None, 2))
    train(theirs, optimizer_of(theirs), slice(None))
    return difference(ours, theirs)


def sync_batch_norm(device: torch.device) -> float:
    ours, theirs = normalized(hvd.SyncBatchNorm).to(device), normalized(torch.nn.BatchNorm1d).to(device)
    optimizer = hvd.DistributedOptimizer(optimizer_of(ours), ours.named_parameters())
    train(ours, optimizer, slice(hvd.rank(), None, 2))
    train(theirs, optimizer_of(theirs), slice(None))
    return difference(ours, theirs)


def trainer(device: torch.device) -> float:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(TRAINER_SAMPLES, 8)).astype(np.float32), generator.integers(0, 5, TRAINER_SAMPLES)
    ours = deep()
    theirs = copy.deepcopy(ours).to(device)
    made = hvdtrain.Trainer(ours, optimizer=optimizer_of(ours), loss=torch.nn.CrossEntropyLoss(), clip_norm=0.5, seed=0)
    made.fit((x, y), epochs=EPOCHS, batch_size=LOCAL, progress=False, run_dir=None)
    plain = optimizer_of(theirs)
    for epoch in range(EPOCHS):
        shards = [
            hvdtrain.sampling.shard_indices(TRAINER_SAMPLES, rank=rank, size=2, epoch=epoch, seed=0) for rank in (0, 1)
        ]
        for start in range(0, TRAINER_SAMPLES // 2, LOCAL):
            chosen = np.concatenate([shard[start : start + LOCAL] for shard in shards])
            plain.zero_grad()
            outputs = theirs(torch.from_numpy(x[chosen]).to(device))
            torch.nn.functional.cross_entropy(outputs, torch.from_numpy(y[chosen]).to(device)).backward()
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
            plain.step()
    return difference(ours, theirs)


def collectives(device: torch.device) -> float:
    mine = torch.full((2, 3), float(hvd.rank() + 1), device=device)
    both = torch.cat([torch.full((2, 3), 1.0), torch.full((2, 3), 2.0)]).to(device)
    results = {
        "allreduce": (hvd.allreduce(mine, op=hvd.Sum), torch.full((2, 3), 3.0, device=device)),
        "allgather": (hvd.allgather(mine), both),
        "broadcast": (hvd.broadcast(mine, 1), both[2:]),
        "alltoall": (hvd.alltoall(mine), both[1:3]),
        "reducescatter": (hvd.reducescatter(mine, op=hvd.Sum), torch.full((1, 3), 3.0, device=device)),
    }
    for name, (found, expected) in results.items():
        assert found.device == mine.device, name
        assert torch.equal(found, expected), (name, found)
    return 0.0


def main() -> None:
    world = hvdtrain.init("torch", seed=0)
    assert world.size == 2
    device = torch.device(world.device)
    assert device.type == sys.argv[1], device
    found = {
        "collectives": (collectives(device), 0.0),
        "drop-in": (drop_in(device, "none"), 1e-5),
        "fp16": (drop_in(device, "fp16"), 5e-3),
        "bf16": (drop_in(device, "bf16"), 5e-2),
        "SyncBatchNorm": (sync_batch_norm(device), 1e-4),
        "Trainer": (trainer(device), 1e-5),
    }
    for name, (error, limit) in found.items():
        assert error <= limit, f"{name}: {error:.1e}, at most {limit:.0e} is rounding"
    if world.is_root:
        print("equal to one process:", ", ".join(f"{name} {error:.1e}" for name, (error, _) in found.items()))


if __name__ == "__main__":
    main()
