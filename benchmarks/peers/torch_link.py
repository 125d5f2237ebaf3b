"""The ranks' link: the time of an allreduce of a few bytes, and of one as large as a bucket of the gradients."""

from __future__ import annotations

import math
import statistics
import time

import torch

import hvdtrain.torch as hvd
from benchmarks.torch_tasks import Task
from benchmarks.turns import report
from hvdtrain.tools.plan.model import Cluster

SMALL, LARGE = 200, 30  # allreduces that are timed


def median_s(elements: int, *, times: int) -> float:
    """Return the median time of an allreduce in place, as gradients are reduced."""
    buffer = torch.ones(elements)
    found = []
    for index in range(times + 5):
        began = time.perf_counter()
        hvd.allreduce_(buffer, name=f"link.{elements}")
        if index >= 5:
            found.append(time.perf_counter() - began)
    return statistics.median(found)


def main() -> None:
    hvd.init()
    gradients = sum(parameter.numel() for parameter in Task().model.parameters())
    buckets = math.ceil(4 * gradients / Cluster.bucket_bytes)
    small_s = median_s(1, times=SMALL)
    large_s = median_s(gradients // buckets, times=LARGE)
    sent = 2 * (hvd.size() - 1) / hvd.size() * 4 * (gradients // buckets)
    report(
        hvd.rank(),
        {
            "gradient_bytes": 4 * gradients,
            "overhead_s": small_s,
            "bytes_per_s": sent / max(large_s - small_s, 1e-9),
        },
    )


if __name__ == "__main__":
    main()
