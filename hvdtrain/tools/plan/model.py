"""The forecast: step time, efficiency and cost on R ranks, by arithmetic alone.

The batch of a rank stays what it was measured with, so R ranks take R times the samples in a step. A step then lasts

    T(R) = T_comp + exposed(R) + waiting(R)

- T_comp: one rank's step without communication, as measured, the same for every R.
- T_sync(R): all allreduces of a step, each hops * latency + bytes sent / bandwidth + its start. A ring sends 2(R-1)/R
  times the bytes, the least possible [1], over 2(R-1) hops; a tree twice the bytes over about 2 log2 R hops [2]; the
  hierarchical form rings within each host and across hosts [3]. Ranks of one host are neighbours in the ring, so that
  the host's link carries the bytes once in each direction, however many ranks share it.
- exposed(R): what is left of T_sync when backward ends. Buckets are reduced as they become ready, last layer first
  [3, 4]: the last one is always exposed, the others where they queue up because the link is slower than backward.
- waiting(R): for the slowest rank: the spread of step times * E[max of R standard normals] [5]; 0 if not measured.

Sources: [1] Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 69(2), 2009.
[2] Sanders, Speck and Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, Parallel Computing
35(12), 2009; hops of rings and trees over hosts are counted as in NCCL's src/graph/tuning.cc. [3] Sergeev and Del
Balso, Horovod, arXiv:1802.05799, 2018. [4] Li et al., PyTorch Distributed, VLDB 2020, arXiv:2006.15704. [5] Blom,
Statistical Estimates and Transformed Beta-Variables, 1958: the approximation of normal order statistics.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from statistics import NormalDist
from typing import Literal

# The keys of "plan_input" in a measured file, and the fields of Step and Cluster that they fill; all are in SI units.
# step_s is without communication, waiting for data included; spread_s the distance of its quartiles / 1.349;
# intra_bytes_per_s is the bus bandwidth of a large allreduce within a host, overhead_s the time of a tiny one.
_SAME = ("gradient_bytes", "backward_share", "spread_s", "intra_bytes_per_s", "overhead_s")
_FIELDS = {"step_s": "compute_s", "samples_per_step": "samples", **dict(zip(_SAME, _SAME, strict=True))}
# What `plan --memory` reads, in bytes but for ranks: the fields of `telemetry.memory.Parts`, besides gradient_bytes.
_FIELDS |= {name: name for name in ("ranks", "weights", "optimizer", "buckets", "activations")}

Bounds = Literal["above 0 and finite", "0 or above, and finite", "above 0 and at most 1", "from 0 to 1"]


class Algorithm(str, Enum):
    """The route of an allreduce; auto takes the faster of ring and tree, bucket by bucket, as NCCL does."""

    auto = "auto"
    ring = "ring"
    tree = "tree"
    hierarchical = "hierarchical"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One rank's step as measured, without communication."""

    compute_s: float  # its time in seconds, waiting for data included
    gradient_bytes: float  # what the rank hands to allreduce in one step
    samples: int  # how many samples the rank takes in it
    backward_share: float = 2 / 3  # of compute_s; unmeasured, as backward does about twice the arithmetic of forward
    spread_s: float = 0.0  # standard deviation of compute_s from step to step, in seconds

    def __post_init__(self) -> None:
        require("the step's time (seconds)", self.compute_s, "above 0 and finite")
        require("the gradients' size (bytes)", self.gradient_bytes, "above 0 and finite")
        require("a rank's samples in a step", self.samples, "above 0 and finite")
        require("backward's share of the step", self.backward_share, "above 0 and at most 1")
        require("the step's spread (seconds)", self.spread_s, "0 or above, and finite")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The links between ranks, and how gradients are sent over them."""

    link_bytes_per_s: float | None = None  # nominal speed of a host's link, each direction; None for a single host
    ranks_per_host: int = 1  # ranks that share a host and its link
    intra_bytes_per_s: float | None = None  # speed of an allreduce between ranks of one host; None if each has one
    # Share of the nominal speed that is left for gradients. 0.93: RoCE v2 with 1024 bytes per packet has
    # 1024 / (1024 + 82) after the headers of Ethernet, IP, UDP and InfiniBand; TCP with a 1500-byte MTU 1448 / 1538.
    link_efficiency: float = 0.93
    latency_s: float = 10e-6  # one hop between hosts; the default is about what NCCL's tuning table gives a network hop
    intra_latency_s: float = 6e-6  # one hop within a host; likewise
    overhead_s: float = 1e-3  # starting one allreduce: agreeing among ranks, and Horovod's cycle time (1 ms by default)
    bucket_bytes: float = 64 * 2.0**20  # gradients reduced together; Horovod's fusion threshold in its published runs
    overlap: float = 1.0  # of an allreduce with backward: 1 on network hardware, 0 on the very cores that compute
    algorithm: Algorithm = Algorithm.auto  # how an allreduce travels

    def __post_init__(self) -> None:
        speeds = {"the link's speed": self.link_bytes_per_s, "the speed within a host": self.intra_bytes_per_s}
        for name, speed in speeds.items():
            if speed is not None:
                require(f"{name} (bytes per second)", speed, "above 0 and finite")
        require("ranks per host", self.ranks_per_host, "above 0 and finite")
        require("the link's efficiency", self.link_efficiency, "above 0 and at most 1")
        require("the bucket's size (bytes)", self.bucket_bytes, "above 0 and finite")
        for name, value in (("latency", self.latency_s), ("latency within a host", self.intra_latency_s)):
            require(f"the {name} (seconds)", value, "0 or above, and finite")
        require("the overhead of an allreduce (seconds)", self.overhead_s, "0 or above, and finite")
        require("overlap", self.overlap, "from 0 to 1")

    def hosts(self, ranks: int) -> int:
        """Return how many hosts so many ranks fill."""
        return math.ceil(ranks / self.ranks_per_host)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A step on so many ranks. Times in seconds; efficiency is T(1) / T(R)."""

    ranks: int
    hosts: int
    compute_s: float
    sync_s: float  # T_sync, all of the step's allreduces, hidden or not
    bandwidth_s: float  # the part of sync_s that only a faster link or fewer bytes would shorten; the rest is latency
    exposed_s: float  # the part of it that lengthens the step
    waiting_s: float  # for the slowest rank
    samples: int = field(repr=False)

    @property
    def step_s(self) -> float:
        """Seconds from one step to the next."""
        return self.compute_s + self.exposed_s + self.waiting_s

    @property
    def efficiency(self) -> float:
        """Samples per second, as a share of `ranks` times the samples per second of one rank; in (0, 1]."""
        return self.compute_s / self.step_s

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all ranks together."""
        return self.ranks * self.samples / self.step_s

    def run_s(self, samples: int) -> float:
        """Return the seconds that so many samples take, the last step counted as a whole one."""
        return math.ceil(samples / (self.ranks * self.samples)) * self.step_s

    def rank_hours(self, samples: int) -> float:
        """Return the hours of all ranks together that so many samples take."""
        return self.ranks * self.run_s(samples) / 3600


def forecast(step: Step, cluster: Cluster, ranks: int) -> Forecast:
    """Return the forecast for so many ranks; ValueError if the cluster lacks the speed of a connection they need."""
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1. Received: {ranks}")
    buckets = math.ceil(step.gradient_bytes / cluster.bucket_bytes)
    bandwidth_s, fixed_s = allreduce(cluster, step.gradient_bytes / buckets, ranks)
    sync_s, backward_s = buckets * (bandwidth_s + fixed_s), step.backward_share * step.compute_s
    # Equal buckets are ready at equal distances: either each is reduced before the next is ready, and the last one is
    # left when backward ends, or they queue up from the first one on.
    pipelined_s = max(bandwidth_s + fixed_s, sync_s - backward_s * (buckets - 1) / buckets)
    return Forecast(
        ranks=ranks,
        hosts=cluster.hosts(ranks),
        compute_s=step.compute_s,
        sync_s=sync_s,
        bandwidth_s=buckets * bandwidth_s,
        exposed_s=cluster.overlap * pipelined_s + (1 - cluster.overlap) * sync_s,
        waiting_s=step.spread_s * expected_maximum(ranks),
        samples=step.samples,
    )


def allreduce(cluster: Cluster, size_bytes: float, ranks: int) -> tuple[float, float]:
    """Return the seconds of one allreduce that depend on its bytes, and those that do not; 0 and 0 for one rank."""
    if ranks == 1:
        return 0.0, 0.0
    auto = cluster.algorithm is Algorithm.auto
    ways = (Algorithm.ring, Algorithm.tree) if auto else (cluster.algorithm,)
    return min((_travel(cluster, size_bytes, ranks, way) for way in ways), key=sum)


def expected_maximum(ranks: int) -> float:
    """Return the expected maximum of so many standard normal values (Blom's approximation, within 0.03); 0 for one."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) if ranks > 1 else 0.0


def marginal_efficiency(fewer: Forecast, more: Forecast) -> float:
    """Return how much of a lone rank's work each rank does that was added between the two, as a share."""
    lone_samples_per_s = fewer.samples / fewer.compute_s
    return (more.samples_per_s - fewer.samples_per_s) / ((more.ranks - fewer.ranks) * lone_samples_per_s)


def pays_up_to(forecasts: Sequence[Forecast], *, worth: float = 0.5) -> Forecast:
    """Return the forecast after which adding ranks stops paying; `forecasts` begin with one rank, in rising order.

    Adding ranks pays if each of them brings at least `worth`, a share, of a lone rank's work.
    """
    # It counts from the last number that paid, not from the neighbour: where the second host is added, a rank brings
    # little, but many hosts may pay again.
    best = forecasts[0]
    for candidate in forecasts[1:]:
        if marginal_efficiency(best, candidate) >= worth:
            best = candidate
    return best


def _travel(cluster: Cluster, size_bytes: float, ranks: int, algorithm: Algorithm) -> tuple[float, float]:
    hosts, local = cluster.hosts(ranks), min(ranks, cluster.ranks_per_host)
    inner, outer = cluster.intra_bytes_per_s or 0.0, (cluster.link_bytes_per_s or 0.0) * cluster.link_efficiency
    if local > 1 and not inner:
        raise ValueError("several ranks share a host: the speed between them is needed")
    if hosts > 1 and not outer:
        raise ValueError("there are several hosts: the speed of the link between them is needed")
    # Seconds per byte of a hop within a host and of one between hosts, 0 where there is no such hop.
    within, between = 1 / inner if local > 1 else 0.0, 1 / outer if hosts > 1 else 0.0
    # One ring or tree through all ranks runs at the pace of its slowest connection.
    slowest = max(within, between)
    if algorithm is Algorithm.ring:
        hops_within, hops_between = 2 * (ranks - hosts), 2 * (hosts - 1)
        sent_s = 2 * (ranks - 1) / ranks * size_bytes * slowest
    elif algorithm is Algorithm.tree:
        hops_within, hops_between = 2 * (local - 1), 2 * math.ceil(math.log2(hosts))
        sent_s = 2 * size_bytes * slowest
    else:
        # Each rank of a host sends its share of the bytes on a ring across hosts; all shares use the host's one link.
        hops_within, hops_between = 2 * (local - 1), 2 * (hosts - 1)
        sent_s = 2 * size_bytes * ((local - 1) / local * within + (hosts - 1) / hosts * between)
    latency_s = hops_within * cluster.intra_latency_s + hops_between * cluster.latency_s
    return sent_s, latency_s + cluster.overhead_s


def require(name: str, value: float, bounds: Bounds) -> None:
    """Raise ValueError unless value is within bounds; where they say finite, the arithmetic must be able to hold it."""
    # An integer may be larger than every finite float; NaN is within no bounds.
    within = {
        "above 0 and finite": 0 < value <= sys.float_info.max,
        "0 or above, and finite": 0 <= value <= sys.float_info.max,
        "above 0 and at most 1": 0 < value <= 1,
        "from 0 to 1": 0 <= value <= 1,
    }
    if not within[bounds]:
        raise ValueError(f"{name} must be {bounds}. Received: {value}")


def read_measured(path: Path) -> dict[str, float]:
    """Return what a file of `hvdtrain bench --script` says, by the fields of Step and Cluster, or a ValueError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, or not text
        raise ValueError(f"{path} is not JSON: {error}") from None
    values = document.get("plan_input") if isinstance(document, dict) else None
    if not isinstance(values, dict):
        raise ValueError(f'{path} has no object "plan_input": write it with hvdtrain bench --script train.py --json')
    given = {key: values[key] for key in _FIELDS if values.get(key) is not None}
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{path}: plan_input.{key} must be a number. Received: {value!r}")
    return {_FIELDS[key]: value for key, value in given.items()}
