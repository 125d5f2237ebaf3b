"""The forecast of gradients in fewer bytes (`Trainer(compression=...)`), and the links on which each pays.

A step takes T_comp + compressing + exposed + waiting, with the scheme's bytes in place of the gradients'. On faster
links compressing takes longer than it saves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hvdtrain.tools.plan.model import Cluster, Step, forecast

_MATRIX = 1024  # rows and columns of a matrix of weights, of which the gradients' size says nothing
_SLOWEST, _FASTEST = 1.0, 1e15  # links between which the bound is looked for, in bytes per second


@dataclass(frozen=True)
class Compression:
    """What a scheme costs and leaves of a gradient in float32.

    Attributes:
        name: as one writes it for the Trainer.
        share: returns, for a number of ranks, the share of the bytes: those of an allreduce that takes as long.
        seconds_per_byte: of a gradient, on one x86_64 core (`python -m benchmarks --link`). On GPUs: not measured.
    """

    name: str
    share: Callable[[int], float]
    seconds_per_byte: float


# int8: 65 bytes for 64 numbers, by an alltoall and an allgather, which send what an allreduce does. topk: places too,
# and each rank gets everyone's by an allgather. powersgd: two matrices of 4 columns.
COMPRESSIONS = (
    Compression('compression="fp16"', lambda ranks: 1 / 2, 0.2e-9),
    Compression('compression="int8"', lambda ranks: 65 / 256, 2.9e-9),
    Compression('compression="topk:0.01"', lambda ranks: 0.01 * ranks, 0.8e-9),
    Compression('compression="powersgd:4"', lambda ranks: 4 * 2 / _MATRIX, 1.8e-9),
)


@dataclass(frozen=True, kw_only=True)
class CompressionForecast:
    """A step with one scheme.

    Attributes:
        name: as one writes it for the Trainer.
        sent_bytes: what a rank sends in a step.
        step_s: seconds from one step to the next.
        pays_below: the speed of a host's link, in bytes per second, below which a step is shorter than one without
            compression; None if it pays on no link, or the ranks share one host.
    """

    name: str
    sent_bytes: float
    step_s: float
    pays_below: float | None


def compressions(step: Step, cluster: Cluster, ranks: int) -> list[CompressionForecast]:
    """Return the forecast of each scheme on so many ranks."""
    travels = 2 * (ranks - 1) / ranks  # of the bytes; see `model`
    return [
        CompressionForecast(
            name=each.name,
            sent_bytes=travels * each.share(ranks) * step.gradient_bytes,
            step_s=_step_s(step, cluster, ranks, each),
            pays_below=_pays_below(step, cluster, ranks, each),
        )
        for each in COMPRESSIONS
    ]


def _step_s(step: Step, cluster: Cluster, ranks: int, scheme: Compression) -> float:
    smaller = replace(step, gradient_bytes=step.gradient_bytes * scheme.share(ranks))
    return forecast(smaller, cluster, ranks).step_s + scheme.seconds_per_byte * step.gradient_bytes


def _pays_below(step: Step, cluster: Cluster, ranks: int, scheme: Compression) -> float | None:
    if cluster.hosts(ranks) == 1:
        return None

    def pays(link: float) -> bool:
        there = replace(cluster, link_bytes_per_s=link)
        return _step_s(step, there, ranks, scheme) < forecast(step, there, ranks).step_s

    slow, fast = _SLOWEST, _FASTEST
    if not pays(slow):
        return None
    while fast / slow > 1.001:
        middle = (slow * fast) ** 0.5
        slow, fast = (middle, fast) if pays(middle) else (slow, middle)
    return slow
