"""Ranks that a script has seeded alike draw other random numbers, and the same ones where they have to."""

from __future__ import annotations

import itertools
import os
import random

import numpy as np
import pytest
from stopping import StopAt, StoppedError

import hvdtrain
from hvdtrain.callbacks import Callback, Checkpoint
from hvdtrain.distributed import rank_state, streams

# Keras has no `step=`, and draws from Python's and NumPy's generators itself.
on_torch = pytest.mark.skipif(
    os.environ.get("HVDTRAIN_TEST_FRAMEWORK", "torch") != "torch", reason="step= is for torch"
)


class States(Callback):
    def on_step_begin(self, trainer, step):
        self.found = rank_state.random_states() | trainer._adapter.rank_state


def seed(kit):
    kit.seed(3)
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002


def data(num_samples=24):
    generator = np.random.default_rng(0)
    return generator.normal(size=(num_samples, 6)).astype(np.float32), generator.integers(0, 3, num_samples)


def states(kit, world, **options):
    """Train with ranks that are seeded alike; return each rank's digests in the last step, and after fit."""
    seed(kit)
    trainer, seen = kit.trainer(kit.random_model(), **options), States()
    trainer.fit(data(), batch_size=4, epochs=2, callbacks=[seen], progress=False)
    after = rank_state.random_states() | trainer._adapter.rank_state
    return streams.digests(seen.found, world=world), streams.digests(after, world=world)


@pytest.mark.every_backend
@pytest.mark.world_size(2, 3)
def test_ranks_seeded_alike_have_own_streams_in_fit_and_equal_ones_after_it(kit, world):
    within, after = states(kit, world)
    assert len(within[0]) > 2
    for name in within[0]:
        assert len({each[name] for each in within}) == world.size, name
        assert len({each[name] for each in after}) == 1, name


@pytest.mark.world_size(2)
def test_with_rank_streams_false_ranks_draw_the_same_numbers(kit, world):
    within, _ = states(kit, world, rank_streams=False)
    assert all(each == within[0] for each in within)


@on_torch
@pytest.mark.world_size(2)
def test_ranks_that_a_script_seeds_differently_keep_their_streams(kit, world):
    kit.seed(3)
    random.seed(world.rank)
    np.random.seed(world.rank)  # noqa: NPY002
    before, seen = rank_state.random_states(), States()
    kit.trainer(kit.model()).fit(data(4 * world.size), batch_size=4, epochs=1, callbacks=[seen], progress=False)
    for name in ("random.numpy", "random.python"):
        np.testing.assert_array_equal(seen.found[name], before[name])


@pytest.mark.every_backend
@pytest.mark.world_size(2)
@pytest.mark.parametrize("own", [True, False])
def test_after_prepare_ranks_draw_own_numbers_unless_the_script_wants_equal_ones(kit, world, own):
    seed(kit)
    net = kit.random_model()
    kit.prepare_rows(net, *data(), rank_streams=own)
    found = streams.digests(rank_state.random_states(), world=world)
    assert len({each["random.numpy"] for each in found}) == (world.size if own else 1)
    assert len({each["random.python"] for each in found}) == (world.size if own else 1)


def shuffled(generator, num_samples=50):
    """Return rows in an order that is drawn from a global generator, as many iterable datasets have it."""
    import torch

    x, y = data(num_samples)
    orders = {
        "python": lambda: random.sample(range(num_samples), num_samples),
        "numpy": lambda: np.random.permutation(num_samples),  # noqa: NPY002
        "torch": lambda: torch.randperm(num_samples).tolist(),
    }

    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([(x[index], y[index], int(index)) for index in orders[generator]()])

    return torch.utils.data.DataLoader(Rows(), batch_size=4)


def train_shuffled(kit, generator, seen, *, stop=None, callbacks=()):
    import torch

    seed(kit)
    net = kit.random_model()

    def step(model, batch):
        x, y, index = batch
        seen.extend(index.tolist())
        random.random(), np.random.rand()  # noqa: NPY002 - a rank draws in between, more on some ranks
        return hvdtrain.Loss(torch.nn.functional.cross_entropy(model(x), y), count=len(y))

    run = hvdtrain.Trainer(net, optimizer=kit.optimizer_of(net), step=step)
    run.fit(shuffled(generator), epochs=2, progress=False, callbacks=[StopAt(stop), *callbacks])
    return kit.everything(net)


def everyones(seen, world):
    return sorted(itertools.chain.from_iterable(world.allgather_object(seen)))


@on_torch
@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("generator", ["python", "numpy", "torch"])
def test_a_stream_that_shuffles_itself_has_one_order_on_all_ranks(kit, world, generator):
    seen = []
    train_shuffled(kit, generator, seen)
    assert everyones(seen, world) == sorted([*range(50)] * 2)
    assert seen[: len(seen) // 2] != seen[len(seen) // 2 :]  # each epoch has an order of its own


@pytest.mark.world_size(2, 3)
def test_a_callback_that_chooses_the_samples_of_an_epoch_chooses_the_same_on_all_ranks(kit, world):
    seed(kit)
    chosen, own = [], []

    class Choose(Callback):
        def on_epoch_begin(self, trainer, epoch):
            chosen.append([np.random.permutation(24).tolist(), random.random()])  # noqa: NPY002

        def on_epoch_end(self, trainer, epoch, logs):
            chosen.append(random.random())

        def on_step_begin(self, trainer, step):
            own.append(random.random())

    kit.trainer(kit.random_model()).fit(data(), batch_size=4, epochs=2, callbacks=[Choose()], progress=False)
    assert all(each == chosen for each in world.allgather_object(chosen))
    assert chosen[:2] != chosen[2:]  # each epoch has its own
    everyones_own = [value for each in world.allgather_object(own) for value in each]
    assert len(set(everyones_own)) == len(everyones_own)


@on_torch
@pytest.mark.world_size(2)
def test_a_stream_that_shuffles_itself_resumes_in_the_same_order(kit, world, shared_tmp_path):
    seen, straight = [], train_shuffled(kit, "numpy", [])
    with pytest.raises(StoppedError):
        train_shuffled(kit, "numpy", seen, stop=9, callbacks=[Checkpoint(shared_tmp_path, every_steps=1)])
    resumed = train_shuffled(kit, "numpy", seen, callbacks=[Checkpoint(shared_tmp_path, every_steps=1)])
    for ours, theirs in zip(resumed, straight, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert everyones(seen, world) == sorted([*range(50)] * 2)
