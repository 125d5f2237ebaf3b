"""Horovod's process sets for one process without Horovod: names and meanings of `horovod.common.process_sets`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

_set_ids = itertools.count(1)


class ProcessSet:
    """A set of ranks that run collectives together; alone, rank 0 is all there is."""

    process_set_id: int | None = None
    mpi_comm = None

    def __init__(self, ranks_or_comm: Iterable[int]) -> None:
        ranks = list(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError(f"ProcessSet takes a list of ranks. Received: {ranks_or_comm!r}")
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """Return the number of ranks in the set; None before it is registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return this process's rank in the set; None before it is registered."""
        return None if self.process_set_id is None else 0

    def included(self) -> bool:
        """Return whether this process is in the set."""
        return 0 in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([0])
global_process_set.process_set_id = 0


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set."""
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set.ranks not in ([], [0]):
        raise ValueError(f"There is one process, rank 0. Received: ranks={process_set.ranks}")
    process_set.process_set_id = next(_set_ids)
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set; return whether there was one to forget."""
    if not process_set.process_set_id:  # not registered, or the set of all ranks, which stays
        return False
    process_set.process_set_id = None
    return True
