"""The gradient of the step before, on several ranks: what is learned, what is in flight, what refuses a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain import callbacks
from hvdtrain.data import sharding
from hvdtrain.torch.delayed import GradientInFlight

BATCH, SAMPLES = 4, 46


@pytest.fixture
def world(hvd):
    return hvdtrain.init("torch")


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def data(num_samples=SAMPLES):
    generator = np.random.default_rng(1)
    x = generator.normal(size=(num_samples, 6)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(generator.integers(0, 3, num_samples))


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def fit(net, train=None, *, hooks=(), epochs=2, **options):
    options.setdefault("loss", torch.nn.CrossEntropyLoss())
    trainer = hvdtrain.Trainer(net, optimizer=sgd(net), sync=hvdtrain.Delayed(), **options)
    how = {"batch_size": BATCH, "progress": False, "run_dir": None, "callbacks": list(hooks)}
    trainer.fit(train or data(), epochs=epochs, **how)
    return trainer


def delayed_loop(net, size, *, num_samples=SAMPLES, accumulate=1, clip_norm=None, epochs=2, weight=None):
    """Apply each global gradient one step late, in one process."""
    x, y = data(num_samples)
    optimizer, before = sgd(net), None

    def apply(gradients):
        if gradients is not None:
            for parameter, gradient in zip(net.parameters(), gradients, strict=True):
                parameter.grad = gradient
            if clip_norm:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
            optimizer.step()

    for epoch in range(epochs):
        order = sharding.epoch_order(num_samples, epoch=epoch, seed=0)
        for begin in range(0, num_samples, BATCH * size * accumulate):
            rows = order[begin : begin + BATCH * size * accumulate]
            losses = torch.nn.functional.cross_entropy(net(x[rows]), y[rows], reduction="none")
            counts = torch.ones(len(rows)) if weight is None else weight(y[rows])
            loss = (losses * counts).sum() / counts.sum()
            gradients = torch.autograd.grad(loss, list(net.parameters()))
            apply(before)
            before = gradients
    apply(before)
    return [p.detach() for p in net.parameters()]


def assert_close(net, expected, atol=2e-6):
    for ours, theirs in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, atol=atol, rtol=0)


@pytest.mark.world_size(2, 3)
@pytest.mark.parametrize(
    ("num_samples", "options", "atol"),
    [
        (SAMPLES, {}, 2e-6),
        (SAMPLES, {"accumulate": 3, "clip_norm": 0.05}, 2e-6),
        (2, {}, 2e-6),  # fewer samples than three ranks
        (SAMPLES, {"compression": "fp16"}, 2e-3),
        (SAMPLES, {"compression": "bf16"}, 2e-2),
    ],
)
def test_ranks_train_the_weights_of_one_process_that_delays(world, num_samples, options, atol):
    net = model()
    check = callbacks.SyncCheck(every=1)  # of every step: all ranks apply the same mean
    fit(net, data(num_samples), hooks=[check], **options)
    how = {name: value for name, value in options.items() if name != "compression"}
    assert_close(net, delayed_loop(model(), world.size, num_samples=num_samples, **how), atol)
    flat = torch.cat([p.detach().reshape(-1) for p in net.parameters()]).numpy()
    everybodys = world.allgather(flat[None], name="weights")
    assert (everybodys == everybodys[0]).all()


@pytest.mark.world_size(2)
def test_counts_of_an_own_step_weigh_the_mean(world):
    def count(labels):
        return (labels + 1).float()

    def step(net, batch):
        x, y = batch
        counts = count(y)
        losses = torch.nn.functional.cross_entropy(net(x), y, reduction="none")
        return hvdtrain.Loss((losses * counts).sum() / counts.sum(), float(counts.sum()))

    net = model()
    fit(net, loss=None, step=step)
    assert_close(net, delayed_loop(model(), world.size, weight=count))


class Poison(callbacks.Callback):
    """Makes one rank's gradient of one step infinite."""

    def __init__(self, net, at, rank):
        self.taken, self.at, self.rank = [], at, rank
        net[2].bias.register_hook(self._poison)

    def _poison(self, grad):
        mine = self.trainer.world.rank == self.rank and self.trainer.global_step == self.at
        return grad * float("inf") if mine else grad

    def on_fit_begin(self, trainer):
        self.trainer = trainer

    def on_step_end(self, trainer, step):
        self.taken.append(trainer.step_taken)


@pytest.mark.world_size(2)
def test_a_rank_whose_gradient_is_not_finite_refuses_the_next_steps_update_on_all(world, caplog):
    net = model()
    poison = Poison(net, 3, rank=1)
    fit(net, hooks=[poison], nan_policy="skip")
    assert [index for index, taken in enumerate(poison.taken) if not taken] == [4]
    assert all(bool(p.isfinite().all()) for p in net.parameters())
    assert not world.is_root or "a step later: on rank 1 (" in caplog.text


@pytest.mark.world_size(2)
def test_a_gradient_is_in_flight_while_the_next_step_computes(world, monkeypatch):
    events = []
    for name in ("start", "take"):
        whole = getattr(GradientInFlight, name)
        monkeypatch.setattr(
            GradientInFlight, name, lambda self, *a, _name=name, _whole=whole: events.append(_name) or _whole(self, *a)
        )
    net = model()
    net.register_forward_pre_hook(lambda *_: events.append("forward"))
    fit(net, data(24), epochs=1)
    assert events == ["forward", "take", "start"] * 3 + ["take"]


@pytest.mark.world_size(2)
def test_a_parameter_that_one_rank_uses_gets_the_mean_and_one_that_none_uses_stays(world):
    class Partly(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.always, self.sometimes, self.never = (torch.nn.Linear(6, 3) for _ in range(3))

        def forward(self, x):
            return self.always(x) + (self.sometimes(x) if world.rank == 1 else 0.0)

    net = Partly()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    fit(net)
    assert torch.equal(net.never.weight, before["never.weight"])
    assert not torch.equal(net.sometimes.weight, before["sometimes.weight"])
    sums = world.allgather_object(float(net.sometimes.weight.detach().sum()), name="sums")
    assert sums[0] == sums[1]
