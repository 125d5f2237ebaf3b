"""A device on the host, of which copies start late: what is read or overwritten too early is not a number.

It stands for the few calls of CUDA that `hvdtrain.torch.ops.device_copies` needs. The thread that gathers is real.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hvdtrain.torch.ops import device_copies
from hvdtrain.torch.ops.device_copies import Copy, DeviceCopies

THREAD = "hvdtrain-prefetch"


class _Block(np.ndarray):
    """The bytes of a pinned tensor, which holds this object: it is gone when the tensor and its views are."""


class LateDevice:
    """Computes on the host, and copies as a GPU may: at once, or as late as the stream that computes allows.

    Args:
        is_late: a copy reads its source when the current stream waits for it, else when it begins. Both are possible on
            a GPU: the first shows memory that is overwritten early, the second memory that is not yet gathered.
        room: copies that may begin before the current stream waits for one; more are out of memory.
    """

    def __init__(self, *, is_late: bool, room: int | None = None) -> None:
        self.is_late, self.room = is_late, room
        self.log: list[tuple[str, int]] = []  # ("begin" or "expect", number of the copy)
        self.threads: set[str] = set()  # which have called the device
        self.made = self.reused = 0  # blocks of pinned memory
        self._free: list[np.ndarray] = []
        self._blocks: dict[int, np.ndarray] = {}  # of living tensors, by address
        self._pending: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._dead: dict[int, np.ndarray] = {}  # of tensors that are gone, with copies to be made
        self._in_use: dict[int, int] = {}  # by address: copies that are still to read it
        self._at: dict[int, int] = {}  # by the number of a copy: the address that it reads
        self._copies = 0

    # What `CopyDevice` has

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return pinned memory, as torch's allocator does: that of a dead tensor if all its copies are done."""
        self._called()
        size = max(1, int(np.prod(shape))) * dtype.itemsize
        raw = next((each for each in self._free if len(each) == size), None)
        if raw is None:
            self.made += 1
            raw = np.empty(size, np.uint8)
        else:
            self.reused += 1
            self._free = [each for each in self._free if each is not raw]
        raw[...] = 0xFF  # NaN in each floating type, -1 as a label
        block = raw.view(_Block)
        self._blocks[raw.ctypes.data] = raw
        weakref.finalize(block, self._freed, raw).atexit = False
        return torch.from_numpy(block).view(dtype)[: int(np.prod(shape))].reshape(shape)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or a copy of it that is pinned."""
        self._called()
        if not tensor.numel() or self._block_of(tensor) is not None:
            return tensor
        return self.pinned(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def begin(self, tensor: torch.Tensor) -> Copy:
        """Begin a copy; its memory is not a number until it is made."""
        self._called()
        if self.room is not None and self._copies - self._expected() >= self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        if not tensor.numel():  # has no memory
            return Copy(torch.empty_like(tensor), -1)
        raw = self._block_of(tensor)
        assert raw is not None, "a copy from memory that is not pinned makes the host wait"
        made = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        made.view(-1).view(torch.uint8).fill_(0xFF)
        number, self._copies = self._copies, self._copies + 1
        self.log.append(("begin", number))
        at = raw.ctypes.data
        self._in_use[at] = self._in_use.get(at, 0) + 1
        first, length = tensor.data_ptr() - at, raw.size // tensor.element_size() * tensor.element_size()
        memory = torch.from_numpy(raw)[:length].view(tensor.dtype)  # not the tensor: a copy does not hold its memory
        source = memory.as_strided(tensor.shape, tensor.stride(), first // tensor.element_size())
        self._pending.append((number, made, source))
        self._at[number] = at
        if not self.is_late:
            self._make(number)
        return Copy(made, number)

    def expect(self, copy: Copy) -> None:
        """Let what follows wait for a copy, and so for those before it on their stream."""
        self._called()
        self.log.append(("expect", copy.done))
        self._make(copy.done)

    # The rest

    def _called(self) -> None:
        self.threads.add(threading.current_thread().name)

    def _expected(self) -> int:
        return sum(kind == "expect" for kind, _ in self.log)

    def _block_of(self, tensor: torch.Tensor) -> np.ndarray | None:
        at = tensor.data_ptr()
        return next((raw for first, raw in self._blocks.items() if first <= at < first + len(raw)), None)

    def _make(self, last: int) -> None:
        """Make the copies up to this one."""
        while self._pending and self._pending[0][0] <= last:
            number, made, source = self._pending.pop(0)
            made.copy_(source)
            at = self._at.pop(number)
            self._in_use[at] -= 1
            if not self._in_use[at] and at not in self._blocks:
                self._release(self._dead.pop(at))

    def _freed(self, raw: np.ndarray) -> None:
        """Take the memory of a tensor that is gone, once its copies are made."""
        at = raw.ctypes.data
        del self._blocks[at]
        if self._in_use.get(at):
            self._dead[at] = raw
        else:
            self._release(raw)

    def _release(self, raw: np.ndarray) -> None:
        raw[...] = 0xFF
        self._free.append(raw)


def use(monkeypatch: pytest.MonkeyPatch, device: LateDevice | None) -> None:
    """Let Trainers copy batches to this device; None for no copies, as on a CPU."""
    monkeypatch.setattr(
        device_copies, "of", lambda where, dtype=None: None if device is None else DeviceCopies(device, dtype)
    )


def prefetch_threads() -> list[str]:
    """Return the names of living threads that gather."""
    return [each.name for each in threading.enumerate() if each.name.startswith(THREAD)]


def until(condition: Callable[[], bool]) -> None:
    """Wait until a thread has done something; an AssertionError after 20 seconds."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)
