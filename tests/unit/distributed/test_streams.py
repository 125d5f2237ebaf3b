"""Ranks have streams of their own, and a common one for what they draw alike."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hvdtrain.distributed import rank_state, streams
from hvdtrain.distributed.world import SoloWorld


@pytest.fixture(autouse=True)
def _restored():
    before = rank_state.random_states()
    yield
    streams.share(None)
    rank_state.set_random_states(before)


def seeded(number):
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    return rank_state.random_states()


def digests(*seeds):
    """Of ranks with these seeds."""
    return [streams.digests(seeded(seed), world=SoloWorld())[0] for seed in seeds]


def drawn(number, seeds):
    seeded(number)
    streams.reseed(seeds)
    return random.random(), float(np.random.rand())  # noqa: NPY002


def test_ranks_seeded_alike_get_streams_that_state_rank_and_step_determine():
    found = digests(0, 0, 0)
    assert streams.own_seeds(found, rank=0) == {}
    each = [drawn(0, streams.own_seeds(found, rank=rank, step=step)) for rank, step in ((0, 0), (1, 0), (2, 0), (2, 9))]
    assert len({value for pair in each for value in pair}) == 8
    assert each[1] == drawn(0, streams.own_seeds(found, rank=1))
    assert each[1] != drawn(1, streams.own_seeds(digests(1, 1), rank=1))


def test_ranks_that_a_script_seeds_differently_keep_their_streams():
    found = digests(0, 1, 0)
    assert streams.own_seeds(found, rank=1) == {}
    assert streams.own_seeds(found, rank=2).keys() == {"random.python", "random.numpy"}
    assert streams.alike(found) == set()
    assert streams.alike(digests(0, 0)) == {"random.python", "random.numpy"}


def draws():
    for _ in range(4):
        yield random.random(), float(np.random.rand())  # noqa: NPY002


def test_data_that_all_ranks_iterate_draws_alike_whatever_a_rank_draws_meanwhile():
    streams.share(streams.key_of(digests(0)))
    found, own = [], []
    for rank in (0, 1):
        seeded(rank)
        iterator = streams.draw_alike(draws, epoch=2, generators=[])
        found.append([(next(iterator), [random.random() for _ in range(rank)])[0] for _ in range(4)])
        own.append(random.random())
    assert found[0] == found[1]
    seeded(0)
    assert own[0] == random.random()  # the rank's own stream goes on as if nothing had been iterated
    assert list(streams.draw_alike(draws, epoch=3, generators=[])) != found[0]


def test_an_epoch_that_began_without_a_key_continues_from_the_generators():
    seeded(5)
    expected, after = list(draws()), random.random()
    streams.share(1, unseeded=2)
    seeded(5)
    first, _, *rest = streams.draw_alike(draws, epoch=2, generators=[])
    assert [first, *rest] == [expected[0], *expected[2:]]
    assert random.random() != after  # drawn aside


def test_without_a_common_key_data_draws_from_the_generators_as_they_are():
    seeded(0)
    expected = random.random()
    seeded(0)
    assert list(streams.draw_alike(lambda: iter([random.random()]), epoch=0, generators=[])) == [expected]
