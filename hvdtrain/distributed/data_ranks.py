"""The ranks that divide the data, and the ranks with one part of a model, with collectives on host arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdtrain.distributed.world import Array, Op, World


@dataclass(frozen=True)
class _Ranks:
    """The ranks of a process set, this one among them."""

    world: World

    # Read each time, as the World's: an elastic job renumbers ranks.

    @property
    def process_set(self) -> Any:
        """Horovod's process set; None for all ranks."""
        raise NotImplementedError

    @property
    def rank(self) -> int:
        """This process's number among these ranks, in [0, size)."""
        return self.world.rank if self.process_set is None else int(self.process_set.rank())

    @property
    def size(self) -> int:
        """Number of these ranks: of replicas."""
        return self.world.size if self.process_set is None else int(self.process_set.size())

    def allreduce(self, array: Array, op: Op = "sum", *, name: str) -> Array:
        """Reduce `array` over these ranks; see `World.allreduce`."""
        return self.world.allreduce(array, op, name=name, process_set=self.process_set)

    def allgather(self, array: Array, *, name: str) -> Array:
        """Concatenate these ranks' arrays; see `World.allgather`."""
        return self.world.allgather(array, name=name, process_set=self.process_set)

    def allgather_bytes(self, data: bytes, *, name: str) -> list[bytes]:
        """Return the bytes of each of these ranks, in their order."""
        return self.world.allgather_bytes(data, name=name, process_set=self.process_set)

    def allgather_object(self, obj: Any, *, name: str) -> list[Any]:
        """Return the JSON value of each of these ranks, in their order."""
        return self.world.allgather_object(obj, name=name, process_set=self.process_set)


class DataRanks(_Ranks):
    """The ranks that divide the data, one for each replica of the model: all ranks, unless `World.data_set` is fewer.

    Ask DataRanks for what counts samples or replicas: parts of data, weights of losses, sums of metrics, the learning
    rate, progress. Ask the World for what every process takes part in (checkpoints, heartbeats, barriers, agreement,
    the order of all samples), and for the number of a rank in messages.
    """

    @property
    def process_set(self) -> Any:
        """Horovod's process set; None for all ranks."""
        return self.world.data_set


class PartRanks(_Ranks):
    """The ranks that hold the same part of the model, one in each replica: all ranks, unless a Grid divides it.

    Ask PartRanks for what averages gradients or weights, or compares them. With shards they are fewer than DataRanks.
    """

    @property
    def process_set(self) -> Any:
        """Horovod's process set; None for all ranks."""
        return self.world.part_set
