"""What both strategies have in common: devices by the launcher, refusals, and collectives under Lightning's names."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor

import hvdtrain
import hvdtrain.torch as hvd
from hvdtrain.distributed.world import World, refuse_grid
from hvdtrain.lightning.environment import HorovodEnvironment

_OPS = {"mean": hvd.Average, "avg": hvd.Average, "sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max, "product": hvd.Product}


def refuse_torchs_ranks() -> None:
    """Raise RuntimeError if torch.distributed has ranks of its own; HvdTrainError if a Grid divides the model."""
    refuse_grid("hvdtrain.lightning", "Use hvdtrain.Trainer, or a custom loop")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise RuntimeError(
            "torch.distributed is initialized, and Lightning and torchmetrics would synchronize over its ranks as well "
            f"as over Horovod's. Received: its rank {torch.distributed.get_rank()} of "
            f"{torch.distributed.get_world_size()}. Remove init_process_group, and launch with horovodrun."
        )


def join_ranks() -> World:
    """Return this process's World; RuntimeError if torch.distributed has ranks of its own."""
    refuse_torchs_ranks()
    return hvdtrain.init("torch")


class OnRanks:
    """Put before Lightning's ParallelStrategy among a strategy's bases: devices and collectives."""

    _num_nodes = 1
    _parallel_devices: list[torch.device] | None = None

    def __init__(self, accelerator: Any, checkpoint_io: Any, precision: Any, **options: Any) -> None:
        self._world = join_ranks()
        environment = HorovodEnvironment(self._world)
        super().__init__(accelerator, None, environment, checkpoint_io, precision)  # type: ignore[call-arg]
        self._options = options  # of `hvd.DistributedOptimizer`
        self._distributed: list[Any] = []  # the optimizers, but for Lightning's stand-in where there is none

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        if not self._parallel_devices:
            raise RuntimeError("A strategy has a device once a Trainer or Fabric has taken it.")
        return self._parallel_devices[0]

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """One entry for each rank on this host; all are this rank's device, which alone it uses."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        self._parallel_devices = devices

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        self._num_nodes = number

    @property
    def is_distributed(self) -> bool:
        """True on one rank too, which then takes samples in the order that several ranks take them in."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """This rank's share of samples, for a sampler of the user's."""
        return {"num_replicas": self._world.size, "rank": self._world.rank}

    def _configure_launcher(self) -> None:
        """Compare what was asked for with what the launcher started; Lightning calls this last when it makes ready."""
        world, hosts, asked = self._world, int(hvd.cross_size()), self._parallel_devices or []
        kind = asked[0].type if asked else "cpu"
        if kind not in ("cpu", "cuda"):
            raise ValueError(f"Horovod trains on CPUs and on NVIDIA GPUs. Received: a device of type {kind!r}.")
        # "auto" is 1 on CPUs, and on GPUs all that this process sees.
        allowed = {1, world.local_size} | ({torch.cuda.device_count()} if kind == "cuda" else set())
        if len(asked) not in allowed or self._num_nodes not in (1, hosts):
            raise ValueError(
                f"devices={len(asked)} and num_nodes={self._num_nodes} contradict the launcher, which started "
                f"{world.size} rank(s) on {hosts} host(s), {world.local_size} of them on this one. Received on rank "
                f'{world.rank}. Remove devices= and num_nodes= (devices="auto"), and launch with '
                f"horovodrun -np {len(asked) * self._num_nodes} python script.py"
            )
        device = torch.device(world.device if kind == "cuda" else "cpu")
        if device.type != kind:
            raise ValueError(f"Received: a device of type {kind!r} on rank {world.rank}, whose device is {device}.")
        self._num_nodes, self._parallel_devices = hosts, [device] * world.local_size
        rank_zero_only.rank = world.rank

    def setup_environment(self) -> None:
        """Begin; RuntimeError if torch.distributed has ranks of its own by now."""
        refuse_torchs_ranks()
        super().setup_environment()  # type: ignore[misc]  # of Lightning's class, which comes after this one

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Return once every rank has called it."""
        hvd.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return rank `src`'s object on every rank."""
        return hvd.broadcast_object(obj, root_rank=src)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor reduced over ranks, as which it is modified; what is no tensor is returned as it is.

        The mean of integers is not cut off, as by Lightning's DDP: it is a float64, and `tensor` is not modified.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        refuse_group(group)
        op = _operation(reduce_op)
        if op == hvd.Average and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = tensor.to(torch.float64)
        return hvd.allreduce_(tensor.detach(), op=op)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor reduced over ranks: Fabric's name for `reduce`."""
        return self.reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return every rank's `tensor`, of equal shapes: (size, *shape), on one rank (*shape).

        With `sync_grads`, its gradient is the sum of the ranks' gradients, so that the mean of the parameters'
        gradients is that of one process.
        """
        refuse_group(group)
        if self._world.size == 1:
            return tensor
        row = (tensor if sync_grads else tensor.detach()).unsqueeze(0)
        if row.requires_grad:  # of hvd.allgather it is the mean
            row.register_hook(lambda gradient: gradient * self._world.size)
        return hvd.allgather(row)


def _operation(reduce_op: Any) -> int:
    """Return Horovod's number of an operation that Lightning names by a string or by torch's ReduceOp."""
    name = (reduce_op if isinstance(reduce_op, str) else getattr(reduce_op, "name", str(reduce_op))).lower()
    if name not in _OPS:
        raise ValueError(f"reduce_op must be one of {', '.join(_OPS)}. Received: {reduce_op!r}")
    return _OPS[name]


def refuse_group(group: Any) -> None:
    """Raise ValueError for a process group of torch.distributed."""
    if group is not None:
        raise ValueError(
            f"Process groups are torch.distributed's, and Horovod's ranks are in none. Received: {group!r}"
        )
