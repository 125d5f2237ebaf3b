"""The last commit of sharded states, for elastic jobs: see `hvdtrain.distributed.shard_commits`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from hvdtrain.distributed.shard_commits import Bytes, Held, ShardCommits, ShardedState
from hvdtrain.torch.ops import engine
from hvdtrain.torch.ops.functions import allgather_object
from hvdtrain.torch.ops.gather_ops import alltoall_async
from hvdtrain.torch.ops.reduce_ops import barrier
from hvdtrain.torch.reduction.sharded import Shards


def commits_of(shards: Callable[[], Sequence[Shards]]) -> ShardCommits:
    """Return the commits of the shards that a function returns; none if nothing is sharded, on all ranks alike."""
    return ShardCommits(lambda: [_State(each) for each in shards()], _Collectives())


class _State(ShardedState[Shards]):
    """Entries are those of `optimizer.state`."""

    @property
    def is_global(self) -> bool:
        return engine.is_global(self.shards.process_set)

    @property
    def numels(self) -> list[int]:
        return [parameter.numel() for parameter in self.shards.parameters]

    def copies(self) -> Iterator[Held]:
        self.shards.adopt()
        for place, name, value, is_part in self.shards.parts():
            if is_part:
                part = value.detach().to("cpu", copy=True)
                yield Held(place, name, value.dtype, part.view(torch.uint8).numpy(), value.element_size())
            elif isinstance(value, Tensor):
                yield Held(place, name, (value.detach().to("cpu", copy=True), not value.is_cpu))
            else:
                yield Held(place, name, (deepcopy(value), False))

    def put(self, held: Iterable[Held]) -> None:
        weights = self.shards.parameters
        self.shards.put_parts((each.place, each.name, _value(each, weights[each.place].device)) for each in held)


def _value(held: Held, device: torch.device) -> Any:
    """Return a copy of an entry as the optimizer has it."""
    if held.part is not None:
        copy = torch.empty(len(held.part) // held.itemsize, dtype=held.value, device="cpu")
        copy.view(torch.uint8).numpy()[:] = held.part
        return copy.to(device)
    value, on_device = held.value
    return value.to(device) if on_device else deepcopy(value)


class _Collectives:
    """Collectives of horovod.torch."""

    def rank(self) -> int:
        return int(engine.native().rank())

    def size(self) -> int:
        return int(engine.native().size())

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        return allgather_object(value, name)

    def alltoall(self, data: Bytes, splits: Sequence[int], name: str) -> Bytes:
        received, _ = alltoall_async(torch.from_numpy(data), list(splits), name).wait()
        return received.numpy()  # type: ignore[no-any-return]

    def barrier(self) -> None:
        barrier()
