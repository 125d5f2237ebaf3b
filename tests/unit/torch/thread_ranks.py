"""Ranks that are threads of this process, for what collectives on the host do."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hvdtrain.distributed.world import SoloWorld


class Meeting:
    """Where some ranks exchange arrays."""

    def __init__(self, ranks):
        self.ranks, self._slots, self._barrier = list(ranks), {}, threading.Barrier(len(ranks))

    def exchange(self, rank, array):
        self._slots[rank] = np.array(array)
        self._barrier.wait(5)
        everybody = [self._slots[each] for each in self.ranks]
        self._barrier.wait(5)
        return everybody


class FakeProcessSet:
    """A process set of Horovod's, as one of its ranks sees it."""

    def __init__(self, meeting, rank):
        self.meeting, self._rank = meeting, rank

    def size(self):
        return len(self.meeting.ranks)

    def rank(self):
        return self.meeting.ranks.index(self._rank)


class Threads(SoloWorld):
    """Ranks that are threads of this process."""

    def __init__(self, rank, size, meeting=None):
        super().__init__()
        self.rank, self.size, self._meeting = rank, size, meeting

    def _run(self, kind, array, *args, process_set=None, **options):
        meeting = self._meeting if process_set is None else process_set.meeting
        everybody = meeting.exchange(self.rank, array)
        if kind == "allgather":
            return np.concatenate(everybody)
        if kind == "broadcast":
            return everybody[args[0]]
        return {1: np.sum, 3: np.min, 4: np.max}[options["op"]](everybody, axis=0)


def on_ranks(size, function, *, data_sets=(), kind=Threads):
    """Return what `function(world)` returns on each rank, a world of this kind; raises rank 0's error first.

    `data_sets` are the lists of ranks that divide the data; none for all ranks together.
    """
    everyone, parts = Meeting(range(size)), [Meeting(ranks) for ranks in data_sets]

    def run(rank):
        world = kind(rank, size, everyone)
        world.data_set = next((FakeProcessSet(part, rank) for part in parts if rank in part.ranks), None)
        return function(world)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
