"""The last commit of sharded states, for elastic jobs: see `hvdtrain.distributed.shard_commits`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.distributed.shard_commits import Bytes, Held, ShardCommits, ShardedState
from hvdtrain.keras import basics, ops
from hvdtrain.keras.shards import Shards, shards_of


def commits_of(variables: Callable[[], Iterable[Any]]) -> ShardCommits:
    """Return the commits of the shards whose slots are among the variables that a function returns."""
    return ShardCommits(lambda: [_State(each) for each in shards_of(list(variables()))], _Collectives())


class _State(ShardedState[Shards]):
    """Each slot variable is a weight of one entry."""

    @property
    def is_global(self) -> bool:
        return self.shards.division.size == basics.size()

    @property
    def numels(self) -> list[int]:
        return [math.prod(slot.whole_shape) for slot in self.shards.slots]

    def copies(self) -> Iterator[Held]:
        self.shards.check_ranks()
        for place, slot in enumerate(self.shards.slots):
            part = np.array(keras.ops.convert_to_numpy(slot))
            yield Held(place, "", None, part.view(np.uint8), part.itemsize)

    def put(self, held: Iterable[Held]) -> None:
        self.shards.put({each.place: each.part for each in held if each.part is not None})


class _Collectives:
    """Collectives of the Horovod that serves Keras's backend."""

    def rank(self) -> int:
        return basics.rank()

    def size(self) -> int:
        return basics.size()

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        return ops.allgather_object(value, name=f"hvdtrain.{name}")

    def alltoall(self, data: Bytes, splits: Sequence[int], name: str) -> Bytes:
        received, _ = ops.call("alltoall", data, np.array(splits, np.int32), name=f"hvdtrain.{name}")
        return received  # type: ignore[no-any-return]

    def barrier(self) -> None:
        ops.barrier()
