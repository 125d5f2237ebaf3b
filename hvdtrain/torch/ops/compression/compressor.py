"""The contract of a compressor: how gradients travel, and what is remembered of each for the next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from hvdtrain.torch.ops.engine import Handle
from hvdtrain.torch.ops.submit import Reduction, submit


class Compressor:
    """The form in which gradients are sent. By default `compress` makes each smaller, and an allreduce adds them up.

    For a compression without a memory, give a subclass two static methods, `compress` and `decompress`, as for Horovod.
    For one with a memory, or with collectives of its own, write `exchange`, and `bind` and the methods of the memory.
    """

    name = ""  # in `Trainer(compression=...)` and in logs; the class's name where it is empty
    # True if values travel by themselves, as `wire_type`: then small gradients may travel in one tensor.
    is_cast: ClassVar[bool] = False
    # True where a rank that has joined could not take part in `exchange`; then gradients travel as they are.
    needs_all_ranks: ClassVar[bool] = False
    has_memory: ClassVar[bool] = False  # True if `state` returns something, which each `exchange` changes
    loss_scale = 1.0  # by which the next gradients are multiplied, with loss scaling; the memory is without it
    # Gradients of a device that are given to one `exchange`, at most; 0: each is given alone, and Horovod fuses them.
    bucket_bytes: ClassVar[int] = 0

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the smaller tensor, and what `decompress` needs besides it."""
        raise NotImplementedError("This compressor is for the gradients of an optimizer only.")

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        """Return `tensor` as it was before `compress`, except for rounding."""
        raise NotImplementedError

    def wire_type(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type as which values of a type travel, if `is_cast`."""
        return dtype

    def bind(self, names: Sequence[str]) -> Compressor:
        """Return a compressor for the gradients of these parameters, whose memory nobody else uses; itself without."""
        return self

    def exchange(self, tensors: Sequence[Tensor], how: Reduction, name: str, names: Sequence[str] = ()) -> Handle:
        """Start to reduce tensors, which may be overwritten; the handle gives the results in their types.

        All ranks call it with tensors of the same names and shapes. `Staged` is a handle of several collectives.

        Args:
            tensors: on one device.
            how: the operation and its factors.
            name: of the operations; the next `exchange` of this name begins after this one's end.
            names: of the tensors, among those to which the compressor is bound.
        """
        sent, contexts = zip(*map(self.compress, tensors), strict=True)
        handle = submit(sent, how, name, in_place=True, counted=False)
        return Handle([handle], lambda results: list(map(self.decompress, results, contexts)), name)

    def commit(self) -> None:
        """Keep the changes that exchanges have made to the memory since the last call: the step was taken."""

    def rollback(self, names: Sequence[str] | None = None) -> None:
        """Undo these changes, of all parameters or of some: the step was not taken, or not with their gradients."""

    def reset(self) -> None:
        """Forget everything: ranks begin together, perhaps others than before."""

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the memory of this rank, by names as in `rank_state`: "mean.error.NAME" for a parameter's error.

        No exchange is in flight then. The arrays are copies.
        """
        return {}

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore what `state` returned, as far as it is among these arrays of `rank_state`."""
