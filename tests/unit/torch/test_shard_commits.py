"""The last commit of a sharded state: which hosts may be lost, and what each rank then gets."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from hvdtrain.distributed import keepers, shard_commits
from hvdtrain.errors import HvdTrainError, LostShardError
from hvdtrain.torch.ops import engine
from hvdtrain.torch.reduction import shard_commits as on_torch
from hvdtrain.torch.reduction.division import Division, flat
from hvdtrain.torch.reduction.sharded import Shards

SHAPES = [(300, 7), (5,), (), (64, 64)]


class Meeting:
    """Where ranks exchange objects; a failure lets all of them fail."""

    def __init__(self, size):
        self._slots, self._barrier = [None] * size, threading.Barrier(size)

    def exchange(self, rank, value):
        self._slots[rank] = value
        self._barrier.wait(10)
        everyones = list(self._slots)
        self._barrier.wait(10)
        return everyones


HERE = threading.local()  # this thread's rank, the number of ranks, their meeting, and the rank's host


class Rank:
    """A process: its optimizer's shards, and what it keeps of commits."""

    process_set_id, ranks = 0, None  # as Horovod's set of all ranks

    def __init__(self, host, shapes=SHAPES):
        self.host = host
        weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
        HERE.rank, HERE.size = 0, 1
        self.shards = Shards(torch.optim.Adam(weights), self)
        self.commits = on_torch.commits_of(lambda: [self.shards])

    def size(self):
        return HERE.size

    def rank(self):
        return HERE.rank


def values(seed):
    """Return a whole state, of several types."""
    generator = torch.Generator().manual_seed(seed)
    return {
        index: {
            "step": torch.tensor(float(seed)),
            "exp_avg": torch.randn(shape, generator=generator),
            "exp_avg_sq": torch.randn(shape, generator=generator).bfloat16(),
            "note": ["a", seed],
        }
        for index, shape in enumerate(SHAPES)
    }


@pytest.fixture(autouse=True)
def _collectives(monkeypatch):
    def alltoall(data, splits, name):
        everyones = HERE.meeting.exchange(HERE.rank, (data, splits))
        rows = [each.split(lengths)[HERE.rank] for each, lengths in everyones]
        return SimpleNamespace(wait=lambda: (torch.cat(rows), [len(row) for row in rows]))

    monkeypatch.setattr(on_torch, "alltoall_async", alltoall)
    monkeypatch.setattr(on_torch, "allgather_object", lambda mine, name: HERE.meeting.exchange(HERE.rank, mine))
    monkeypatch.setattr(on_torch, "barrier", lambda: HERE.meeting.exchange(HERE.rank, None))
    monkeypatch.setattr(keepers, "this_host", lambda: ("machine", HERE.host))
    monkeypatch.setattr(on_torch.engine, "native", lambda: SimpleNamespace(
        rank=lambda: HERE.rank, size=lambda: HERE.size, global_process_set=None
    ))  # fmt: skip


def together(ranks, function):
    """Return what `function(rank)` returns on each rank."""
    meeting = Meeting(len(ranks))

    def run(number):
        HERE.rank, HERE.size, HERE.meeting, HERE.host = number, len(ranks), meeting, ranks[number].host
        return function(ranks[number])

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, range(len(ranks))))


def commit(rank):
    rank.commits.prepare()
    rank.commits.confirm()


def begin(hosts, seed=1):
    """Return ranks on hosts that hold shards of a state."""
    ranks = [Rank(host) for host in hosts]
    engine.generation += 1
    together(ranks, lambda rank: hold(rank, seed))
    return ranks


def hold(rank, seed):
    rank.shards.load(values(seed))
    rank.shards.follow_ranks()
    rank.shards.adopt()


def renew(ranks):
    """Let these be the ranks of a new round."""
    engine.generation += 1
    return together(ranks, lambda rank: rank.commits.load())


def assert_holds(ranks, seed):
    """Compare the parts of all ranks with a whole state."""
    expected = values(seed)
    held = [{(index, name): value for index, name, value, _ in rank.shards.parts()} for rank in ranks]
    for index, entries in expected.items():
        for name, value in entries.items():
            theirs = [each[index, name] for each in held]
            if name in ("step", "note"):
                assert all(each == value for each in theirs)
            else:
                bounds = [Division(len(ranks)).bounds(value.numel(), rank) for rank in range(len(ranks))]
                assert [len(each) for each in theirs] == [end - begin for begin, end in bounds]
                assert torch.equal(torch.cat(theirs), flat(value))
                assert theirs[0].dtype == value.dtype


@pytest.mark.parametrize("hosts", ["ab", "abc", "aabb", "abab", "aaab", "aabbbc"])
@pytest.mark.parametrize("new", [0, 2])
def test_any_one_host_may_be_lost_between_two_commits(hosts, new):
    for lost in sorted(set(hosts)):
        ranks = begin(hosts)
        together(ranks, commit)
        together(ranks, lambda rank: hold(rank, 2))  # steps after the commit are undone
        left = [rank for rank in ranks if rank.host != lost] + [Rank("z") for _ in range(new)]
        assert all(renew(left))
        assert_holds(left, 1)
        together(left, commit)
        assert_holds(left, 1)
        if len({rank.host for rank in left}) > 1:
            left = [rank for rank in left if rank.host != left[0].host]
            assert all(renew(left))
            assert_holds(left, 1)


@pytest.mark.parametrize("hosts", ["abc", "aabb", "abcd", "aaa"])
def test_a_rank_holds_at_most_its_part_and_one_copy(hosts):
    ranks = begin(hosts)
    together(ranks, commit)
    together(ranks, commit)
    whole = sum(value.nbytes for entries in values(1).values() for name, value in entries.items() if name[:3] == "exp")
    rounding = 64 * 6 * len(SHAPES)
    copies = 1 if hosts == "aaa" else 2
    assert max(rank.commits.nbytes for rank in ranks) <= copies * (whole / len(hosts) + rounding)
    assert sum(rank.commits.nbytes for rank in ranks) == copies * whole


def test_a_large_weight_is_sent_in_pieces(monkeypatch):
    monkeypatch.setattr(shard_commits, "_AT_ONCE_BYTES", 1000)
    monkeypatch.setattr(shard_commits, "_MOST_BYTES", 600)
    ranks = begin("abcd")
    together(ranks, commit)
    left = [*ranks[1:], Rank("e"), Rank("f")]
    assert all(renew(left))
    assert_holds(left, 1)


def test_a_rank_and_its_keeper_that_are_lost_together_are_named_on_every_rank():
    ranks = begin("abcd")
    together(ranks, commit)
    said = (
        r"rank 1 \(host b\) and the keeper of its copy, rank 2 \(host c\), ended.*Received: parts of ranks \[0, 2, 3\]"
    )

    def load(rank):
        with pytest.raises(LostShardError, match=said):
            rank.commits.load()
        return True

    engine.generation += 1
    assert together([ranks[0], ranks[3]], load) == [True, True]


@pytest.mark.parametrize("committed", [[True, True, True], [True, False, True], [False, True, False], [False] * 3])
def test_after_a_failure_within_a_commit_the_roots_commit_counts(committed):
    """Ranks that have saved the new commit have begun `confirm`, and all have ended `prepare`."""
    ranks = begin("abcd")
    together(ranks, commit)
    together(ranks, lambda rank: hold(rank, 2))
    together(ranks, lambda rank: rank.commits.prepare())
    for rank, has_saved in zip(ranks[1:], committed, strict=True):  # rank 0 has died, and so the barrier fails
        rank.commits._number += has_saved
    left = ranks[1:]
    assert all(renew(left))
    assert_holds(left, 2 if committed[0] else 1)
    together(left, commit)
    assert all(renew(left[1:]))
    assert_holds(left[1:], 2 if committed[0] else 1)


def test_a_rank_with_another_model_is_named_on_every_rank():
    ranks = begin("ab")
    together(ranks, commit)

    def load(rank):
        with pytest.raises(
            HvdTrainError, match=r"Received: \[\[2100, 5, 1, 4096\]\] on rank 0 and \[\[5\]\] on rank 2"
        ):
            rank.commits.load()

    engine.generation += 1
    together([*ranks, Rank("c", [(5,)])], load)


def test_a_rank_that_ends_before_the_first_commit_leaves_no_state_that_could_be_taken_for_the_whole():
    ranks = begin("abc")

    def load(rank):
        with pytest.raises(LostShardError, match="before the first commit"):
            rank.commits.load()

    engine.generation += 1
    together(ranks[1:], load)
    fresh = [Rank("a"), Rank("b")]
    assert renew(fresh) == [False, False]


def test_on_equal_hosts_each_rank_keeps_one_copy_for_a_rank_on_another_host():
    for hosts in ("ab", "abc", "aabb", "abab", "aabbcc", "aabbc", "abcdefg"):
        chosen = keepers.choose(hosts)
        assert sorted(chosen) == list(range(len(hosts)))
        assert all(hosts[rank] != hosts[keeper] for rank, keeper in enumerate(chosen))


def test_on_unequal_hosts_copies_are_on_another_host_and_shared_out():
    for hosts in ("aab", "aaab", "aaabb", "baaaac"):
        chosen = keepers.choose(hosts)
        assert all(hosts[rank] != hosts[keeper] for rank, keeper in enumerate(chosen))
        most = hosts.count("a")
        assert max(Counter(chosen).values()) == -(-most // (len(hosts) - most))


def test_machines_count_where_there_are_several_and_the_drivers_hosts_else():
    assert keepers.hosts_of([("m", "localhost"), ("m", "127.0.0.1")]) == ["localhost", "127.0.0.1"]
    assert keepers.hosts_of([("m", "m-1"), ("m", "m-2"), ("n", "n-1")]) == ["m", "m", "n"]
    assert keepers.hosts_of([("m", ""), ("m", "")]) == ["m", "m"]
