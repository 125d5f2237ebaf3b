"""Compressors that remember what they have left out of each gradient, and add it to the next one."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from hvdtrain.distributed.compression import Scheme
from hvdtrain.distributed.gradient_memory import ERROR, Memory
from hvdtrain.torch.ops.compression.compressor import Compressor
from hvdtrain.torch.ops.engine import Handle, Staged, Sum
from hvdtrain.torch.ops.submit import Reduction
from hvdtrain.torch.ops.wire import as_real, from_real


class TensorMemory(Memory[Tensor]):
    """Values are tensors, on any device."""

    def as_like(self, held: Tensor, like: Tensor) -> Tensor:
        """Return `held` on the device and in the type of `like`."""
        return held.to(like.device, like.dtype)

    def to_array(self, value: Tensor) -> NDArray[Any]:
        """Return a copy on the host."""
        array: NDArray[Any] = value.cpu().numpy().copy()
        return array

    def from_array(self, array: NDArray[Any]) -> Tensor:
        """Return a copy on the host."""
        return torch.from_numpy(array.copy())


class ErrorFeedback(Compressor):
    """Adds to each gradient what was not sent of the earlier ones of its parameter (error feedback).

    Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019. A subclass writes
    `mean`. For a sum, ranks average gradients times their number, so that errors are always parts of a mean.
    """

    needs_all_ranks = True  # a rank that has joined has no errors
    has_memory = True
    bucket_bytes = 25 * 2**20  # each exchange has several collectives; backward still overlaps
    kinds: tuple[str, ...] = (ERROR,)

    def __init__(self, scheme: Scheme, names: Sequence[str] = ()) -> None:
        self.scheme, self.name = scheme, str(scheme)
        self.memory = TensorMemory(self.kinds, names)

    def mean(
        self, tensors: list[Tensor], names: Sequence[str], scale: float, process_set: Any, name: str
    ) -> Generator[Any, Any, list[Tensor]]:
        """Yield handles of collectives; return the mean over ranks of contiguous tensors of one type, float32 or 64.

        The tensors are the compressor's own: it may overwrite them, and keep them as errors.

        It puts new errors, divided by `scale`, into the memory: no NaN or infinity, also if there is one in `tensors`
        of any rank. The result then has one too, in the same tensor.
        """
        raise NotImplementedError

    def bind(self, names: Sequence[str]) -> Compressor:
        """Return a compressor of the same scheme for these parameters."""
        return type(self)(self.scheme, names)

    def exchange(self, tensors: Sequence[Tensor], how: Reduction, name: str, names: Sequence[str] = ()) -> Handle:
        """Start a sum or mean; see `Compressor.exchange`."""
        return Staged(self._reduced(tensors, how, name, names), name)

    def _reduced(
        self, tensors: Sequence[Tensor], how: Reduction, name: str, names: Sequence[str]
    ) -> Generator[Any, Any, list[Tensor]]:
        dtypes, scale = [tensor.dtype for tensor in tensors], self.loss_scale
        wide = torch.float64 if {torch.float64, torch.complex128} & set(dtypes) else torch.float32
        factor = how.prescale_factor * (how.process_set.size() if how.op == Sum else 1)
        whole = []
        for tensor, each in zip(tensors, names, strict=True):
            real = as_real(tensor.detach()).to(wide, copy=True, memory_format=torch.contiguous_format)
            if factor != 1.0:
                real.mul_(factor)
            error = self.memory.get(ERROR, each, real)
            whole.append(real if error is None else real.add_(error, alpha=scale))
        means = yield from self.mean(whole, names, scale, how.process_set, name)
        if how.postscale_factor != 1.0:
            means = [mean * how.postscale_factor for mean in means]
        return list(map(from_real, means, dtypes))

    def put_error(self, name: str, error: Tensor, is_finite: Tensor, scale: float) -> None:
        """Put an error into the memory; the earlier one where `is_finite`, which is true or false on all ranks, is not.

        It is on the tensor's device, so that a GPU's host need not wait for it.
        """
        error = error if scale == 1.0 else error / scale
        if error.is_cpu and is_finite:  # `where` would read and write everything once more
            self.memory.put(ERROR, name, error)
            return
        before = self.memory.get(ERROR, name, error)
        self.memory.put(ERROR, name, torch.where(is_finite, error, 0.0 if before is None else before))

    def commit(self) -> None:
        """Keep the errors of this step."""
        self.memory.commit()

    def rollback(self, names: Sequence[str] | None = None) -> None:
        """Drop the errors of this step."""
        self.memory.rollback(names)

    def reset(self) -> None:
        """Drop all errors."""
        self.memory.reset()

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the errors, by "mean.error.NAME"."""
        return self.memory.state()

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore them."""
        self.memory.load(arrays)
