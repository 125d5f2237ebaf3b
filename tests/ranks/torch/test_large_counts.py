"""Operations on more numbers, or bytes, than an int counts: all of them move, or all ranks refuse and can continue.

Pages that nobody writes take no memory, so the tests write no more than they have to.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.world_size(2), pytest.mark.over_gloo]
MOST = 2**31 - 1  # of an int


@pytest.mark.parametrize(
    "count", [MOST + 9, pytest.param(2 * MOST + 10, marks=pytest.mark.long)]
)  # the latter: 2**32 + 8
def test_a_broadcast_of_more_bytes_than_an_int_counts_is_whole(hvd, rank, count):
    tensor = torch.zeros(count, dtype=torch.uint8)
    if rank == 1:
        tensor[[0, 2**30, -1]] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    hvd.broadcast_(tensor, 1, name="broadcast")
    assert tensor[[0, 1, 2**30, -2, -1]].tolist() == [1, 0, 2, 0, 3]


@pytest.mark.parametrize("operation", ["allgather", pytest.param("reducescatter", marks=pytest.mark.long)])
def test_results_with_more_places_than_an_int_counts_are_refused_on_all_ranks(hvd, rank, operation):
    share = {"allgather": 2**30 + 1, "reducescatter": MOST + 9}[operation]
    with pytest.raises(hvd.HorovodInternalError, match=f"numbers are too many for one {operation}: at most {MOST}"):
        getattr(hvd, operation)(torch.zeros(share, dtype=torch.uint8), name=operation)
    assert hvd.allreduce(torch.ones(2), name="after").tolist() == [1, 1]


@pytest.mark.long
def test_an_allgather_puts_a_rank_behind_more_bytes_than_an_int_counts(hvd, rank):
    many = 2**29 + 4  # of four bytes
    gathered = hvd.allgather(torch.full((3,), 7.0) if rank else torch.zeros(many), name="gather")
    assert gathered.shape == (many + 3,)
    assert gathered[-4:].tolist() == [0, 7, 7, 7]
