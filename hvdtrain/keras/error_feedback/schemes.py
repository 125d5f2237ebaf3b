"""Compression with error feedback in NumPy, for gradients on the host.

The formulas, and the bytes that are sent, are those of `hvdtrain.torch.ops.compression`, which explains them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain.distributed.compression import BLOCK, LARGEST, STEPS, Int8, PowerSGD, Q, Scheme, TopK
from hvdtrain.distributed.gradient_memory import ERROR, ArrayMemory, first_directions

Array = NDArray[Any]
Wait = Callable[[], Array]  # for a collective
Stages = Generator[Wait, Array, list[Array]]  # yields collectives, of which each needs the result of the one before


@dataclass(frozen=True)
class Ranks:
    """The ranks that exchange; `begin` starts a collective on an array, given its kind and name."""

    rank: int
    size: int
    begin: Callable[..., Wait]


class ErrorFeedback:
    """Adds to each gradient what was not sent of the earlier ones of its weight. A subclass writes `mean`."""

    kinds: ClassVar[tuple[str, ...]] = (ERROR,)

    def __init__(self, scheme: Any) -> None:
        self.scheme = scheme
        self.memory = ArrayMemory(self.kinds)

    def mean(self, arrays: list[Array], names: Sequence[str], ranks: Ranks, name: str) -> Stages:
        """Yield collectives; return the mean over ranks of arrays of one type, float32 or float64.

        It puts new errors into the memory: no NaN or infinity, also if there is one in `arrays` of any rank. The result
        then has one too, in the same array.
        """
        raise NotImplementedError

    def exchange(
        self, gradients: Sequence[Array], names: Sequence[str], ranks: Ranks, name: str, *, before: float, after: float
    ) -> Stages:
        """Yield collectives; return the means over ranks of the gradients times `before`, times `after`.

        All ranks give gradients of the same names, shapes and type. They are not changed.
        """
        whole = []
        for gradient, each in zip(gradients, names, strict=True):
            array = np.array(gradient, order="C")
            if before != 1.0:
                array *= array.dtype.type(before)
            error = self.memory.get(ERROR, each, array)
            if error is not None:
                array += error
            whole.append(array)
        means = yield from self.mean(whole, names, ranks, name)
        return means if after == 1.0 else [np.asarray(mean * after, mean.dtype) for mean in means]

    def put_error(self, name: str, error: Array, *, is_finite: Any) -> None:
        """Put an error into the memory, unless `is_finite`, which is true or false on all ranks, is not."""
        if is_finite:
            self.memory.put(ERROR, name, error)
        elif self.memory.get(ERROR, name, error) is None:
            self.memory.put(ERROR, name, np.zeros_like(error))


class Int8Arrays(ErrorFeedback):
    """Send blocks of numbers as 8-bit integers and a scale."""

    def mean(self, arrays: list[Array], names: Sequence[str], ranks: Ranks, name: str) -> Stages:
        """Yield alltoalls and allgathers; return the mean as all ranks have rounded it."""
        dtype, size, rank = arrays[0].dtype, ranks.size, ranks.rank
        counts = [-(-array.size // BLOCK) for array in arrays]  # blocks of each array
        shards = Int8.shards(sum(counts), size)  # blocks of each rank, in each slice
        whole = np.zeros((size * sum(shards), BLOCK), dtype)
        ends = np.cumsum(counts)
        rows = np.split(whole, ends)[:-1]
        for row, array in zip(rows, arrays, strict=True):
            row.reshape(-1)[: array.size] = array.reshape(-1)
        slices = np.split(whole, size * np.cumsum(shards)[:-1])
        sent, scattered, gathered = [], [], []
        for number, part in enumerate(slices):
            sent.append(_rounded(part))
            scattered.append(ranks.begin("alltoall", sent[-1].reshape(-1), name=f"{name}.scatter.{number}"))
        for number, (part, shard) in enumerate(zip(slices, shards, strict=True)):
            received = yield scattered[number]
            # (size, shard, BLOCK): one row per rank, added up in rank order
            mine = _numbers(received.reshape(size * shard, -1), dtype).reshape(size, shard, BLOCK).mean(0)
            shared = _rounded(mine)
            gathered.append(ranks.begin("allgather", shared.reshape(-1), name=f"{name}.gather.{number}"))
            part -= _numbers(sent[number], dtype)
            # The mean divides it by the number of ranks.
            part[rank * shard : (rank + 1) * shard] += (mine - _numbers(shared, dtype)) * size
        shared_by_all = []
        for wait, part in zip(gathered, slices, strict=True):
            everyones = yield wait
            shared_by_all.append(_numbers(everyones.reshape(len(part), -1), dtype))
        means = np.split(np.concatenate(shared_by_all), ends)[:-1]
        results = []
        for each, array, row, mean in zip(names, arrays, rows, means, strict=True):
            error, result = (blocks.reshape(-1)[: array.size].reshape(array.shape) for blocks in (row, mean))
            # A copy: the error of one weight shall not keep those of all.
            self.put_error(each, error.copy(), is_finite=np.isfinite(result).all())
            results.append(result)
        return results


def _rounded(blocks: Array) -> Array:
    """Return (blocks, numbers) as (blocks, bytes): integers, and the scale. A block that is not finite has NaN."""
    scales = np.abs(blocks).max(axis=1, keepdims=True) / blocks.dtype.type(LARGEST)
    scales = np.maximum(scales, np.finfo(blocks.dtype).tiny)  # of a block of zeros; NaN stays
    scales[~np.isfinite(scales)] = np.nan
    integers = np.clip(np.nan_to_num(np.rint(blocks / scales), copy=False), -LARGEST, LARGEST).astype(np.int8)
    return np.concatenate([integers.view(np.uint8), scales.view(np.uint8)], axis=1)


def _numbers(sent: Array, dtype: Any) -> Array:
    """Return what `_rounded` made of blocks of this type, as numbers."""
    scales = np.ascontiguousarray(sent[:, BLOCK:]).view(dtype)
    numbers: Array = sent[:, :BLOCK].view(np.int8).astype(dtype)
    numbers *= scales
    return numbers


class TopKArrays(ErrorFeedback):
    """Each rank sends its largest numbers and their places."""

    scheme: TopK

    def mean(self, arrays: list[Array], names: Sequence[str], ranks: Ranks, name: str) -> Stages:
        """Yield the allgather; return means that are zero where no rank has sent a number."""
        counts = [self.scheme.count(array.size, each) for array, each in zip(arrays, names, strict=True)]
        flats = [array.reshape(-1) for array in arrays]
        places = [_largest(flat, k) for flat, k in zip(flats, counts, strict=True)]
        values = np.concatenate([flat[place] for flat, place in zip(flats, places, strict=True)])
        sent = np.concatenate([values.view(np.int32), np.concatenate(places).astype(np.int32)])
        gathered = yield ranks.begin("allgather", sent, name=f"{name}.topk")
        rows = gathered.reshape(ranks.size, sent.size)
        split, ends = values.view(np.int32).size, np.cumsum(counts)[:-1]
        # (size, numbers): of all arrays, one row per rank
        everyones = np.split(np.ascontiguousarray(rows[:, :split]).view(values.dtype), ends, axis=1)
        everyplaces = np.split(rows[:, split:], ends, axis=1)
        means = []
        for each, array, place, numbers, where in zip(names, arrays, places, everyones, everyplaces, strict=True):
            mean = np.zeros_like(array).reshape(-1)
            for row, at in zip(numbers, where, strict=True):
                mean[at] += row  # no place twice
            mean /= ranks.size
            means.append(mean.reshape(array.shape))
            array.reshape(-1)[place] = 0.0
            self.put_error(each, array, is_finite=np.isfinite(numbers).all())
        return means


def _largest(flat: Array, count: int) -> Array:
    """Return the places of the largest numbers by magnitude; NaN counts as larger than infinity."""
    if count == flat.size:
        return np.arange(count)
    return np.argpartition(np.abs(flat), flat.size - count)[flat.size - count :]


@dataclass
class _Matrix:
    """A gradient as a matrix M (n, m), and the Q (m, r) of the step before, or drawn."""

    index: int  # of the gradient
    name: str
    values: Array
    q: Array


class PowerSGDArrays(ErrorFeedback):
    """Send a matrix M as P (n, r) and Q (m, r): one step of the power method, begun with the last Q."""

    scheme: PowerSGD
    kinds = (ERROR, Q, STEPS)

    def mean(self, arrays: list[Array], names: Sequence[str], ranks: Ranks, name: str) -> Stages:
        """Yield the allreduce of P, and that of Q; return the means."""
        matrices = self._matrices(arrays, names)
        factored = {matrix.index for matrix in matrices}
        others = [index for index in range(len(arrays)) if index not in factored]

        sent = [arrays[index] for index in others] + [matrix.values @ matrix.q for matrix in matrices]
        received = _parts((yield ranks.begin("allreduce", _flat(sent), name=f"{name}.p")), sent)
        results = dict(zip(others, received, strict=False))
        for index in others:
            self._sent_whole(arrays[index], names[index])
        if not matrices:
            return [results[index] for index in range(len(arrays))]

        left = [_orthonormal(p) for p in received[len(others) :]]
        mine = [matrix.values.T @ p for matrix, p in zip(matrices, left, strict=True)]
        right = _parts((yield ranks.begin("allreduce", _flat(mine), name=f"{name}.q")), mine)
        for matrix, p, own, q in zip(matrices, left, mine, right, strict=True):
            is_finite = np.isfinite(q).all()
            results[matrix.index] = p @ q.T
            self.put_error(matrix.name, matrix.values - p @ own.T, is_finite=is_finite)
            # Orthonormal, so that rounding does not hide the smaller directions of M, and P cannot overflow. A matrix
            # of zeros has no directions: the last ones stay.
            self.memory.put(Q, matrix.name, _orthonormal(q) if is_finite and q.any() else matrix.q)
        return [results[index] for index in range(len(arrays))]

    def _matrices(self, arrays: list[Array], names: Sequence[str]) -> list[_Matrix]:
        """Return the gradients that are sent as P and Q in this step."""
        found = []
        for index, (array, name) in enumerate(zip(arrays, names, strict=True)):
            if array.ndim == 2 and self.scheme.saves(*array.shape) and self._is_due(name):
                like = np.empty((array.shape[1], self.scheme.rank), array.dtype)
                q = self.memory.get(Q, name, like)
                q = first_directions(name, like.shape).astype(array.dtype) if q is None else q
                found.append(_Matrix(index, name, array, q))
        return found

    def _is_due(self, name: str) -> bool:
        """Return whether a gradient is past its first steps; else count one more, if it is taken."""
        one = np.ones(1, np.int64)
        held = self.memory.get(STEPS, name, one)
        steps = 0 if held is None else int(held[0])
        if steps < self.scheme.after_steps:
            self.memory.put(STEPS, name, one * (steps + 1))
            return False
        return True

    def _sent_whole(self, array: Array, name: str) -> None:
        """Forget the error of a gradient that was a matrix in an earlier run, with another rank: it was sent now."""
        if self.memory.get(ERROR, name, array) is not None:
            self.memory.put(ERROR, name, np.zeros_like(array))


def _orthonormal(p: Array) -> Array:
    """Return orthonormal columns that span those of `p`, and more where these depend on each other or are zero.

    If `p` has a number that is not finite, all are NaN.
    """
    if not np.isfinite(p).all():
        return np.full_like(p, np.nan)
    # Contiguous, as it is after a resume: in another layout, products have other bits.
    return np.ascontiguousarray(np.linalg.qr(p)[0])


def _flat(arrays: Sequence[Array]) -> Array:
    return np.concatenate([array.reshape(-1) for array in arrays])


def _parts(flat: Array, like: Sequence[Array]) -> list[Array]:
    parts = np.split(flat, np.cumsum([array.size for array in like])[:-1])
    return [part.reshape(array.shape) for part, array in zip(parts, like, strict=True)]


_KINDS: dict[type[Scheme], type[ErrorFeedback]] = {Int8: Int8Arrays, TopK: TopKArrays, PowerSGD: PowerSGDArrays}


def compressor_of(scheme: Scheme) -> ErrorFeedback:
    """Return a compressor with a memory of its own."""
    return _KINDS[type(scheme)](scheme)
