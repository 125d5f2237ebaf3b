"""The last commit of a sharded state, for elastic jobs: each rank keeps its parts, and those of a rank on another host.

Ranks that are left after a host was lost hold all parts together, and divide them among the ranks that there are then.
Copies are in the hosts' memory. No rank ever holds the whole state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hvdtrain.distributed import keepers
from hvdtrain.distributed.launch_environment import count_ranks
from hvdtrain.errors import LostShardError
from hvdtrain.torch.ops import engine
from hvdtrain.torch.ops.functions import allgather_object
from hvdtrain.torch.ops.gather_ops import alltoall_async
from hvdtrain.torch.ops.reduce_ops import barrier
from hvdtrain.torch.reduction.division import Division
from hvdtrain.torch.reduction.sharded import Shards

_LOST = (
    "A part of the optimizer's state is lost: {lost} ended before another commit. Start the job again; with a "
    "checkpoint_dir, fit resumes from the newest checkpoint. Copies are on other hosts: a host at a time may be lost "
    "between two commits. Received: parts of ranks {held}, of {ranks}."
)
_UNCOMMITTED = (
    "A rank has ended before the first commit, and a part of the optimizer's state with it, which the optimizer had "
    "before. Start the job again."
)

_AT_ONCE_BYTES = 2**26  # of all ranks' parts that are sent together
_MOST_BYTES = 2**30  # of one weight's: Horovod counts what it sends to a rank in 32 bits

Key = tuple[int, int, str]  # the optimizer, the place of the weight, the entry's name
Parts = dict[Key, Tensor]  # of one rank, on the host


@dataclass(frozen=True)
class Entry:
    """An entry of the state: one of which each rank has a part, if it has a `dtype`, or a value equal on all ranks."""

    key: Key
    dtype: torch.dtype | None
    value: Any = None
    on_device: bool = False  # True if the value is a tensor where the weight is


@dataclass(frozen=True)
class Layout:
    """A commit as all its ranks know it."""

    number: int
    hosts: list[str]  # by rank
    keepers: list[int]  # by rank: who keeps a copy of its parts
    entries: list[Entry]


@dataclass(frozen=True)
class Commit:
    """A commit as one rank holds it."""

    layout: Layout
    rank: int  # this process's, of then
    parts: dict[int, Parts]  # by the rank of then: its own, and those of which it keeps a copy


@dataclass(frozen=True)
class Move:
    """Some numbers of one entry, which one rank sends to another."""

    entry: Entry
    part: int  # the rank of the commit whose part has them
    sender: int
    receiver: int
    begin: int  # in the whole weight
    end: int

    @property
    def nbytes(self) -> int:
        """The size of the numbers."""
        assert self.entry.dtype is not None
        return (self.end - self.begin) * self.entry.dtype.itemsize


class ShardCommits:
    """The last commit of the sharded states of some optimizers; all ranks call its methods together.

    Between `prepare` and `confirm` ranks save whatever else belongs to the commit, and no rank can fail alone there.
    Until the next `confirm` has succeeded on a rank, it keeps the earlier commit: some ranks may have saved the one,
    some the other. The root's counts.

    Args:
        shards: returns the sharded states; none if nothing is sharded, which must be so on all ranks.
    """

    def __init__(self, shards: Callable[[], Sequence[Shards]]) -> None:
        self._get_shards = shards
        self._commits: dict[int, Commit] = {}
        self._number = 0  # of the commit to which this rank's other state belongs; 0 for none

    @property
    def nbytes(self) -> int:
        """The bytes that this rank holds for the commit."""
        every = (each for commit in self._commits.values() for each in commit.parts.values())
        return sum(tensor.nbytes for parts in every for tensor in parts.values())

    @property
    def are_there(self) -> bool:
        """True if a state is sharded; equal on all ranks."""
        return bool(self._get_shards())

    def prepare(self) -> None:
        """Copy this rank's parts, and give its keeper a copy; when it returns, all ranks have done so. A collective."""
        shards = self._begin()
        if not shards:
            return
        entries, own = self._copy(shards)
        names = allgather_object(keepers.this_host(), "shards.hosts")
        hosts, rank = keepers.hosts_of(names), int(engine.native().rank())
        layout = Layout(self._number + 1, hosts, keepers.choose(hosts), entries)
        commit = Commit(layout, rank, {rank: own})
        for other, keeper in enumerate(layout.keepers):
            if keeper == rank != other:
                commit.parts[other] = self._room(layout, other)
        division = Division(len(hosts))

        def moves(entry: Entry, numel: int) -> Iterator[Move]:
            for part, keeper in enumerate(layout.keepers):
                if part != keeper:
                    yield Move(entry, part, part, keeper, *division.bounds(numel, part))

        def keep(move: Move, numbers: Tensor) -> None:
            self._numbers(commit, move).copy_(numbers)

        self._exchange(layout, moves, lambda move: self._numbers(commit, move), keep)
        self._commits[layout.number] = commit
        barrier()

    def confirm(self) -> None:
        """Note that this rank has saved all that belongs to the commit, and drop the earlier one; a collective."""
        if not self.are_there:
            return
        self._number += 1
        barrier()
        self._commits = {self._number: self._commits[self._number]}

    def restore(self) -> None:
        """Put this rank's own parts of its last commit back, if it has the same ranks. Not a collective."""
        commit = self._commits.get(self._number)
        if self._begin() and commit is not None:
            self._put(commit.layout.entries, commit.parts[commit.rank], ranks=(len(commit.layout.hosts), commit.rank))

    def load(self) -> bool:
        """Divide the root's last commit among the present ranks; False if it has none. A collective.

        Raises:
            LostShardError: on every rank, if a part is held by no rank.
        """
        shards = self._begin()
        if not shards:
            return False
        for each in shards:
            each.follow_ranks()
        rank, size = int(engine.native().rank()), int(engine.native().size())
        own = self._commits.get(self._number)
        held = {number: sorted(commit.parts) for number, commit in self._commits.items()}
        layout = own.layout if own is not None and rank == 0 else None
        everyones = allgather_object((held, layout, any(each.is_stale for each in shards)), "shards.commits")
        layout = everyones[0][1]
        if layout is None:
            self._commits, self._number = {}, 0
            if any(is_stale for *_, is_stale in everyones):
                raise LostShardError(_UNCOMMITTED)
            return False
        senders = _choose_senders(layout, [held.get(layout.number, []) for held, *_ in everyones])
        commit = self._commits.get(layout.number)
        before, now = Division(len(layout.hosts)), Division(size)
        mine = self._room(layout, rank, now)

        def moves(entry: Entry, numel: int) -> Iterator[Move]:
            for part, sender in enumerate(senders):
                first, last = before.bounds(numel, part)
                for receiver in range(size):
                    begin, end = now.bounds(numel, receiver)
                    yield Move(entry, part, sender, receiver, max(first, begin), min(last, end))

        def keep(move: Move, numbers: Tensor) -> None:
            begin, _ = now.bounds(self._numel(move.entry.key), rank)
            mine[move.entry.key][move.begin - begin : move.end - begin] = numbers

        self._exchange(layout, moves, lambda move: self._numbers(commit, move), keep)
        self._put(layout.entries, mine, ranks=(size, rank))
        self._number = layout.number
        self._commits = {} if commit is None else {layout.number: commit}
        return True

    # Parts

    def _begin(self) -> Sequence[Shards]:
        """Return the sharded states, whose weights may be others than before."""
        self._shards = self._get_shards()
        self._weights = [each.parameters for each in self._shards]
        return self._shards

    def _copy(self, shards: Sequence[Shards]) -> tuple[list[Entry], Parts]:
        """Return the entries, and copies of this rank's parts."""
        entries, own = [], {}
        for optimizer, each in enumerate(shards):
            if not engine.is_global(each.process_set):
                raise ValueError(
                    "A commit of a sharded state is over all ranks. Received: an optimizer whose state is sharded over "
                    f"the process set {each.process_set}. Use process_set=None, or no shards."
                )
            each.adopt()
            for index, name, value, is_part in each.parts():
                key = (optimizer, index, name)
                if is_part:
                    own[key] = value.detach().to("cpu", copy=True)
                    entries.append(Entry(key, value.dtype))
                elif isinstance(value, Tensor):
                    entries.append(Entry(key, None, value.detach().to("cpu", copy=True), not value.is_cpu))
                else:
                    entries.append(Entry(key, None, deepcopy(value)))
        return entries, own

    def _put(self, entries: Sequence[Entry], parts: Parts, *, ranks: tuple[int, int]) -> None:
        """Put copies of parts into the optimizers, if they are divided for so many ranks and this one."""
        for optimizer, shards in enumerate(self._shards):
            if ranks != (shards.division.size, shards.rank):
                continue
            own = [entry for entry in entries if entry.key[0] == optimizer]
            shards.put_parts((*entry.key[1:], self._value(entry, parts)) for entry in own)

    def _value(self, entry: Entry, parts: Parts) -> Any:
        """Return a copy of an entry as the optimizer has it."""
        device = self._weight(entry.key).device
        if entry.dtype is not None:
            return parts[entry.key].to(device, copy=True)
        return entry.value.to(device) if entry.on_device else deepcopy(entry.value)

    def _room(self, layout: Layout, rank: int, division: Division | None = None) -> Parts:
        """Return tensors for the parts of a rank, by default of one of the commit's."""
        division, room = division or Division(len(layout.hosts)), {}
        for entry in layout.entries:
            if entry.dtype is not None:
                begin, end = division.bounds(self._numel(entry.key), rank)
                room[entry.key] = torch.empty(end - begin, dtype=entry.dtype)
        return room

    def _numbers(self, commit: Commit | None, move: Move) -> Tensor:
        """Return a view of the numbers of a part that is held here."""
        assert commit is not None  # its layout says that this rank has the part
        key = move.entry.key
        first, _ = Division(len(commit.layout.hosts)).bounds(self._numel(key), move.part)
        return commit.parts[move.part][key][move.begin - first : move.end - first]

    def _weight(self, key: Key) -> Tensor:
        optimizer, index, _ = key
        return self._weights[optimizer][index]

    def _numel(self, key: Key) -> int:
        return self._weight(key).numel()

    # Exchange

    def _exchange(
        self,
        layout: Layout,
        moves: Callable[[Entry, int], Iterator[Move]],
        read: Callable[[Move], Tensor],
        write: Callable[[Move, Tensor], None],
    ) -> None:
        """Send what `moves` yields for each entry, in the same order on all ranks; a collective."""
        rank, size = int(engine.native().rank()), int(engine.native().size())
        for number, bucket in enumerate(self._buckets(layout, moves)):
            out, coming = ([list[Move]() for _ in range(size)] for _ in range(2))
            for move in bucket:
                if move.sender == rank:
                    out[move.receiver].append(move)
                if move.receiver == rank:
                    coming[move.sender].append(move)
            sent = [read(move).view(torch.uint8) for row in out for move in row]
            data = torch.cat([torch.empty(0, dtype=torch.uint8), *sent])
            splits = [sum(move.nbytes for move in row) for row in out]
            received, _ = alltoall_async(data, splits, f"shards.commit.{number}").wait()
            place = 0
            for move in (move for row in coming for move in row):
                # A copy begins at an address that any type can have.
                write(move, received[place : place + move.nbytes].clone().view(move.entry.dtype))
                place += move.nbytes

    def _buckets(self, layout: Layout, moves: Callable[[Entry, int], Iterator[Move]]) -> Iterator[list[Move]]:
        """Yield the moves that are sent together."""
        bucket, bucket_bytes = list[Move](), 0
        for entry in layout.entries:
            if entry.dtype is None:
                continue
            numel, step = self._numel(entry.key), _MOST_BYTES // entry.dtype.itemsize
            for first in range(0, numel, step):
                last = min(first + step, numel)
                cut = (replace(m, begin=max(first, m.begin), end=min(last, m.end)) for m in moves(entry, numel))
                here = [move for move in cut if move.begin < move.end]
                here_bytes = sum(move.nbytes for move in here)
                if bucket and bucket_bytes + here_bytes > _AT_ONCE_BYTES:
                    yield bucket
                    bucket, bucket_bytes = [], 0
                bucket += here
                bucket_bytes += here_bytes
        if bucket:
            yield bucket


def _choose_senders(layout: Layout, held: Sequence[Sequence[int]]) -> list[int]:
    """Return, for each part of a commit, the present rank that sends it.

    Args:
        layout: the commit.
        held: the parts that each present rank has.

    Raises:
        LostShardError: no rank has one of the parts.
    """
    senders, hosts = [], layout.hosts
    load = [0] * len(held)
    for part in range(len(hosts)):
        holders = [rank for rank, parts in enumerate(held) if part in parts]
        if not holders:
            break
        senders.append(min(holders, key=load.__getitem__))
        load[senders[-1]] += 1
    else:
        return senders
    there = {part for parts in held for part in parts}
    lost = [
        f"rank {part} (host {hosts[part]})"
        + f" and the keeper of its copy, rank {keeper} (host {hosts[keeper]})," * (keeper != part)
        for part, keeper in enumerate(layout.keepers)
        if part not in there
    ]
    raise LostShardError(_LOST.format(lost=" ".join(lost), held=sorted(there), ranks=count_ranks(len(hosts))))
