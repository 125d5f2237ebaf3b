"""The mean of gradients over the ranks of one host, while other hosts do the same."""

from __future__ import annotations

import socket
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hvdtrain.distributed.recorder import recorder
from hvdtrain.distributed.world import World
from hvdtrain.torch.ops import engine, pack
from hvdtrain.torch.ops.wire import as_real, from_real
from hvdtrain.torch.reduction.alone import Alone
from hvdtrain.torch.reduction.exchange import DenseOnly
from hvdtrain.torch.reduction.reduction_unit import dense_gradient, store_gradient


class HostMean(Alone):
    """Averages over the ranks of this host by two alltoalls of all ranks, which send nothing to other hosts.

    Each rank gets its shard of the gradients from its host's ranks, averages it, and sends them the mean. So they hold
    the same bits. With a set of ranks for each host, Horovod's ranks would talk in every cycle, 1000 times a second,
    over the slow link too.
    """

    def __init__(self, optimizer: Any, dense_only: DenseOnly, world: World) -> None:
        super().__init__(optimizer)
        self._dense_only, self._world = dense_only, world
        self._peers: list[int] = []  # the ranks of this host; unknown before the first gradients

    def start(self) -> None:
        """Forget the ranks of this host, which may have changed."""
        super().start()
        self._peers = []

    def _find_peers(self) -> None:
        hosts = self._world.allgather_object(socket.gethostname(), name="hosts")
        self._peers = [rank for rank, host in enumerate(hosts) if host == hosts[self._world.rank]]

    def average(self, parameters: list[Parameter]) -> None:
        """Replace gradients, dense ones, by their mean; a missing one counts as zeros, unless all ranks lack it."""
        self._dense_only.check(parameters)
        if not self._peers:
            self._find_peers()
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        with recorder.waiting():
            for number, members in enumerate(pack.alike(trained, lambda p: (p.device, _added_up_in(p)))):
                self._average(members, name=f"host_mean.{number}")

    def _average(self, members: list[Parameter], *, name: str) -> None:
        has_gradient = [parameter.grad is not None for parameter in members]
        flags = torch.tensor(has_gradient, dtype=_added_up_in(members[0]), device="cpu")
        gradients = [as_real(dense_gradient(parameter)) for parameter in members]
        if members[0].is_cpu:
            *means, flags = self._mean([*gradients, flags], name)
        else:
            # Flags among the gradients would be read from the device, after all that it still computes.
            (flags,) = self._mean([flags], f"{name}.flags")
            means = self._mean(gradients, name)
        for mean, parameter, there in zip(means, members, flags.tolist(), strict=True):
            if there:
                store_gradient(parameter, from_real(mean, parameter.dtype))

    def _mean(self, tensors: list[Tensor], name: str) -> list[Tensor]:
        """Return the means of real tensors, which are on one device, over the ranks of this host."""
        shapes, ranks = [tensor.shape for tensor in tensors], len(self._peers)
        shard = -(-sum(shape.numel() for shape in shapes) // ranks)
        flat = torch.zeros(ranks * shard, dtype=_added_up_in(tensors[0]), device=tensors[0].device)
        for part, tensor in zip(pack.parts(flat, shapes), tensors, strict=True):
            part.copy_(tensor)
        # (ranks, shard): one row per rank of this host
        mine = self._exchange(flat, shard, f"{name}.scatter").view(ranks, shard).mean(0)
        return pack.parts(self._exchange(mine.repeat(ranks), shard, f"{name}.gather"), shapes)

    def _exchange(self, rows: Tensor, shard: int, name: str) -> Tensor:
        """Send each rank of this host its shard of `rows`; return what they send, in rank order."""
        splits = torch.zeros(self._world.size, dtype=torch.int32, device="cpu")
        splits[self._peers] = shard
        native = engine.native()
        received: Tensor = native.synchronize(native.alltoall_async(rows, splits, name=name))[0]
        return received


def _added_up_in(parameter: Tensor) -> torch.dtype:
    """Return the type in which gradients are added up: float32 for halves."""
    return torch.float64 if parameter.dtype in (torch.float64, torch.complex128) else torch.float32
