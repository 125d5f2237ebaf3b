"""The mean of gradients over the ranks of one host, while other hosts do the same."""

from __future__ import annotations

import socket
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hvdtrain.distributed.recorder import recorder
from hvdtrain.distributed.world import World
from hvdtrain.torch.ops import engine
from hvdtrain.torch.ops.compression import as_real, from_real
from hvdtrain.torch.reduction.alone import Alone
from hvdtrain.torch.reduction.exchange import DenseOnly


class HostMean(Alone):
    """Averages over the ranks of this host by two alltoalls of all ranks, which send nothing to other hosts.

    Each rank gets its shard of the gradients from its host's ranks, averages it, and sends them the mean. So they hold
    the same bits. A set of ranks for each host would need HOROVOD_DYNAMIC_PROCESS_SETS, with which Horovod's ranks talk
    in every cycle, 1000 times a second, over the slow link too.
    """

    def __init__(self, optimizer: Any, dense_only: DenseOnly, world: World) -> None:
        super().__init__(optimizer)
        self._dense_only, self._world = dense_only, world
        self._peers: list[int] = []  # the ranks of this host; unknown before the first gradients

    def start(self) -> None:
        """Forget the ranks of this host, which may have changed."""
        self._peers = []

    def _find_peers(self) -> None:
        hosts = self._world.allgather_object(socket.gethostname(), name="hosts")
        self._peers = [rank for rank, host in enumerate(hosts) if host == hosts[self._world.rank]]

    def average(self, parameters: list[Parameter]) -> None:
        """Replace gradients, dense ones, by their mean; a missing one counts as zeros, unless all ranks lack it."""
        self._dense_only.check(parameters)
        if not self._peers:
            self._find_peers()
        groups: dict[tuple[torch.device, torch.dtype], list[Parameter]] = {}
        for parameter in (p for p in parameters if p.requires_grad):  # halves are added up in float32
            dtype = torch.float64 if parameter.dtype in (torch.float64, torch.complex128) else torch.float32
            groups.setdefault((parameter.device, dtype), []).append(parameter)
        with recorder.waiting():
            for number, ((device, dtype), members) in enumerate(groups.items()):
                self._average(members, device, dtype, name=f"host_mean.{number}")

    def _average(self, members: list[Parameter], device: torch.device, dtype: torch.dtype, *, name: str) -> None:
        shapes = [as_real(parameter.detach()).shape for parameter in members]
        sizes = [shape.numel() for shape in shapes]
        total, ranks = sum(sizes) + len(sizes), len(self._peers)  # with a flag for each gradient that is there
        shard = -(-total // ranks)
        flat = torch.zeros(ranks * shard, dtype=dtype, device=device)
        parts, flags = flat[: total - len(sizes)].split(sizes), flat[total - len(sizes) : total]
        for index, (part, parameter) in enumerate(zip(parts, members, strict=True)):
            if parameter.grad is not None:
                part.copy_(as_real(parameter.grad.detach()).reshape(-1))
                flags[index] = 1.0
        # (ranks, shard): one row per rank of this host
        mine = self._exchange(flat, shard, f"{name}.scatter").view(ranks, shard).mean(0)
        means = self._exchange(mine.repeat(ranks), shard, f"{name}.gather")
        present = means[total - len(sizes) : total].tolist()
        parts = means[: total - len(sizes)].split(sizes)
        for part, shape, parameter, there in zip(parts, shapes, members, present, strict=True):
            if there:
                mean = from_real(part.view(shape), parameter.dtype)
                if parameter.grad is None:
                    parameter.grad = mean
                else:
                    parameter.grad.detach().copy_(mean)

    def _exchange(self, rows: Tensor, shard: int, name: str) -> Tensor:
        """Send each rank of this host its shard of `rows`; return what they send, in rank order."""
        splits = torch.zeros(self._world.size, dtype=torch.int32)
        splits[self._peers] = shard
        native = engine.native()
        received: Tensor = native.synchronize(native.alltoall_async(rows, splits, name=name))[0]
        return received
