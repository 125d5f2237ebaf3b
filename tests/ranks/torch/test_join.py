"""Ranks that run out of data: the mean is over those that are left."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from horovod.common.exceptions import HorovodInternalError

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


def test_what_a_rank_sent_before_it_joined_counts(hvd, rank, size):
    """A response in the caches, and one that is not; rank 0 sends its own when the others have called join."""
    for name in ("join.new", "join.cached", "join.cached", "join.cached"):
        if name == "join.cached":
            assert float(hvd.allreduce(torch.ones(1), name=name, op=hvd.Sum)) == size
        if rank == 0:
            time.sleep(0.1)
        sent = hvd.allreduce_async(torch.tensor([rank + 1.0]), name=name, op=hvd.Sum)
        mean = hvd.allreduce_async(torch.tensor([rank + 1.0]))
        hvd.join()
        assert float(hvd.synchronize(sent)) == size * (size + 1) / 2
        assert float(hvd.synchronize(mean)) == (size + 1) / 2


def test_a_rank_that_waits_in_join_waits_for_a_barrier_of_the_others_too(hvd, rank, size):
    if rank == 0:
        time.sleep(0.1)
    if rank != size - 1:
        assert float(hvd.allreduce(torch.ones(1), name="join.before", op=hvd.Sum)) == size - 1
        hvd.barrier()
    hvd.join()
    assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == size


@pytest.mark.parametrize("what", ["allgather", "alltoall", "broadcast", "reducescatter"])
def test_what_zeros_do_not_serve_is_an_error_where_a_rank_has_joined(hvd, rank, size, what):
    numbers = torch.arange(float(2 * size)).reshape(2 * size, 1)
    send = {
        "allgather": lambda: hvd.allgather(numbers, name="join.gather"),
        "alltoall": lambda: hvd.alltoall(numbers, name="join.alltoall"),
        "broadcast": lambda: hvd.broadcast(numbers, 0, name="join.broadcast"),
        "reducescatter": lambda: hvd.reducescatter(numbers, name="join.scatter"),
    }[what]
    before = [send() for _ in range(3)]  # its response is in the caches now
    if rank != size - 1:
        time.sleep(0.1)
        for _ in range(2):
            with pytest.raises(HorovodInternalError, match="not supported with Join"):
                send()
    hvd.join()
    assert torch.equal(send(), before[0])


class FromAnotherThread:
    """What a thread of the last rank is told if it calls `send` while its rank waits in join for the others."""

    def __init__(self, hvd, send, folder):
        self._hvd, self._send, self._ended = hvd, send, folder / "ended"
        self.said = ""

    def _late(self):
        time.sleep(1.0)  # by then this rank has called join
        try:
            self._send()
        except ValueError as error:
            self.said = str(error)
        finally:
            self._ended.touch()  # the others wait for it

    def run(self, others=lambda: None):
        is_last = self._hvd.rank() == self._hvd.size() - 1
        if is_last:
            threading.Thread(target=self._late).start()
        else:
            while not self._ended.exists():
                time.sleep(0.01)
            others()
        self._hvd.join()
        return self.said if is_last else None


def test_what_another_thread_sends_while_its_rank_waits_in_join_is_an_error(hvd, shared_tmp_path):
    late = FromAnotherThread(hvd, lambda: hvd.allreduce(torch.ones(1), name="join.late"), shared_tmp_path)
    said = late.run()
    assert said is None or said.startswith("allreduce.join.late was sent while this rank waits in join() for the other")


def test_a_process_set_cannot_be_added_where_a_rank_has_joined(hvd, shared_tmp_path):
    def others():
        with pytest.raises(ValueError, match=r"not all ranks have called add_process_set\(\[0\]\)"):
            hvd.add_process_set([0])

    said = FromAnotherThread(hvd, lambda: hvd.add_process_set([0]), shared_tmp_path).run(others)
    assert said is None or "waits in join" in said
    hvd.remove_process_set(hvd.add_process_set([0]))
