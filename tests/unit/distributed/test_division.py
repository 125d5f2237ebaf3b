"""The division of weights among ranks."""

from __future__ import annotations

import pytest

from hvdtrain.distributed.division import Division


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_what_ranks_send_and_keep_is_each_number_once(size):
    """The last weight is too small for the last ranks."""
    division = Division(size)
    of_ranks = [sum(end - begin for begin, end in each) for each in division.of_ranks([640, 100])]
    vector, got = range(sum(of_ranks)), [[] for _ in range(size)]
    for rank in range(size):
        part, counts, own = division.sent(of_ranks, rank)
        sent = list(vector[part])
        assert len(sent) == sum(counts)
        assert (counts[rank] == 0) == (rank in (0, size - 1) or of_ranks[rank] == 0)
        for other in range(size):
            piece, sent = sent[: counts[other]], sent[counts[other] :]
            got[other].append(piece)
        if own is not None:
            got[rank][-1] = list(vector[own])
    for rank in range(size):
        assert got[rank] == [list(vector[sum(of_ranks[:rank]) : sum(of_ranks[: rank + 1])])] * size
