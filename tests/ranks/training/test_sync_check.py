"""A rank that holds other weights is found and named, or repaired: the same tests for torch and every Keras backend."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from hvdtrain.callbacks import Callback
from hvdtrain.callbacks.sync_check import SyncCheck
from hvdtrain.errors import DesyncError

BATCH = 4


def data(num_samples=48, seed=1):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(num_samples, 6)).astype(np.float32)
    return x, generator.integers(0, 3, num_samples)


class Flip(Callback):
    """Flips one bit of one tensor on one rank, after step `step` of this fit (from 1), or at its end."""

    def __init__(self, tensor, *, rank=1, step=None):
        self.tensor, self.rank, self.step = tensor, rank, step
        self.steps = 0

    def on_step_end(self, trainer, step):
        self.steps += 1
        if self.steps == self.step:
            self.flip(trainer)

    def on_fit_end(self, trainer):
        if self.step is None:
            self.flip(trainer)

    def flip(self, trainer):
        state = trainer.state()
        if trainer.world.rank == self.rank:
            state.arrays[self.tensor].reshape(-1).view(np.uint8)[2] ^= 0x40  # of a float32, half of a number's size
            trainer.load_state(state)


def tensors(trainer):
    """The second weight matrix and its momentum, as the framework under test names them."""
    trainer.fit(data(), epochs=1, batch_size=BATCH, callbacks=[SyncCheck(every=0)], progress=False)
    names = list(trainer.state().arrays)
    weights = [name for name in names if name.startswith("model.")]
    momenta = [name for name in names if "momentum" in name]
    assert len(weights) == len(momenta) == 4
    return {"weight": weights[2], "momentum": momenta[2]}


def fit(kit, *callbacks, net=None, epochs=2, samples=48, trainer=None):
    trainer = trainer or kit.trainer(net or kit.model())
    trainer.fit(data(samples), epochs=epochs, batch_size=BATCH, callbacks=callbacks, progress=False)
    return trainer


def error_of_all(world, kit, *callbacks, **options):
    """Return the DesyncError's text, equal on all ranks."""
    with pytest.raises(DesyncError) as caught:
        fit(kit, *callbacks, **options)
    texts = world.allgather_object(str(caught.value))
    assert texts == [texts[0]] * world.size
    return texts[0]


def assert_equal_on_all_ranks(world, trainer):
    state = trainer.state()
    for name, array in state.arrays.items():
        everybody = world.allgather(np.asarray(array).reshape(1, -1))
        assert (everybody.view(np.uint8) == everybody[:1].view(np.uint8)).all(), name


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("what", [pytest.param("weight", marks=pytest.mark.every_backend), "momentum"])
def test_one_flipped_bit_on_one_rank_is_named_at_the_next_check(kit, world, what):
    tensor = tensors(kit.trainer(kit.model()))[what]
    # Checks after steps 1 and 4: with momentum in the same step, before the next one carries it into the weight.
    text = error_of_all(world, kit, Flip(tensor, step=4), SyncCheck(every=3))
    where = "on rank 1 (" if world.size == 3 else "between rank 0 ("
    assert f"{tensor} {'differs ' if world.size == 2 else ''}{where}" in text
    assert "rank 1 (" in text
    assert "Found after step 4 of epoch 1; equal after step 1 of epoch 1." in text
    assert "1 of " in text


@pytest.mark.world_size(2, 3)
def test_a_flip_between_checks_is_found_within_the_interval(kit, world):
    tensor = tensors(kit.trainer(kit.model()))["weight"]
    text = error_of_all(world, kit, Flip(tensor, step=2), SyncCheck(every=3))
    assert "Found after step 4 of epoch 1" in text
    assert tensor in text


@pytest.mark.world_size(2, 3)
def test_it_is_on_unless_switched_off(kit, world):
    tensor = tensors(kit.trainer(kit.model()))["weight"]
    # The first two checks come after steps 1 and 11.
    assert "Found after step 1 of epoch 1; equal when fit began." in error_of_all(world, kit, Flip(tensor, step=1))
    text = error_of_all(world, kit, Flip(tensor, step=2), epochs=4)
    assert f"Found after step {11 % (12 // world.size)} of epoch" in text
    assert "at the end of fit; equal after step" in error_of_all(world, kit, Flip(tensor))
    trainer = fit(kit, Flip(tensor, step=1), SyncCheck(every=0))
    with pytest.raises(AssertionError):
        assert_equal_on_all_ranks(world, trainer)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("what", ["weight", "momentum"])
def test_repair_makes_ranks_equal_again_and_goes_on(kit, world, what, caplog):
    tensor = tensors(kit.trainer(kit.model()))[what]
    undisturbed = fit(kit, SyncCheck(every=1))
    with caplog.at_level(logging.WARNING, logger="hvdtrain"):
        repaired = fit(kit, Flip(tensor, step=2), SyncCheck(every=1, on_divergence="repair"))
    assert_equal_on_all_ranks(world, repaired)
    assert len(repaired.history["loss"]) == 2
    # Repaired before the next step, the run is as if nothing had been.
    for ours, theirs in zip(repaired.state().arrays.values(), undisturbed.state().arrays.values(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=0 if world.size == 2 else 1e-6)
    warned = [record.getMessage() for record in caplog.records if "rank 0's" in record.getMessage()]
    assert len(warned) == (1 if world.is_root else 0)
    assert all(tensor in text and "rank 1 (" in text and "after step 2 of epoch 1" in text for text in warned)


@pytest.mark.world_size(2, 3)
def test_repair_within_an_interval_leaves_ranks_equal(kit, world):
    tensor = tensors(kit.trainer(kit.model()))["weight"]
    repaired = fit(kit, Flip(tensor, step=2), SyncCheck(every=3, on_divergence="repair"))
    assert_equal_on_all_ranks(world, repaired)


@pytest.mark.world_size(3)
def test_a_root_that_is_alone_does_not_spread_what_it_holds(kit, world):
    tensor = tensors(kit.trainer(kit.model()))["weight"]
    text = error_of_all(world, kit, Flip(tensor, rank=0, step=2), SyncCheck(every=1, on_divergence="repair"))
    assert f"{tensor} on rank 0 (" in text
    assert "rank 0 is not among them" in text


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("samples", [48, pytest.param(50, marks=pytest.mark.on_keras)])
def test_running_statistics_raise_no_alarm_until_they_are_settled(kit, world, samples, caplog):
    net, _ = kit.batch_norm_model()
    with caplog.at_level(logging.WARNING, logger="hvdtrain"):
        trainer = fit(kit, SyncCheck(every=1, on_divergence="repair"), net=net, samples=samples)
    assert not [record for record in caplog.records if "no longer" in record.getMessage()]
    per_rank = sorted(trainer.state().per_rank)
    assert len(per_rank) >= 2
    assert all("gamma" not in name and "weight" not in name for name in per_rank)
    (mean,) = [name for name in per_rank if "mean" in name]
    text = error_of_all(world, kit, Flip(mean), SyncCheck(every=1), trainer=trainer)
    assert f"{mean} " in text
    assert "at the end of fit" in text


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"accumulate": 3}, marks=pytest.mark.on_keras),
        {"precision": "fp16"},
        {"precision": "bf16"},
        {"clip_norm": 0.1},
    ],
)
def test_healthy_runs_raise_no_alarm(kit, world, options):
    trainer = kit.trainer(kit.model(), **options)
    fit(kit, SyncCheck(every=1), trainer=trainer, samples=50)
    assert_equal_on_all_ranks(world, trainer)


@pytest.mark.world_size(2, 3)
def test_random_draws_of_each_rank_raise_no_alarm(kit, world):
    fit(kit, SyncCheck(every=1), net=kit.random_model(), samples=50)


@pytest.mark.on_keras
@pytest.mark.world_size(2, 3)
def test_a_flip_in_a_frozen_weight_is_found_before_anything_averages_it(kit, world):
    net = kit.model()
    if kit.__name__ == "keras_kit":
        net.layers[0].trainable = False
    else:
        net[0].requires_grad_(False)
    trainer = kit.trainer(net)
    frozen = next(iter(trainer.state().arrays))
    text = error_of_all(world, kit, Flip(frozen, step=2), SyncCheck(every=1), trainer=trainer)
    assert f"{frozen} " in text
    assert "Found after step 2 of epoch 1" in text


@pytest.mark.world_size(2)
def test_a_run_with_fewer_samples_than_ranks_raises_no_alarm(kit, world):
    fit(kit, SyncCheck(every=1), samples=1)


@pytest.mark.world_size(2)
def test_ranks_that_would_check_at_different_steps_are_told_so(kit, world):
    assert "SyncCheck's options: every is" in error_of_all(world, kit, SyncCheck(every=1 + world.rank))
    assert "SyncCheck's options" in error_of_all(world, kit, *[SyncCheck(every=0)] * (world.rank == 0))
