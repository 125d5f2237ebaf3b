"""The last commit of a sharded state, for elastic jobs: each rank keeps its parts, and those of a rank on another host.

Ranks that are left after a host was lost hold all parts together, and divide them among the ranks that there are then.
Copies are in the hosts' memory. No rank ever holds the whole state.

A framework has a `ShardedState` for each of its optimizers, and `Collectives`. Parts are bytes here: their type is the
framework's affair.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain.distributed import keepers
from hvdtrain.distributed.division import Division
from hvdtrain.distributed.launch_environment import count_ranks
from hvdtrain.errors import HvdTrainError, LostShardError

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

_OTHERS = (
    "Ranks hold other weights under optimizers whose state is in shards, so no rank can divide the state. Received: "
    "{mine} on rank 0 and {theirs} on rank {rank}, as numbers in each weight. Build the same model on every rank."
)

Bytes = NDArray[np.uint8]
Key = tuple[int, int, str]  # the optimizer, the place of the weight, the entry's name
Parts = dict[Key, Bytes]  # of one rank
Kind = TypeVar("Kind", bound="Shards")


@dataclass(frozen=True)
class Held:
    """An entry of a weight's state, as one rank holds it.

    Attributes:
        place: of the weight, among the optimizer's.
        name: of the entry.
        value: one that is equal on all ranks; of an entry in parts, what the framework must know to put it back.
        part: this rank's numbers; None if the entry is not in parts.
        itemsize: bytes of a number; 0 if the entry is not in parts.
    """

    place: int
    name: str
    value: Any
    part: Bytes | None = None
    itemsize: int = 0


class Shards(Protocol):
    """A framework's shards of one optimizer's state.

    Attributes:
        division: the parts of the present ranks.
        rank: this process's.
        is_stale: True if this rank's parts are those of an elastic job's earlier ranks.
    """

    division: Division
    rank: int
    is_stale: bool

    def follow_ranks(self) -> None:
        """Divide by the present ranks from now on."""


class ShardedState(ABC, Generic[Kind]):
    """The state of one optimizer, in shards whose parts are bytes.

    Args:
        shards: the framework's.
    """

    def __init__(self, shards: Kind) -> None:
        self.shards = shards

    @property
    def ranks(self) -> tuple[int, int]:
        """The number of ranks for which parts are divided, and this process's rank."""
        return self.shards.division.size, self.shards.rank

    @property
    @abstractmethod
    def is_global(self) -> bool:
        """True if these are all ranks."""

    @property
    @abstractmethod
    def numels(self) -> list[int]:
        """The numbers in each weight, in an order that is equal on all ranks."""

    @abstractmethod
    def copies(self) -> Iterator[Held]:
        """Yield copies of all that this rank holds, in an order that is equal on all ranks.

        Raises:
            HvdTrainError: the state is stale.
        """

    @abstractmethod
    def put(self, held: Iterable[Held]) -> None:
        """Replace the state by copies of these entries."""


class Collectives(Protocol):
    """What all ranks do together."""

    def rank(self) -> int:
        """This process's number among all ranks."""

    def size(self) -> int:
        """Number of ranks."""

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        """Return every rank's object, in rank order."""

    def alltoall(self, data: Bytes, splits: Sequence[int], name: str) -> Bytes:
        """Send so many bytes to each rank, in rank order; return what came, likewise."""

    def barrier(self) -> None:
        """Return once every rank has called it."""


@dataclass(frozen=True)
class Entry:
    """An entry of the state, as all ranks know it; see `Held`."""

    key: Key
    value: Any
    itemsize: int


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
        return (self.end - self.begin) * self.entry.itemsize


class ShardCommits:
    """The last commit of the sharded states of some optimizers; all ranks call its methods together.

    Between `prepare` and `confirm` ranks save whatever else belongs to the commit, and no rank can fail alone there.
    Until the next `confirm` has succeeded on a rank, it keeps the earlier commit: some ranks may have saved the one,
    some the other. The root's counts.

    Args:
        states: returns the sharded states; none if nothing is sharded, which must be so on all ranks.
        collectives: the framework's.
    """

    def __init__(self, states: Callable[[], Sequence[ShardedState[Any]]], collectives: Collectives) -> None:
        self._get_states, self._all = states, collectives
        self._commits: dict[int, Commit] = {}
        self._number = 0  # of the commit to which this rank's other state belongs; 0 for none

    @property
    def nbytes(self) -> int:
        """The bytes that this rank holds for the commit."""
        every = (each for commit in self._commits.values() for each in commit.parts.values())
        return sum(part.nbytes for parts in every for part in parts.values())

    @property
    def are_there(self) -> bool:
        """True if a state is sharded; equal on all ranks."""
        return bool(self._get_states())

    def prepare(self) -> None:
        """Copy this rank's parts, and give its keeper a copy; when it returns, all ranks have done so. A collective."""
        if not self._begin():
            return
        entries, own = self._copy()
        names = self._all.allgather_object(keepers.this_host(), "shards.hosts")
        hosts, rank = keepers.hosts_of(names), self._all.rank()
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

        def keep(move: Move, numbers: Bytes) -> None:
            self._numbers(commit, move)[:] = numbers

        self._exchange(layout, moves, lambda move: self._numbers(commit, move), keep)
        self._commits[layout.number] = commit
        self._all.barrier()

    def confirm(self) -> None:
        """Note that this rank has saved all that belongs to the commit, and drop the earlier one; a collective."""
        if not self.are_there:
            return
        self._number += 1
        self._all.barrier()
        self._commits = {self._number: self._commits[self._number]}

    def restore(self) -> None:
        """Put this rank's own parts of its last commit back, if it has the same ranks. Not a collective."""
        commit = self._commits.get(self._number)
        if self._begin() and commit is not None:
            self._put(commit.layout.entries, commit.parts[commit.rank], ranks=(len(commit.layout.hosts), commit.rank))

    def load(self, *, wanted: bool = True) -> bool:
        """Divide the root's last commit among the present ranks; False if it has none. A collective.

        Args:
            wanted: False on every rank that has the state of the last commit; if it is so on all, nothing is done.

        Returns:
            True if parts were replaced.

        Raises:
            LostShardError: on every rank, if a part is held by no rank.
            HvdTrainError: likewise, if ranks have other weights.
        """
        states = self._begin()
        if not states:
            return False
        for each in states:
            each.shards.follow_ranks()
        rank, size = self._all.rank(), self._all.size()
        own = self._commits.get(self._number)
        held = {number: sorted(commit.parts) for number, commit in self._commits.items()}
        layout = own.layout if own is not None and rank == 0 else None
        mine = wanted, held, layout, any(each.shards.is_stale for each in states), self._numels
        everyones = self._all.allgather_object(mine, "shards.commits")
        for number, (*_, theirs) in enumerate(everyones):
            if theirs != everyones[0][-1]:
                raise HvdTrainError(_OTHERS.format(mine=everyones[0][-1], theirs=theirs, rank=number))
        if not any(wanted for wanted, *_ in everyones):
            return False
        layout = everyones[0][2]
        if layout is None:
            self._commits, self._number = {}, 0
            if any(is_stale for *_, is_stale, _ in everyones):
                raise LostShardError(_UNCOMMITTED)
            return False
        senders = _choose_senders(layout, [held.get(layout.number, []) for _, held, *_ in everyones])
        commit = self._commits.get(layout.number)
        before, now = Division(len(layout.hosts)), Division(size)
        parts = self._room(layout, rank, now)

        def moves(entry: Entry, numel: int) -> Iterator[Move]:
            for part, sender in enumerate(senders):
                first, last = before.bounds(numel, part)
                for receiver in range(size):
                    begin, end = now.bounds(numel, receiver)
                    yield Move(entry, part, sender, receiver, max(first, begin), min(last, end))

        def keep(move: Move, numbers: Bytes) -> None:
            begin, _ = now.bounds(self._numel(move.entry.key), rank)
            _cut(parts[move.entry.key], move, begin)[:] = numbers

        self._exchange(layout, moves, lambda move: self._numbers(commit, move), keep)
        self._put(layout.entries, parts, ranks=(size, rank))
        self._number = layout.number
        self._commits = {} if commit is None else {layout.number: commit}
        return True

    # Parts

    def _begin(self) -> Sequence[ShardedState[Any]]:
        """Return the sharded states, whose weights may be others than before."""
        self._states = self._get_states()
        self._numels = [each.numels for each in self._states]
        return self._states

    def _copy(self) -> tuple[list[Entry], Parts]:
        """Return the entries, and copies of this rank's parts."""
        entries, own = [], {}
        for optimizer, each in enumerate(self._states):
            if not each.is_global:
                raise ValueError(
                    "A commit of a sharded state is over all ranks. Received: an optimizer whose state is sharded over "
                    f"{count_ranks(each.ranks[0])} of {self._all.size()}. Use process_set=None, or no shards."
                )
            for held in each.copies():
                key = (optimizer, held.place, held.name)
                entries.append(Entry(key, held.value, held.itemsize))
                if held.part is not None:
                    own[key] = held.part
        return entries, own

    def _put(self, entries: Sequence[Entry], parts: Parts, *, ranks: tuple[int, int]) -> None:
        """Put copies of parts into the optimizers, if they are divided for so many ranks and this one."""
        for optimizer, state in enumerate(self._states):
            if ranks != state.ranks:
                continue
            own = [entry for entry in entries if entry.key[0] == optimizer]
            state.put(Held(*each.key[1:], each.value, parts.get(each.key), each.itemsize) for each in own)

    def _room(self, layout: Layout, rank: int, division: Division | None = None) -> Parts:
        """Return arrays for the parts of a rank, by default of one of the commit's."""
        division, room = division or Division(len(layout.hosts)), {}
        for entry in layout.entries:
            if entry.itemsize:
                begin, end = division.bounds(self._numel(entry.key), rank)
                room[entry.key] = np.empty((end - begin) * entry.itemsize, np.uint8)
        return room

    def _numbers(self, commit: Commit | None, move: Move) -> Bytes:
        """Return a view of the numbers of a part that is held here."""
        assert commit is not None  # its layout says that this rank has the part
        key = move.entry.key
        first, _ = Division(len(commit.layout.hosts)).bounds(self._numel(key), move.part)
        return _cut(commit.parts[move.part][key], move, first)

    def _numel(self, key: Key) -> int:
        optimizer, place, _ = key
        return self._numels[optimizer][place]

    # Exchange

    def _exchange(
        self,
        layout: Layout,
        moves: Callable[[Entry, int], Iterator[Move]],
        read: Callable[[Move], Bytes],
        write: Callable[[Move, Bytes], None],
    ) -> None:
        """Send what `moves` yields for each entry, in the same order on all ranks; a collective."""
        rank, size = self._all.rank(), self._all.size()
        for number, bucket in enumerate(self._buckets(layout, moves)):
            out, coming = ([list[Move]() for _ in range(size)] for _ in range(2))
            for move in bucket:
                if move.sender == rank:
                    out[move.receiver].append(move)
                if move.receiver == rank:
                    coming[move.sender].append(move)
            data = np.concatenate([np.empty(0, np.uint8), *(read(move) for row in out for move in row)])
            splits = [sum(move.nbytes for move in row) for row in out]
            received = self._all.alltoall(data, splits, f"shards.commit.{number}")
            place = 0
            for move in (move for row in coming for move in row):
                write(move, received[place : place + move.nbytes])
                place += move.nbytes

    def _buckets(self, layout: Layout, moves: Callable[[Entry, int], Iterator[Move]]) -> Iterator[list[Move]]:
        """Yield the moves that are sent together."""
        bucket, bucket_bytes = list[Move](), 0
        for entry in layout.entries:
            if not entry.itemsize:
                continue
            numel, step = self._numel(entry.key), _MOST_BYTES // entry.itemsize
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


def _cut(part: Bytes, move: Move, first: int) -> Bytes:
    """Return a view of a move's numbers in a part that begins at the number `first` of the weight."""
    itemsize = move.entry.itemsize
    return part[(move.begin - first) * itemsize : (move.end - first) * itemsize]


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
