"""Numbers that go bad on one rank: all ranks see it in the same step, and one message says whose they were."""

from __future__ import annotations

import logging
import os

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain.callbacks import Callback
from hvdtrain.errors import NonFiniteError

pytestmark = pytest.mark.skipif(os.environ["HVDTRAIN_TEST_FRAMEWORK"] != "torch", reason="nan_policy is PyTorch's")

BATCH = 4


def data(bad=()):
    generator = np.random.default_rng(1)
    x = generator.normal(size=(48, 6)).astype(np.float32)
    x[list(bad)] = np.nan
    return x, generator.integers(0, 3, 48)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def trainer(net, policy, **options):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return hvdtrain.Trainer(net, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss(), nan_policy=policy, **options)


def whose(index, world):
    """Return (rank, step) at which the only bad sample comes in epoch 0."""
    from hvdtrain import sampling

    place = sampling.epoch_order(48).tolist().index(index)
    return place % world.size, place // (BATCH * world.size)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0}, {"accumulate": 2}, {"compression": "bf16"}])
def test_raise_names_step_rank_gradient_and_samples_on_every_rank(world, options):
    rank, step = whose(17, world)
    step //= options.get("accumulate", 1)
    net = model()
    with pytest.raises(NonFiniteError) as caught:
        trainer(net, "raise", **options).fit(data(bad=[17]), batch_size=BATCH, progress=False)
    message = str(caught.value)
    assert f"Step {step + 1} of epoch 1: on rank {rank} (" in message
    assert "the gradient of 0.weight is not finite" in message
    assert "17" in message.partition("of the samples ")[2].partition(";")[0].split(", ")
    assert all(torch.isfinite(p).all() for p in net.parameters())
    everybody = world.allgather_object(message)
    assert len(set(everybody)) == 1


@pytest.mark.world_size(2)
def test_a_loader_tells_its_samples_too(world):
    x, y = data(bad=[17])
    rows = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    loader = torch.utils.data.DataLoader(rows, batch_size=BATCH, shuffle=True)
    with pytest.raises(NonFiniteError, match=r"of the samples .*\b17\b.*;"):
        trainer(model(), "raise").fit(loader, progress=False)


@pytest.mark.world_size(2, 3)
def test_skip_trains_as_if_the_step_had_not_been(world):
    _, step = whose(17, world)
    x, y = data()
    net, reference = model(), model()
    history = trainer(net, "skip").fit(data(bad=[17]), batch_size=BATCH, progress=False)

    class WithoutIt(hvdtrain.data.IndexedSource):
        """The same batches, but for those of that step."""

        def epoch(self, epoch, *, shuffle, after=None):
            return (b for number, b in enumerate(super().epoch(epoch, shuffle=shuffle)) if number != step)

    given = trainer(reference, None)
    source = given._source((x, y), BATCH)
    source.__class__ = WithoutIt
    given._source = lambda *_: source
    expected = given.fit((x, y), batch_size=BATCH, progress=False)
    assert history["loss"] == expected["loss"]
    for (name, ours), theirs in zip(net.state_dict().items(), reference.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.world_size(2)
def test_stop_ends_the_run_before_the_step_with_what_it_had(world, shared_tmp_path, caplog):
    _, step = whose(17, world)
    net = model()
    seen = []

    class Watch(Callback):
        def on_step_end(self, trainer, number):
            seen.append([p.detach().clone() for p in net.parameters()])

    run = trainer(net, "stop")
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
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), seen[-1], strict=True))
    world.barrier()
    names = sorted(path.name for path in shared_tmp_path.iterdir())
    assert names == ([f"epoch-000000-step-{step:08d}"] if step else ["epoch-000000"])
    assert ("stops before this step" in caplog.text) == world.is_root


@pytest.mark.world_size(2)
def test_without_a_policy_nobody_looks(world):
    net = model()
    trainer(net, None).fit(data(bad=[17]), batch_size=BATCH, progress=False)
    assert not all(torch.isfinite(p).all() for p in net.parameters())


@pytest.mark.world_size(2)
def test_loss_scaling_that_skips_by_itself_is_no_fault(world):
    net = model()
    run = trainer(net, "raise", precision="fp16")
    run._adapter._scaler.load_state_dict({**run._adapter._scaler.state_dict(), "scale": 2.0**40})
    history = run.fit(data(), epochs=2, batch_size=BATCH, progress=False)
    assert run._adapter._scaler.get_scale() < 2.0**40
    assert np.isfinite(history["loss"]).all()


@pytest.mark.world_size(2)
def test_numbers_that_are_bad_whatever_the_scale_are_a_fault(world):
    run = trainer(model(), "raise", precision="fp16")
    x, y = data(bad=range(48))
    with pytest.raises(NonFiniteError, match=r"on rank 0 .*and on 1 more ranks"):
        run.fit((x, y), epochs=20, batch_size=BATCH, progress=False)
