"""Send matrices of gradients as products of two narrow ones."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hvdtrain.distributed.compression import STEPS, PowerSGD, Q
from hvdtrain.distributed.gradient_memory import ERROR, first_directions
from hvdtrain.torch.ops import pack
from hvdtrain.torch.ops.compression.memory import ErrorFeedback
from hvdtrain.torch.ops.submit import Reduction, submit


@dataclass
class _Matrix:
    """A gradient as a matrix M (n, m), and the narrow ones with which P (n, r) and Q (m, r) are made."""

    index: int  # of the gradient
    name: str
    values: Tensor  # (n, m)
    q: Tensor  # (m, r): of the step before, or drawn


class PowerSGDCompressor(ErrorFeedback):
    """Send a matrix M of gradients as P (n, r) and Q (m, r): one step of the power method, begun with the last Q.

    Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression", 2019: P is the mean over ranks
    of M Q, with orthonormal columns; the new Q is the mean of M' P; the result is P Q'. The next step begins with an
    orthonormal basis of Q's columns. Each rank remembers M less its
    own projection, M - P P' M.

    A gradient of two dimensions or more is a matrix (first, all others). Others, and matrices that P and Q would not
    make smaller, are sent as they are, in one tensor with P. Each rank gives Horovod 4 * (r * (n + m) + others) bytes,
    in two allreduces; in float64, 8 * (...). In the first `after_steps` steps of a gradient, it is one of the others.
    """

    scheme: PowerSGD
    kinds = (ERROR, Q, STEPS)

    def mean(
        self, tensors: list[Tensor], names: Sequence[str], scale: float, process_set: Any, name: str
    ) -> Generator[Any, Any, list[Tensor]]:
        """Yield the allreduce of P, and that of Q; return the means."""
        matrices = self._matrices(tensors, names)
        factored = {matrix.index for matrix in matrices}
        others = [index for index in range(len(tensors)) if index not in factored]
        how = Reduction(process_set=process_set)  # the mean

        sent = [tensors[index] for index in others] + [matrix.values @ matrix.q for matrix in matrices]
        first = yield submit([pack.flat(sent)], how, f"{name}.p", in_place=True, counted=False)
        received = pack.parts(first[0], [each.shape for each in sent])
        results = dict(zip(others, received, strict=False))
        for index in others:
            self._sent_whole(tensors[index], names[index])
        if not matrices:
            return [results[index] for index in range(len(tensors))]

        left = [_orthonormal(p) for p in received[len(others) :]]
        mine = [matrix.values.T @ p for matrix, p in zip(matrices, left, strict=True)]
        second = yield submit([pack.flat(mine)], how, f"{name}.q", in_place=True, counted=False)
        right = pack.parts(second[0], [each.shape for each in mine])
        for matrix, p, own, q in zip(matrices, left, mine, right, strict=True):
            tensor, is_finite = tensors[matrix.index], q.isfinite().all()
            results[matrix.index] = (p @ q.T).view_as(tensor)
            matrix.values.addmm_(p, own.T, alpha=-1.0)  # a view of `tensor`: what is left is the error
            self.put_error(matrix.name, tensor, is_finite, scale)
            # Orthonormal, so that rounding does not hide the smaller directions of M, and P cannot overflow. A matrix
            # of zeros has no directions: the last ones stay.
            usable = is_finite & (q != 0).any()
            self.memory.put(Q, matrix.name, torch.where(usable, _orthonormal(q), matrix.q))
        return [results[index] for index in range(len(tensors))]

    def _matrices(self, tensors: list[Tensor], names: Sequence[str]) -> list[_Matrix]:
        """Return the gradients that are sent as P and Q in this step."""
        rank, found = self.scheme.rank, []
        for index, (tensor, name) in enumerate(zip(tensors, names, strict=True)):
            rows = tensor.shape[0] if tensor.dim() > 1 else 0
            columns = tensor.numel() // max(rows, 1)
            if self.scheme.saves(rows, columns) and self._is_due(name):
                like = tensor.new_empty(columns, rank)
                q = self.memory.get(Q, name, like)
                found.append(_Matrix(index, name, tensor.view(rows, columns), _drawn(name, like) if q is None else q))
        return found

    def _is_due(self, name: str) -> bool:
        """Return whether a gradient is past its first steps; else count one more, if it is taken."""
        one = torch.ones(1, dtype=torch.int64, device="cpu")
        held = self.memory.get(STEPS, name, one)
        steps = 0 if held is None else int(held)
        if steps < self.scheme.after_steps:
            self.memory.put(STEPS, name, one * (steps + 1))
            return False
        return True

    def _sent_whole(self, tensor: Tensor, name: str) -> None:
        """Forget the error of a gradient that was a matrix in an earlier run, with another rank: it was sent now."""
        if self.memory.get(ERROR, name, tensor) is not None:
            self.memory.put(ERROR, name, torch.zeros_like(tensor))


def _orthonormal(p: Tensor) -> Tensor:
    """Return orthonormal columns that span those of `p`, and more where these depend on each other or are zero.

    If `p` has a number that is not finite, all are NaN.
    """
    # Contiguous, as it is after a resume: in another layout, products have other bits.
    columns: Tensor = torch.linalg.qr(p.nan_to_num(0.0, 0.0, 0.0)).Q.contiguous()
    return torch.where(p.isfinite().all(), columns, torch.nan)


def _drawn(name: str, like: Tensor) -> Tensor:
    """Return a parameter's first Q, on the device and in the type of `like`."""
    return torch.from_numpy(first_directions(name, tuple(like.shape))).to(like)
