"""Copy batches to a GPU on a stream of their own, from pinned memory, beside what the GPU computes."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from hvdtrain.telemetry.memory import is_out_of_memory

_BEGUN = "_hvd_copy"  # an attribute of a tensor on the host: its copy, which has begun


class Copy(NamedTuple):
    """A copy of a tensor that has begun."""

    tensor: torch.Tensor  # on the device
    done: Any  # the event after it


class CopyDevice(Protocol):
    """The calls of CUDA that a copy needs."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in pinned memory, without defined content.

        Its memory is used again when the tensor and its views are gone, and all copies of them are done.
        """

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the host in pinned memory: the tensor itself if it is there."""

    def begin(self, tensor: torch.Tensor) -> Copy:
        """Begin to copy a pinned tensor, on the stream of copies; this waits for nothing."""

    def expect(self, copy: Copy) -> None:
        """Let the current stream wait for a copy, and the copy's memory belong to this stream, too."""


class CudaDevice:
    """A CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor in pinned memory.

        Torch's allocator has memory that is reused: it records an event at each copy, and asks for it.
        """
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the host in pinned memory."""
        return tensor.pin_memory()

    def begin(self, tensor: torch.Tensor) -> Copy:
        """Begin to copy a pinned tensor.

        The stream of copies does not wait for what is computed: the memory of its tensors is its own.
        """
        with torch.cuda.stream(self._stream):
            return Copy(tensor.to(self._device, non_blocking=True), self._stream.record_event())

    def expect(self, copy: Copy) -> None:
        """Let the current stream wait for a copy.

        Without `record_stream` the next copy could get the memory as soon as the host drops the tensor, before the
        device has read it.
        """
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(copy.done)
        copy.tensor.record_stream(stream)


class DeviceCopies:
    """Copies tensors to a device. A `BatchMemory` of `Prefetch`, too: pinned tensors, which it copies ahead.

    Args:
        device: where to.
        dtype: what float64 arrays become in `place`.
    """

    def __init__(self, device: CopyDevice, dtype: torch.dtype | None = None) -> None:
        self._device, self._dtype = device, dtype
        self._has_room = True

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the host on the device, for use by the current stream; the host does not wait.

        Each call returns memory of its own, since a step may overwrite its batch, and a repeated step needs it again.
        """
        copy = vars(tensor).pop(_BEGUN, None) or self._device.begin(self._device.pin(tensor))
        self._device.expect(copy)
        return copy.tensor

    def place(self, array: NDArray[Any], rows: int) -> Any:
        """Return a pinned tensor, or an array where torch has no such type."""
        shape, dtype = (rows, *array.shape[1:]), _dtype_of(array)
        if dtype is None:
            return np.empty(shape, array.dtype)
        return self._device.pinned(shape, batch_dtype(dtype, self._dtype))

    def fill(self, place: Any, array: NDArray[Any], rows: NDArray[np.int64]) -> None:
        """Gather rows."""
        if isinstance(place, torch.Tensor):
            if place.dtype != _dtype_of(array):
                place.copy_(torch.from_numpy(array[rows]))  # which rounds as it would on the device
                return
            place = place.numpy()
        if array.flags.c_contiguous:
            # All rows are there; to raise for others, NumPy would gather into a buffer first.
            np.take(array, rows, axis=0, out=place, mode="clip")
        else:
            place[...] = array[rows]  # np.take would first copy the whole array

    def copy_ahead(self, places: list[Any]) -> None:
        """Begin to copy a batch, as long as the device has room: without, each step copies its batch when it needs it.

        Only a step itself can do something about memory: see `MicroBatches`.
        """
        tensors = [each for each in places if isinstance(each, torch.Tensor) and _BEGUN not in vars(each)]
        for tensor in tensors if self._has_room else ():
            try:
                vars(tensor)[_BEGUN] = self._device.begin(tensor)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._has_room = False
                return


def of(device: torch.device, dtype: torch.dtype | None = None) -> DeviceCopies | None:
    """Return the copies to a GPU; None for a device that needs none."""
    return DeviceCopies(CudaDevice(device), dtype) if device.type == "cuda" else None


def batch_dtype(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the type that an array of a batch gets: float64, NumPy's default, becomes `wanted`, or torch's default."""
    return (wanted or torch.get_default_dtype()) if dtype == torch.float64 else dtype


def _dtype_of(array: NDArray[Any]) -> torch.dtype | None:
    """Return the type of an array as a tensor; None if torch has none."""
    if array.dtype.kind not in "biufc":
        return None
    try:
        return torch.from_numpy(np.empty(0, array.dtype)).dtype
    except (TypeError, ValueError):  # ValueError: the bytes are in the other order
        return None
