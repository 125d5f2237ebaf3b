"""Optimizer state and weights that ranks which step alone do not all have, or train."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import hvdtrain
from hvdtrain.callbacks import EMA, Callback, Checkpoint
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch import engine
from hvdtrain.torch.replica import Replica

BATCH, SAMPLES = 4, 46
OPTIMIZERS = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.01),
}


@pytest.fixture
def world(hvd):
    return hvdtrain.init("torch")


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def data():
    generator = np.random.default_rng(1)
    return generator.normal(size=(SAMPLES, 6)).astype(np.float32), generator.integers(0, 3, SAMPLES)


def fit(net, optimizer, sync, *, hooks=(), epochs=1, **options):
    trainer = hvdtrain.Trainer(
        net, optimizer=OPTIMIZERS[optimizer](net), loss=torch.nn.CrossEntropyLoss(), sync=sync, **options
    )
    how = {"batch_size": BATCH, "progress": False, "run_dir": None, "callbacks": list(hooks)}
    trainer.fit(data(), epochs=epochs, **how)
    return trainer


def assert_equal_on_all_ranks(world, net):
    flat = torch.cat([p.detach().float().reshape(-1) for p in net.parameters()]).numpy()
    everybodys = world.allgather(flat[None], name="weights")
    assert (everybodys == everybodys[0]).all()


class Infinite(Callback):
    """Makes the gradient of one rank's steps infinite."""

    def __init__(self, net, steps, *, rank=1):
        self._steps, self._rank = steps, rank
        next(net.parameters()).register_hook(self._poison)

    def on_fit_begin(self, trainer):
        self._trainer = trainer

    def _poison(self, grad):
        mine = self._trainer.world.rank == self._rank and self._trainer.global_step in self._steps
        return grad * float("inf") if mine else grad


@pytest.mark.world_size(2)
@pytest.mark.parametrize("options", [{"nan_policy": "skip"}, {"precision": "fp16"}], ids=["skip", "loss-scale"])
@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_a_rank_that_took_no_step_yet_gets_the_optimizer_state_of_the_others(world, options, optimizer):
    """Else ranks would average different numbers of tensors, and wait for each other for ever."""
    net = model()
    trainer = fit(net, optimizer, hvdtrain.LocalSGD(1), hooks=[Infinite(net, [0])], **options)
    assert_equal_on_all_ranks(world, net)
    names = world.allgather_object(sorted(trainer.state().arrays), name="names")
    assert names[0] == names[1]


@pytest.mark.world_size(2)
def test_a_rank_without_samples_steps_with_sparse_gradients_as_the_others(world):
    net = torch.nn.Sequential(torch.nn.Embedding(8, 4, sparse=True), torch.nn.Flatten(), torch.nn.Linear(4, 3))
    trainer = hvdtrain.Trainer(
        net, optimizer=torch.optim.SparseAdam([net[0].weight]), loss=torch.nn.CrossEntropyLoss(),
        sync=hvdtrain.LocalSGD(2),
    )  # fmt: skip
    x = torch.arange(BATCH * 2 + 1)[:, None] % 8  # one sample is left for a step of two ranks
    trainer.fit((x, x[:, 0] % 3), epochs=2, batch_size=BATCH, progress=False, run_dir=None)
    assert_equal_on_all_ranks(world, net)


class Turned(torch.nn.Module):
    """Has a complex weight."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 3)
        self.turn = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))

    def forward(self, x):
        return (self.linear(x) * self.turn).imag


@pytest.mark.world_size(2)
def test_complex_weights_are_refused(world):
    net = Turned()
    with pytest.raises(TypeError, match=r"Weights of torch\.complex64 cannot be averaged over ranks\. Received: shape"):
        fit(net, "sgd", hvdtrain.LocalSGD(2))


class Scaled(torch.nn.Module):
    """A linear layer, and a weight without dimensions, as CLIP has one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.scale = torch.nn.Linear(6, 3), torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.linear(x) * self.scale


@pytest.mark.world_size(2)
def test_the_momentum_of_a_scalar_weight_is_averaged_too(world):
    """With SGD and every=1, averaged momentum is that of synchronous training."""
    net, reference = Scaled(), Scaled()
    fit(net, "momentum", hvdtrain.LocalSGD(1), epochs=2)
    fit(reference, "momentum", None, epochs=2)
    for ours, theirs in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)


class Thaw(Callback):
    """Trains the first layer too, from epoch 1 on, or after step `at` of it."""

    def __init__(self, net, at=None):
        self._layer, self._at = net[0], at
        self._layer.requires_grad_(False)

    def on_epoch_begin(self, trainer, epoch):
        self._layer.requires_grad_(epoch > 0 and self._at is None)

    def on_step_end(self, trainer, step):
        if self._at is not None and trainer.global_step == self._at:
            self._layer.requires_grad_(True)


THAWED = {
    "LocalSGD": hvdtrain.LocalSGD(2),
    "DiLoCo": hvdtrain.DiLoCo(2),
    "streaming": hvdtrain.DiLoCo(4, fragments=2, overlap=1),
    "host": hvdtrain.LocalSGD(2, within="host"),
    "Delayed": hvdtrain.Delayed(),
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("strategy", THAWED)
def test_weights_that_are_trained_from_a_later_epoch_on_are_synchronized(world, strategy):
    net = model()
    before = net[0].weight.detach().clone()
    fit(net, "adam", THAWED[strategy], hooks=[Thaw(net)], epochs=3)
    assert not torch.equal(net[0].weight, before)
    assert_equal_on_all_ranks(world, net)


@pytest.mark.world_size(2)
def test_weights_that_are_trained_anew_between_synchronizations_are_refused(world):
    net = model()
    with pytest.raises(HvdTrainError, match=r"Weights were frozen, or are trained again, between two synchronizations"):
        fit(net, "sgd", hvdtrain.DiLoCo(4), hooks=[Thaw(net, at=2)])


@pytest.mark.world_size(2)
def test_a_model_in_half_precision_resumes_bit_for_bit(world, shared_tmp_path):
    """What ranks agree on is rounded to the weights' type, in the checkpoint as in the run that continues."""

    def train(folder, epochs):
        net = model().bfloat16()
        net.register_forward_pre_hook(lambda _, inputs: tuple(each.bfloat16() for each in inputs))
        fit(net, "sgd", hvdtrain.DiLoCo(2), hooks=[Checkpoint(folder)], epochs=epochs)
        return [p.detach().float().numpy() for p in net.parameters()]

    straight = train(shared_tmp_path / "straight", 4)
    train(shared_tmp_path / "stopped", 1)
    for ours, theirs in zip(train(shared_tmp_path / "stopped", 4), straight, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("sync", [hvdtrain.LocalSGD(100), hvdtrain.DiLoCo(4, fragments=2, overlap=1)], ids=str)
def test_averages_of_weights_are_updated_where_ranks_synchronize_after_an_epoch(world, sync):
    net, average = model(), EMA(0.0, every=1)  # retains nothing: equal to the weights once it is updated
    before = net[0].weight.detach().clone()
    trainer = fit(net, "sgd", sync, hooks=[average])
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    with average.averaged():
        for name, value in net.state_dict().items():
            torch.testing.assert_close(value, weights[name], atol=0, rtol=0)
    assert trainer.in_sync
    assert not torch.equal(net[0].weight, before)


@pytest.mark.world_size(2)
def test_both_halves_of_a_bf16_mean_are_sent_while_the_rank_does_something_else(world, monkeypatch):
    net, native, second_half = model(), engine.native(), threading.Event()
    gather = native.allgather_async

    def sends(*args, **kwargs):
        second_half.set()
        return gather(*args, **kwargs)

    monkeypatch.setattr(native, "allgather_async", sends)
    replica = Replica({"": (OPTIMIZERS["sgd"](net), torch.amp.GradScaler(enabled=False))}, world)
    mean = replica.mean([torch.full((1000,), 1.0 + world.rank)], name="mean", compression="bf16")
    assert second_half.wait(20)
    assert mean()[0].unique().tolist() == [1.5]
