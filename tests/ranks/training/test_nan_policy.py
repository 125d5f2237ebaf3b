"""Numbers that go bad on one rank: all ranks see it in the same step, and one message says whose they were."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest

from hvdtrain.callbacks import Callback
from hvdtrain.data.sources import IndexedSource
from hvdtrain.errors import NonFiniteError

BATCH = 4


def data(bad=()):
    generator = np.random.default_rng(1)
    x = generator.normal(size=(48, 6)).astype(np.float32)
    x[list(bad)] = np.nan
    return x, generator.integers(0, 3, 48)


def whose(index, world):
    """Return (rank, step) at which the only bad sample comes in epoch 0."""
    from hvdtrain.data import sharding

    place = sharding.epoch_order(48).tolist().index(index)
    return place % world.size, place // (BATCH * world.size)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.every_backend), {"clip_norm": 1.0}, {"accumulate": 2}, {"compression": "bf16"}],
)
def test_raise_names_step_rank_gradient_and_samples_on_every_rank(kit, world, options):
    rank, step = whose(17, world)
    step //= options.get("accumulate", 1)
    net = kit.norm_model()
    name = kit.first_name(net)
    with pytest.raises(NonFiniteError) as caught:
        kit.trainer(net, nan_policy="raise", **options).fit(data(bad=[17]), batch_size=BATCH, progress=False)
    message = str(caught.value)
    assert f"Step {step + 1} of epoch 1: on rank {rank} (" in message
    assert f"the gradient of {name} is not finite" in message
    assert "17" in message.partition("of the samples ")[2].partition(";")[0].split(", ")
    assert "the loss there is not finite either" in message
    assert all(np.isfinite(w).all() for w in kit.trained(net))
    everybody = world.allgather_object(message)
    assert len(set(everybody)) == 1


@pytest.mark.world_size(2)
def test_a_loader_tells_its_samples_too(kit, world):
    import torch

    x, y = data(bad=[17])
    rows = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    loader = torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True)
    with pytest.raises(NonFiniteError, match=r"of the samples .*\b17\b.*;"):
        kit.trainer(kit.norm_model(), nan_policy="raise").fit(loader, progress=False)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    ("rule", "accumulate"),
    [
        ("optimizer_of", 1),
        ("optimizer_of", 2),
        ("adam_of", 1),
        pytest.param("adam_of", 2, marks=pytest.mark.every_backend),
    ],
)
def test_skip_trains_as_if_the_step_had_not_been(kit, world, monkeypatch, rule, accumulate):
    _, step = whose(17, world)
    x, y = data()

    def trainer(net, policy):
        return kit.trainer(net, optimizer=getattr(kit, rule)(net), nan_policy=policy, accumulate=accumulate)

    net, reference = kit.norm_model(), kit.norm_model()
    history = trainer(net, "skip").fit(data(bad=[17]), batch_size=BATCH, progress=False)

    whole = IndexedSource.epoch

    def without_it(self, epoch, *, shuffle, after=None):
        batches = enumerate(whole(self, epoch, shuffle=shuffle))
        return (batch for number, batch in batches if number // accumulate != step // accumulate)

    monkeypatch.setattr(IndexedSource, "epoch", without_it)
    given = trainer(reference, None)
    expected = given.fit((x, y), batch_size=BATCH, progress=False)
    assert history["loss"] == expected["loss"]
    assert history["accuracy"] == expected["accuracy"]
    for number, (ours, theirs) in enumerate(zip(kit.everything(net), kit.everything(reference), strict=True)):
        np.testing.assert_array_equal(ours, theirs, err_msg=str(number))


@pytest.mark.world_size(2)
def test_stop_ends_the_run_before_the_step_with_what_it_had(kit, world, shared_tmp_path, caplog):
    _, step = whose(17, world)
    net = kit.norm_model()
    seen = []

    class Watch(Callback):
        def on_step_end(self, trainer, number):
            seen.append(kit.trained(net))

    run = kit.trainer(net, nan_policy="stop")
    with caplog.at_level(logging.WARNING, "hvdtrain"):
        history = run.fit(
            data(bad=[17]),
            epochs=2,
            batch_size=BATCH,
            callbacks=[Watch()],
            checkpoint_dir=str(shared_tmp_path),
            progress=False,
        )
    assert len(seen) == step
    assert "loss" not in history
    if step:
        assert all(np.array_equal(a, b) for a, b in zip(kit.trained(net), seen[-1], strict=True))
    assert all(np.isfinite(w).all() for w in kit.everything(net))
    world.barrier()
    names = sorted(path.name for path in shared_tmp_path.iterdir())
    assert names == ([f"epoch-000000-step-{step:08d}"] if step else ["epoch-000000"])
    assert ("stops before this step" in caplog.text) == world.is_root


@pytest.mark.world_size(2)
def test_without_a_policy_nobody_looks(kit, world):
    net = kit.norm_model()
    kit.trainer(net).fit(data(bad=[17]), batch_size=BATCH, progress=False)
    assert not all(np.isfinite(w).all() for w in kit.trained(net))


@pytest.mark.on_keras
@pytest.mark.world_size(2)
def test_gradients_that_only_overflow_on_their_way_are_nobodys(kit, world):
    net = kit.norm_model()
    kit.set_first_weight(net, 1e-8)  # normalised later: its gradient grows as it shrinks
    before = kit.trained(net)
    x, y = data()
    name = re.escape(kit.first_name(net))
    with pytest.raises(NonFiniteError, match=f"{name} is not finite over all ranks, though it is on each"):
        kit.trainer(net, nan_policy="raise", compression="fp16").fit((x * 1e6, y), batch_size=BATCH, progress=False)
    assert all(np.array_equal(a, b) for a, b in zip(kit.trained(net), before, strict=True))


@pytest.mark.every_backend
@pytest.mark.world_size(2)
def test_loss_scaling_that_skips_by_itself_is_no_fault(kit, world):
    run = kit.trainer(kit.norm_model(), nan_policy="raise", precision="fp16")
    kit.set_loss_scale(run, 2.0**24)
    taken = []

    class Taken(Callback):
        def on_step_end(self, trainer, step):
            taken.append(trainer.step_taken)

    history = run.fit(data(), epochs=2, batch_size=BATCH, callbacks=[Taken()], progress=False)
    skipped = taken.count(False)
    assert 0 < skipped < len(taken)
    assert kit.loss_scale(run) == 2.0 ** (24 - skipped)
    assert world.allgather_object(taken) == [taken] * world.size
    assert np.isfinite(history["loss"]).all()


@pytest.mark.on_keras
@pytest.mark.world_size(2)
def test_numbers_that_are_bad_whatever_the_scale_are_a_fault(kit, world):
    run = kit.trainer(kit.norm_model(), nan_policy="raise", precision="fp16")
    x, y = data(bad=range(48))
    with pytest.raises(NonFiniteError, match=r"on rank 0 .*and on 1 more ranks"):
        run.fit((x, y), epochs=20, batch_size=BATCH, progress=False)
    assert kit.loss_scale(run) == 1.0
