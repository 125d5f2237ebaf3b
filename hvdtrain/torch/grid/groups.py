"""torch.distributed on Horovod: the backend "horovod", whose groups of ranks are Horovod's process sets.

torch's fully_shard, DTensor and pipelining call torch.distributed, and so do other libraries. On this backend they use
the job's own Horovod: its NCCL, MPI or Gloo, its launcher, its watchdog's messages, its sockets and no others. It takes
CPU and GPU tensors.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import ReduceOp

from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.ops import engine, gather_ops, reduce_ops

BACKEND = "horovod"
_NAMES = 32  # that operations of one kind and size take in turns: so many of them are in flight at once

_sets: dict[tuple[int, ...], Any] = {}  # Horovod's process sets, by their ranks


def start(groups: Iterable[tuple[int, ...]] = ()) -> None:
    """Initialise torch.distributed on Horovod, with these groups of ranks, equal on all ranks. A collective.

    Raises:
        HvdTrainError: torch.distributed is initialised already.
    """
    native = engine.native()
    rank, size = int(native.rank()), int(native.size())
    if dist.is_initialized():
        raise HvdTrainError(
            f"torch.distributed is initialised already, on {dist.get_backend()!r}. hvdtrain starts it over Horovod: "
            f"leave init_process_group out, and make one Grid. Received on rank {rank}"
        )
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    _sets.clear()
    _sets[tuple(range(size))] = native.global_process_set
    for ranks in sorted({tuple(sorted(group)) for group in groups} - set(_sets)):
        _sets[ranks] = native.add_process_set(list(ranks))
    hook = sys.excepthook
    # Horovod's ranks have found each other: torch's store has nothing to tell them.
    dist.init_process_group(BACKEND, store=HashStore(), rank=rank, world_size=size)
    sys.excepthook = hook  # torch's collects what the hook before it prints, and ours ends the process


def stop() -> None:
    """End torch.distributed, and remove the process sets. A collective."""
    native = engine.native()
    dist.destroy_process_group()
    for process_set in _sets.values():
        if process_set.process_set_id:  # not the set of all ranks
            native.remove_process_set(process_set)
    _sets.clear()


def process_set(ranks: Sequence[int]) -> Any:
    """Return Horovod's process set of these ranks, which `start` was given."""
    try:
        return _sets[tuple(sorted(ranks))]
    except KeyError:
        raise HvdTrainError(
            f"The grid has no group of the ranks {sorted(ranks)}. Use groups along its axes: grid.mesh(...). Received "
            f"on rank {engine.native().rank()}"
        ) from None


def _create(how: Any, _: Any) -> Group:
    return Group(list(how.global_ranks_in_group) or list(range(how.group_size)))


class InFlight(dist.Work):
    """One operation in flight. The script's tensors have its results after `wait`."""

    def __init__(
        self, handles: Sequence[Any], results: Sequence[Tensor], finish: Callable[..., Any] | None = None
    ) -> None:
        super().__init__()
        self._handles, self._results, self._finish = list(handles), list(results), finish
        self._is_done = False

    def wait(self, timeout: Any = None) -> bool:
        """Block until the operation is done; the job's watchdog limits the time."""
        if not self._is_done:
            received = [engine.synchronize(handle) for handle in self._handles]
            if self._finish is not None:
                with torch.no_grad():
                    self._finish(*received)
            self._is_done = True
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` will not block."""
        return self._is_done or all(map(engine.poll, self._handles))

    def get_future(self) -> Any:
        """Return a future that has the results."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self._results)
        return future


_ProcessGroup: Any = dist.ProcessGroup  # its types name other arguments than those by which torch calls it


class Group(_ProcessGroup):
    """A group of ranks of torch.distributed, as a process set of Horovod's.

    Operations are named after the group and counted in it. So all its ranks must call the same ones in the same order,
    as with any backend; where they do not, the watchdog names the operation and the rank that is missing.
    """

    def __init__(self, ranks: list[int]) -> None:
        self._ranks, self._set = ranks, process_set(ranks)
        self._sorted = sorted(ranks)  # Horovod's order
        self._own = ranks.index(int(engine.native().rank()))
        self._counts: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
        self._last: dict[str, weakref.ref[InFlight]] = {}  # by name
        self._named: list[str] = []
        super().__init__(self._own, len(ranks))

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the backend's name."""
        return BACKEND

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self._ranks)

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors this group takes: torch asks it when rank 0 has a state that others load.

        None until torch knows the group: before, torch 2.15 would give it a recorder, which needs a backend of C++.
        """
        is_known = self in dist.distributed_c10d._world.pg_names
        return [torch.device("cpu"), torch.device("cuda")] if is_known else []

    def _get_backend(self, device: Any) -> Group:
        """Return this group, which serves all devices. From 2.14 on torch asks it before a message what it supports."""
        return self

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return False: tensors need no memory of the backend's own."""
        return False

    @property
    def group_name(self) -> str:
        """The name under which torch has registered this group."""
        return str(dist.distributed_c10d._world.pg_names[self])

    pg_name = group_name

    # Reductions.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> InFlight:
        """Reduce each tensor in place."""
        how = _operation(opts.reduceOp if opts is not None else ReduceOp.SUM)
        return self._in_flight([self._reduce(tensor, how) for tensor in tensors], tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> InFlight:
        """Reduce onto one rank; the others' tensors stay as they are."""
        how, is_root = _operation(opts.reduceOp), opts.rootRank == self._own
        copies = [tensor if is_root else tensor.detach().clone() for tensor in tensors]
        return self._in_flight([self._reduce(copy, how) for copy in copies], tensors)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any) -> InFlight:
        """Reduce `source`, equal parts for each rank, and put this rank's part into `output`."""
        parts = source.detach().reshape(self.size(), -1)
        if self._ranks != self._sorted:
            parts = parts[[self._ranks.index(rank) for rank in self._sorted]]
        how = {
            "name": self._name("reducescatter", source.numel()),
            "process_set": self._set,
            **_operation(opts.reduceOp),
        }
        handle = gather_ops.reducescatter_async(parts, **how)
        return self._in_flight([handle], [output], lambda received: _fill(output, received))

    def reduce_scatter(self, outputs: list[Tensor], sources: list[list[Tensor]], opts: Any) -> InFlight:
        """Reduce a list with a tensor for each rank, of one shape."""
        return self.reduce_scatter_single(outputs[0], torch.stack([each.detach() for each in sources[0]]), opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], sources: list[Tensor], opts: Any) -> InFlight:
        """Reduce several tensors, each as `reduce_scatter_single`."""
        works = [self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, sources, strict=True)]
        return self._in_flight([work.wait for work in works], outputs)

    def barrier(self, opts: Any = None) -> InFlight:
        """Wait until all ranks of the group have called it."""
        return self.allreduce([torch.zeros(1, dtype=torch.float32, device="cpu")])

    # What moves tensors.

    def broadcast(self, tensors: list[Tensor], opts: Any) -> InFlight:
        """Overwrite tensors with those of the group's rank `opts.rootRank`."""
        how = {"root_rank": self._ranks[opts.rootRank], "process_set": self._set}
        handles = [
            gather_ops.broadcast_async_(t.detach(), name=self._name("broadcast", t.numel()), **how) for t in tensors
        ]
        return self._in_flight(handles, tensors)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> InFlight:
        """Concatenate the ranks' tensors, of one shape."""
        return self._in_flight([self._gather(source)], [output], lambda rows: _fill(output, self._in_order(rows)))

    def allgather(self, outputs: list[list[Tensor]], sources: list[Tensor], opts: Any = None) -> InFlight:
        """Gather the ranks' tensors, of one shape, into a list."""

        def finish(rows: Tensor) -> None:
            for output, row in zip(outputs[0], self._in_order(rows), strict=True):
                _fill(output, row)

        return self._in_flight([self._gather(sources[0])], outputs[0], finish)

    def all_gather_single_coalesced(self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None) -> InFlight:
        """Gather several tensors, each as `all_gather_single`."""
        works = [self.all_gather_single(*pair) for pair in zip(outputs, sources, strict=True)]
        return self._in_flight([work.wait for work in works], outputs)

    def gather(self, outputs: list[list[Tensor]], sources: list[Tensor], opts: Any) -> InFlight:
        """Gather the ranks' tensors, of one shape, on one rank."""
        to_root = [sources[0].numel() if each == opts.rootRank else 0 for each in range(self.size())]

        def finish(received: list[Tensor]) -> None:
            for output, part in zip(outputs[0] if outputs else [], received, strict=False):
                _fill(output, part)

        return self._exchange(sources[0], to_root, outputs[0] if outputs else [], finish)

    def scatter(self, outputs: list[Tensor], sources: list[list[Tensor]], opts: Any) -> InFlight:
        """Give each rank its tensor of the root's list."""
        is_root = opts.rootRank == self._own
        flat = torch.cat([each.detach().reshape(-1) for each in sources[0]]) if is_root else outputs[0].new_empty(0)
        lengths = [each.numel() for each in sources[0]] if is_root else [0] * self.size()
        return self._exchange(flat, lengths, outputs, lambda received: _fill(outputs[0], received[opts.rootRank]))

    def all_to_all_single(
        self, output: Tensor, source: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> InFlight:
        """Send rows of `source` to each rank: equal numbers of them, or `input_splits`."""
        rows = input_splits or [len(source) // self.size()] * self.size()
        each = source[0].numel() if len(source) else 0
        return self._exchange(
            source, [row * each for row in rows], [output], lambda received: _fill(output, torch.cat(received))
        )

    def alltoall(self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None) -> InFlight:
        """Send a tensor to each rank, and receive one from each."""
        flat = torch.cat([each.detach().reshape(-1) for each in sources])

        def finish(received: list[Tensor]) -> None:
            for output, part in zip(outputs, received, strict=True):
                _fill(output, part)

        return self._exchange(flat, [each.numel() for each in sources], outputs, finish)

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> InFlight:
        """Send a tensor to one rank of the group."""
        (tensor,) = tensors
        return self._in_flight([self._pass(tensor, self._own, dst, tag)], tensors)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> InFlight:
        """Receive a tensor from one rank of the group."""
        (tensor,) = tensors
        handle = self._pass(tensor.new_empty(0), src, self._own, tag)
        return self._in_flight([handle], tensors, lambda received: _fill(tensor, received[0]))

    # torch's older names, and those by which its C++ calls a group.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _name(self, kind: str, numbers: int | None = None) -> str:
        """Return a name for an operation on so many numbers, once the operation that had it before is done.

        Horovod remembers by name what ranks have agreed on, a length among it, so names are used again for equal
        lengths. Ranks whose lengths differ wait, and the watchdog shows the lengths in their names.
        """
        length = "" if numbers is None else f".{numbers}-numbers"
        alike = f"{engine.OF_TORCH}{kind}.ranks-{'-'.join(map(str, self._ranks))}{length}"
        name = f"{alike}.{next(self._counts[alike]) % _NAMES}"
        earlier = self._last[name]() if name in self._last else None
        if earlier is not None:
            earlier.wait()
        self._named.append(name)
        return name

    def _in_flight(self, handles: Sequence[Any], results: Sequence[Tensor], finish: Any = None) -> InFlight:
        """Return the operations in flight that were named since the last call."""
        work = InFlight(handles, results, finish)
        self._last |= dict.fromkeys(self._named, weakref.ref(work))
        self._named.clear()
        return work

    def _reduce(self, tensor: Tensor, how: dict[str, Any]) -> Any:
        name = self._name("allreduce", tensor.numel())
        return reduce_ops.allreduce_async_(tensor.detach(), name=name, process_set=self._set, **how)

    def _gather(self, source: Tensor) -> Any:
        row = source.detach().reshape(1, -1)
        return gather_ops.allgather_async(row, name=self._name("allgather", source.numel()), process_set=self._set)

    def _in_order(self, rows: Tensor) -> Tensor:
        """Return rows in the order of this group's ranks; Horovod sorts ranks."""
        return rows if self._ranks == self._sorted else rows[[self._sorted.index(rank) for rank in self._ranks]]

    def _exchange(
        self, source: Tensor, lengths: list[int], results: list[Tensor], finish: Callable[[list[Tensor]], None]
    ) -> InFlight:
        """Send the next `lengths[i]` numbers of `source` to the group's rank i; `finish` gets a part from each."""
        parts = source.detach().reshape(-1).split(lengths)
        places = [self._ranks.index(rank) for rank in self._sorted]
        flat = torch.cat([parts[place] for place in places])
        splits = torch.tensor([lengths[place] for place in places], dtype=torch.int32, device="cpu")
        how = {"splits": splits, "name": self._name("alltoall"), "process_set": self._set}

        def in_order(received: tuple[Tensor, Tensor]) -> None:
            got = received[0].split(received[1].tolist())
            finish([got[self._sorted.index(rank)] for rank in self._ranks])

        return self._in_flight([gather_ops.alltoall_async(flat, **how)], results, in_order)

    def _pass(self, tensor: Tensor, src: int, dst: int, tag: int) -> Any:
        """Start one end of a message between two ranks: an alltoall of the two, in which one of them sends."""
        ends = sorted((self._ranks[src], self._ranks[dst]))
        splits = [tensor.numel() if rank == self._ranks[dst] else 0 for rank in ends]
        how = {
            "splits": torch.tensor(splits, dtype=torch.int32, device="cpu"),
            "name": self._name(f"message.{self._ranks[src]}-{self._ranks[dst]}.{tag}"),
            "process_set": process_set(ends),
        }
        return gather_ops.alltoall_async(tensor.detach().reshape(-1), **how)


def _operation(op: Any) -> dict[str, Any]:
    """Return the arguments of Horovod's reductions for one of torch's."""
    known = {
        ReduceOp.SUM: engine.Sum, ReduceOp.AVG: engine.Average, ReduceOp.MIN: engine.Min, ReduceOp.MAX: engine.Max,
        ReduceOp.PRODUCT: engine.Product,
    }  # fmt: skip
    for torchs, horovods in known.items():
        if op == torchs:
            return {"op": horovods}
    if op == ReduceOp.PREMUL_SUM:  # of fully_shard's set_gradient_divide_factor
        return {"op": engine.Sum, "prescale_factor": float(op.__getstate__()[1])}
    raise HvdTrainError(f"Horovod has no such reduction. Received: {op} on rank {engine.native().rank()}")


def _fill(tensor: Tensor, received: Tensor) -> None:
    tensor.detach().copy_(received.reshape(tensor.shape))
