"""Naming what differs, and where: from digests alone."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.adapter import State
from hvdtrain.callbacks import sync_check
from hvdtrain.distributed.world import SoloWorld


def reports(*ranks):
    """One report a rank: a string of letters, each a tensor's digest, for tensors t0, t1, ..."""
    return [
        {"host": f"host{rank // 2}", "digests": {f"t{i}": d for i, d in enumerate(digests) if d != "-"}}
        for rank, digests in enumerate(ranks)
    ]


def test_the_minority_and_the_first_tensor_are_named():
    text, root_is_odd = sync_check.describe(reports("abc", "abc", "aXY", "abc"))
    assert not root_is_odd
    assert text == "t1 on rank 2 (host1) differs from that of the other 3 ranks (2 of 3 tensors differ)"


def test_of_two_ranks_nobody_knows_which_is_right():
    text, root_is_odd = sync_check.describe(reports("ab", "aX"))
    assert not root_is_odd
    assert text == "t1 differs between rank 0 (host0) and rank 1 (host0) (1 of 2 tensors differs)"


def test_two_against_two_are_both_named():
    text, _ = sync_check.describe(reports("a", "b", "a", "b"))
    assert "ranks 0 (host0), 2 (host1) and ranks 1 (host0), 3 (host1)" in text


@pytest.mark.parametrize(("ranks", "odd"), [(("X", "a", "a"), True), (("aX", "ab", "ab"), True), (("a", "b"), False)])
def test_a_root_in_the_minority_is_told(ranks, odd):
    assert sync_check.describe(reports(*ranks))[1] is odd


def test_a_root_that_is_wrong_in_a_later_tensor_is_told():
    text, root_is_odd = sync_check.describe(reports("aX", "ab", "Yb", "ab"))
    assert text.startswith("t0 on rank 2 (host1) differs")
    assert root_is_odd


def test_a_tensor_that_ranks_lack_is_named():
    assert "t1 is missing on rank 1 (host0)" in sync_check.describe(reports("ab", "a-", "ab"))[0]


def test_many_ranks_are_counted():
    text, _ = sync_check.describe(reports(*["a"] * 30, *[f"{i}" for i in range(20)]))
    assert "49" not in text
    assert "and 12 more differs from that of the other 30 ranks" in text  # eight are named


def test_equal_digests_are_no_difference():
    with pytest.raises(ValueError, match="do not differ"):
        sync_check.describe(reports("ab", "ab"))


def test_what_ranks_change_on_their_own_counts_when_settled():
    def state(mean):
        return State({"weight": np.ones(3), "mean": np.full(3, mean)}, {"lr": 0.1}, frozenset({"mean"}))

    assert sync_check.digests(state(1.0), settled=False) == sync_check.digests(state(2.0), settled=False)
    assert sync_check.digests(state(1.0), settled=True) != sync_check.digests(state(2.0), settled=True)


def test_settings_count():
    one, other = (State({"weight": np.ones(3)}, {"lr": rate}) for rate in (0.1, 0.2))
    mine, theirs = (sync_check.digests(state, settled=True) for state in (one, other))
    assert mine["weight"] == theirs["weight"]
    assert mine[sync_check.SETTINGS] != theirs[sync_check.SETTINGS]


class Beside(SoloWorld):
    """A world whose other rank sends what it is told to."""

    def __init__(self, other):
        super().__init__()
        self.other, self.sent = other, None

    def allreduce(self, array, op="sum", *, name="host"):
        assert op == "max"
        self.sent = array
        return array if self.other is None else np.maximum(array, self.other)


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("by", [-1, 1])
def test_one_exchange_tells_a_difference_both_ways(position, by):
    same = Beside(None)
    mine = {"t": b"0123456789abcdef"}
    assert sync_check.equal(mine, world=same, figures=[5, -7]) == (True, [5, -7])
    other = same.sent.copy()
    other[position] += by
    other[2 + position] = ~other[position]
    other[4:] = [9, -8]
    assert sync_check.equal(mine, world=Beside(other), figures=[5, -7]) == (False, [9, -7])
