"""Gather batches of arrays in a thread, while the steps before them compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.trees import leaves, tree_map


class BatchMemory(Protocol):
    """The memory on the host in which batches are gathered, and from which a device copies them.

    `fill` is called in the thread, the others where the batches are read.
    """

    def place(self, array: NDArray[Any], rows: int) -> Any:
        """Return memory for so many rows of an array, which a batch holds; its content is not defined."""

    def fill(self, place: Any, array: NDArray[Any], rows: NDArray[np.int64]) -> None:
        """Gather the given rows of an array into their memory, without a call of the device."""

    def copy_ahead(self, places: list[Any]) -> None:
        """Begin to copy a batch to the device, unless that has begun or the device has no room."""


class _Asked(NamedTuple):
    """A batch that was asked of the thread."""

    tag: Any
    places: Any
    gathered: Future[None]


@dataclass(frozen=True)
class Prefetch:
    """Gathers batches of arrays before they are asked for.

    A thread gathers, and does nothing else: no code of the user's and no call of the device runs in it, so that it
    disturbs neither. It reads rows of arrays, whose numbers do not depend on when they are read. So a batch that nobody
    takes changes no state, and counts as not read.

    One batch is copied to the device before its step, while the one after it is gathered. More of them would only take
    memory: if a gather or a copy takes longer than a step, each step waits for it, however many batches are ahead.

    Attributes:
        memory: the memory of batches.
        step: how many batches a step takes at once.
        copies: True to copy a batch to the device before its step, not within it.
    """

    memory: BatchMemory
    step: int = 1
    copies: bool = False

    def read(self, columns: Any, wanted: Iterator[tuple[Any, NDArray[np.int64]]]) -> Iterator[tuple[Any, Any]]:
        """Yield the tag of each of `wanted`, which are tags and numbers of rows, with a tree of these rows.

        The thread ends with the iterator: after the last batch, after an error, and when the iterator is closed or
        dropped. An error of the gathering is raised where its batch is asked for.

        Args:
            columns: a tree of arrays.
            wanted: (tag, rows) of each batch, in order.
        """
        asked: deque[_Asked] = deque()
        thread = ThreadPoolExecutor(1, thread_name_prefix="hvdtrain-prefetch")
        try:
            while self._ask(thread, asked, columns, wanted):
                yield self._take(asked)  # nothing here holds the batch: its memory is free when the step drops it
        finally:
            thread.shutdown(cancel_futures=True)

    def _ask(
        self,
        thread: ThreadPoolExecutor,
        asked: deque[_Asked],
        columns: Any,
        wanted: Iterator[tuple[Any, NDArray[np.int64]]],
    ) -> bool:
        """Ask for the next batch and those after it that are to be ahead; return False if there is no more."""
        while len(asked) <= self.step + self.copies and (each := next(wanted, None)) is not None:
            tag, rows = each
            places = tree_map(lambda array: self.memory.place(array, len(rows)), columns)  # noqa: B023 - called at once
            asked.append(_Asked(tag, places, thread.submit(self._gather, leaves(places), leaves(columns), rows)))
        return bool(asked)

    def _gather(self, places: list[Any], arrays: list[NDArray[Any]], rows: NDArray[np.int64]) -> None:
        for place, array in zip(places, arrays, strict=True):
            self.memory.fill(place, array, rows)

    def _take(self, asked: deque[_Asked]) -> tuple[Any, Any]:
        """Return the first batch when it is gathered; begin to copy it, and the one after it if that is gathered."""
        batch = asked.popleft()
        batch.gathered.result()
        if self.copies:
            self.memory.copy_ahead(leaves(batch.places))
            if asked and asked[0].gathered.done() and asked[0].gathered.exception() is None:
                self.memory.copy_ahead(leaves(asked[0].places))
        return batch.tag, batch.places
