"""The random generators that data hold are found wherever users put them, and their states are saved and restored."""

from __future__ import annotations

import random
from collections import deque
from functools import partial

import numpy as np
import pytest

from hvdtrain.data.generators import Generators, generators_of
from hvdtrain.errors import CheckpointError

of_module = random.Random(5)


class Holder:
    def __init__(self, **attributes):
        vars(self).update(attributes)


class OfClass:
    rng = np.random.default_rng(5)


class NamesAGlobal:
    def draw(self):
        return [of_module.random() for _ in range(2)]


def draws_from(rng):
    return lambda x: x + rng.random()


PLACES = {
    "x.rng": lambda rng: Holder(rng=rng),
    "x.0.inner.rng": lambda rng: [Holder(inner=Holder(rng=rng))],
    "x.parts.noise": lambda rng: Holder(parts={"noise": rng}),
    "x.transforms.0.rng": lambda rng: Holder(transforms=deque([draws_from(rng)])),
    "x.fn.rng": lambda rng: Holder(fn=partial(draws_from, rng=rng)),
    "x.0": lambda rng: partial(draws_from, rng),
}


@pytest.mark.parametrize("path", PLACES)
def test_a_generator_is_found_by_its_path(path):
    found = Generators({"x": PLACES[path](np.random.default_rng(0))})
    assert found.paths == [path]


def test_generators_of_classes_and_global_variables_are_found():
    assert Generators({"x": OfClass()}).paths == ["x.class.rng"]
    assert Generators({"x": NamesAGlobal()}).paths == ["x.class.of_module"]
    assert Generators({"x": Holder(draw=NamesAGlobal().draw)}).paths == ["x.draw.function.of_module"]


def test_a_generator_that_several_reach_is_found_once_and_circles_end():
    rng, holder = random.Random(0), Holder()
    holder.me, holder.rng, holder.again = holder, rng, [rng]
    assert Generators({"x": holder, "y": rng}).paths == ["y"]


def test_global_generators_and_long_lists_are_left_out():
    numpys = np.random.mtrand._rand
    globals_ = Holder(python=random._inst, numpy=numpys, bits=numpys._bit_generator)
    assert Generators({"x": globals_, "y": [random.Random(0)] * 2000}).paths == []


MAKE = {
    "PCG64": lambda: np.random.default_rng(1),
    "MT19937": lambda: np.random.Generator(np.random.MT19937(1)),
    "Philox": lambda: np.random.Generator(np.random.Philox(1)),
    "SFC64": lambda: np.random.Generator(np.random.SFC64(1)),
    "RandomState": lambda: np.random.RandomState(1),
    "Random": lambda: random.Random(1),
}


def drawn(rng):
    if isinstance(rng, random.Random):
        return [rng.random(), rng.gauss(0, 1), rng.randrange(10)]
    return [rng.random(), rng.standard_normal(), rng.permutation(20).tolist()]


@pytest.mark.parametrize("kind", MAKE)
def test_a_restored_generator_draws_the_same_again(kind):
    rng = MAKE[kind]()
    found = Generators({"x": Holder(rng=rng)})
    drawn(rng)  # a normal number leaves a second one behind
    saved = {path: array.copy() for path, array in found.states().items()}
    expected = [drawn(rng) for _ in range(3)]
    Generators({"x": Holder(rng=rng)}).set_states(saved)
    assert [drawn(rng) for _ in range(3)] == expected
    with found.aside():
        drawn(rng)
    assert drawn(rng) not in expected


@pytest.mark.parametrize("kind", MAKE)
def test_seeds_of_a_batch_give_each_generator_numbers_of_its_own(kind):
    first, second = MAKE[kind](), MAKE[kind]()
    found = Generators({"x": [first, second]})
    found.seed((1, 2))
    once = drawn(first), drawn(second)
    assert once[0] != once[1]
    found.seed((1, 2))
    assert (drawn(first), drawn(second)) == once
    found.seed((1, 3))
    assert drawn(first) != once[0]


def test_the_state_of_another_kind_of_generator_is_refused():
    saved = Generators({"x": Holder(rng=np.random.default_rng(0))}).states()
    other = Generators({"x": Holder(rng=np.random.Generator(np.random.Philox(0)))})
    with pytest.raises(CheckpointError, match=r"another generator for x\.rng"):
        other.set_states(saved)


class FakeLoader:
    """A DataLoader of a dataset that holds a generator, with a sampler that holds an iterator."""

    generator = batch_sampler = collate_fn = None

    def __init__(self, *, persistent_workers):
        self.persistent_workers = persistent_workers
        self.dataset = Holder(rng=random.Random(0), lines=iter([1, 2]))
        self.sampler = Holder(rng=random.SystemRandom(), order=iter([1, 2]), data_source=self.dataset)


@pytest.mark.parametrize(("persistent", "replays"), [(False, True), (True, False), (True, True)])
def test_what_cannot_be_saved_is_named(persistent, replays):
    found = generators_of(FakeLoader(persistent_workers=persistent), replays=replays, is_root=True)
    assert found.paths == ["dataset.rng"]
    expected = ["sampler.rng, since a SystemRandom has no state", "the place of the iterator sampler.order"]
    if persistent and replays:
        expected.append("what persistent_workers have drawn from dataset.rng")
    assert found.unsaved == expected
