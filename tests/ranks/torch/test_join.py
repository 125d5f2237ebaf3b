"""Ranks that run out of data: the mean is over those that are left."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.world_size(2, 3), pytest.mark.over_gloo]


@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"compression": "fp16"}, {"compression": "bf16"},
                                     {"op": "Sum"}, {"gradient_predivide_factor": 2.0}])  # fmt: skip
def test_gradients_are_averaged_over_the_ranks_still_there(hvd, rank, size, options):
    options = dict(options)
    if "compression" in options:
        options["compression"] = getattr(hvd.Compression, options["compression"])
    sums = options.get("op") == "Sum"
    if sums:
        options["op"] = hvd.Sum
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(params, lr=1.0), [(f"p{i}", p) for i, p in enumerate(params)], **options
    )
    # rank r has 2 * r + 1 steps
    for step in range(2 * rank + 1):
        optimizer.zero_grad()
        (sum(p.sum() for p in params) * (rank + 1)).backward()
        optimizer.synchronize()
        left = [r for r in range(size) if step < 2 * r + 1]
        expected = sum(r + 1 for r in left) / (1 if sums else len(left))
        for p in params:
            # float16 rounds the sum divided by all ranks, before it is divided by those left
            tolerance = 1e-3 if options.get("compression") is hvd.Compression.fp16 else 1e-6
            torch.testing.assert_close(p.grad, torch.full((3,), float(expected)), rtol=tolerance, atol=0)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert hvd.join() == size - 1


def test_allreduce_averages_over_the_ranks_still_there(hvd, rank, size):
    for step in range(rank + 1):
        left = [r for r in range(size) if step <= r]
        mean = sum(left) / len(left)
        assert float(hvd.allreduce(torch.tensor(float(rank)))) == pytest.approx(mean)
        assert float(hvd.allreduce_(torch.tensor([float(rank)]))) == pytest.approx(mean)
        assert float(hvd.allreduce(torch.tensor(float(rank)), op=hvd.Sum)) == sum(left)
        a, b = hvd.grouped_allreduce([torch.tensor([float(rank)]), torch.tensor([2.0 * rank])])
        assert (float(a), float(b)) == pytest.approx((mean, 2 * mean))
        assert float(hvd.allreduce(torch.tensor([float(rank)]), compression=hvd.Compression.bf16)) == mean
    assert hvd.join() == size - 1


def test_unnamed_operations_match_again_after_join(hvd, rank, size):
    for _ in range(3 * rank):
        hvd.allreduce(torch.ones(1))
    hvd.join()
    assert float(hvd.allreduce(torch.tensor(float(rank)))) == (size - 1) / 2
    assert hvd.allgather_object(rank) == list(range(size))


def test_join_returns_the_last_rank(hvd, rank):
    if rank == 0:
        for _ in range(3):
            hvd.allreduce(torch.ones(1), name="alone")
    assert hvd.join() == 0
