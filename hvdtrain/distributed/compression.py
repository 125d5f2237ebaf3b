"""Schemes by which gradients travel in fewer bytes: their options, names and numbers, for every framework.

A framework's folder makes the compressor for a scheme. Types ("none", "fp16", "bf16") have names only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

BLOCK, LARGEST = 256, 127.0  # of int8: numbers that share a scale, and the largest integer
# What a rank gives one alltoall, about, and at least for each other rank. TCP sends a large message at once: it fills
# the queue of a slow link, packets are lost, and each operation takes some 250 ms longer.
_SLICE_BYTES, _LEAST_BYTES = 2**19, 2**14
Q, STEPS = "max.powersgd_q", "max.powersgd_steps"  # PowerSGD's, in `rank_state`; equal on all ranks
_MOST = 2**31 - 1  # numbers of a gradient, whose places topk sends as int32

TYPES = ("none", "fp16", "bf16")
_CHOICES = (
    "none, fp16, bf16, int8, topk:FRACTION, powersgd:RANK, hvdtrain.Int8(), hvdtrain.TopK(fraction=0.01), "
    "hvdtrain.PowerSGD(rank=4)"
)


@dataclass(frozen=True)
class Scheme:
    """A compression that remembers on each rank what it has left out, and adds it to the next gradient.

    With `LocalSGD` and `DiLoCo`, the change of a weight since the last synchronization takes the gradient's place.

    `str` is its name in `Trainer(compression=...)`, in logs and in checkpoints.
    """

    name: ClassVar[str]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Int8(Scheme):
    """Send gradients as 8-bit integers, with a scale for each block of numbers.

    Seide et al., "1-Bit Stochastic Gradient Descent", 2014, with 8 bits. For a gradient of n numbers on N ranks, a rank
    gives Horovod 1.02 n bytes by an alltoall, and 1.02 n / N bytes by an allgather.
    """

    name = "int8"

    @staticmethod
    def shards(blocks: int, ranks: int) -> list[int]:
        """Return `shards` of so many blocks."""
        return shards(blocks, ranks, each_bytes=BLOCK + 4)


@dataclass(frozen=True)
class TopK(Scheme):
    """Send the largest numbers of each gradient, with their places.

    Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", 2017. For a gradient of n numbers in
    float32, a rank gives Horovod 8 n fraction bytes by an allgather.

    Args:
        fraction: the share of numbers that are sent, in (0, 1].

    Raises:
        ValueError: `fraction` is outside its range.
    """

    fraction: float

    name = "topk"

    def __post_init__(self) -> None:
        fraction = self.fraction
        if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
            raise ValueError(f"TopK: fraction must be a number > 0 and <= 1. Received: fraction={fraction!r}")

    def __str__(self) -> str:
        return f"{self.name}:{float(self.fraction)!r}"

    def count(self, numbers: int, name: str) -> int:
        """Return how many of a gradient's numbers are sent; ValueError if it has too many for their places."""
        if numbers > _MOST:
            raise ValueError(
                f"topk takes gradients of at most {_MOST} numbers. Received: {name} of {numbers} numbers. "
                'Use compression="bf16" or "powersgd:4".'
            )
        return min(numbers, math.ceil(self.fraction * numbers))


@dataclass(frozen=True)
class PowerSGD(Scheme):
    """Send each matrix of gradients as the product of two narrow ones.

    Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression", 2019. For a matrix of a rows and
    b columns in float32, a rank gives Horovod 4 rank (a + b) bytes by two allreduces.

    Args:
        rank: columns of the two matrices.
        after_steps: number of steps at the beginning whose gradients are sent as they are; with `LocalSGD` and `DiLoCo`
            the number of exchanges whose changes of weights are.

    Raises:
        ValueError: an option is outside its range.
    """

    rank: int = 4
    after_steps: int = 1000

    name = "powersgd"

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("after_steps", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"PowerSGD: {name} must be an int >= {least}. Received: {name}={value!r}")

    def __str__(self) -> str:
        default = PowerSGD.after_steps
        return f"{self.name}:{self.rank}" + ("" if self.after_steps == default else f":{self.after_steps}")

    def saves(self, rows: int, columns: int) -> bool:
        """Return whether the two narrow matrices have fewer numbers than one of this shape."""
        return self.rank * (rows + columns) < rows * columns


def shards(items: int, ranks: int, *, each_bytes: int) -> list[int]:
    """Return how many items each rank adds up in each of several exchanges, in which all ranks give it theirs.

    Ranks times the sum is `items`, rounded up; each exchange has some.
    """
    most = max(_LEAST_BYTES, _SLICE_BYTES // ranks) // each_bytes
    rest = max(1, -(-items // ranks))
    return [min(most, rest - begin) for begin in range(0, rest, most)]


def parse(given: Any) -> Scheme | str:
    """Return the scheme that `compression` means, or the name of a type.

    Args:
        given: a scheme; or a name: one of `TYPES`, "int8", "topk:FRACTION", "powersgd:RANK" or
            "powersgd:RANK:AFTER_STEPS".

    Raises:
        ValueError: it is none of these, or an option is outside its range.
    """
    if isinstance(given, Scheme) or (isinstance(given, str) and given in TYPES):
        return given
    if isinstance(given, str):
        name, *options = given.split(":")
        try:
            if name == Int8.name and not options:
                return Int8()
            if name == TopK.name and len(options) == 1:
                return TopK(float(options[0]))
            if name == PowerSGD.name and len(options) in (1, 2):
                return PowerSGD(*map(int, options))
        except ValueError as error:
            reason = f" {error}" if "Received" in str(error) else ""
            raise ValueError(
                f"compression must be one of {_CHOICES}. Received: compression={given!r}.{reason}"
            ) from error
    raise ValueError(f"compression must be one of {_CHOICES}. Received: compression={given!r}")
