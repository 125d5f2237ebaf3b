"""What the tests of strategies and of cutoffs share: a model with data, a fit, faults, and steps of one process."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import hvdtrain
from hvdtrain.callbacks import Callback
from hvdtrain.data import sharding

BATCH, SAMPLES = 4, 46

OPTIMIZERS = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.01),
}


def model(dropout=0.0):
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(16, 3)
    return torch.nn.Sequential(*layers)


def data(num_samples=SAMPLES):
    generator = np.random.default_rng(1)
    x = generator.normal(size=(num_samples, 6)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(generator.integers(0, 3, num_samples))


class Partly(torch.nn.Module):
    """A layer for all ranks, one for rank 1 only, and one that no rank uses."""

    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes, self.never = (torch.nn.Linear(6, 3) for _ in range(3))
        self.rank = rank

    def forward(self, x):
        return self.always(x) + (self.sometimes(x) if self.rank == 1 else 0.0)


def sparse_model():
    """Return a model whose first weight has sparse gradients; `sparse_data` is for it."""
    return torch.nn.Sequential(torch.nn.Embedding(8, 4, sparse=True), torch.nn.Flatten(), torch.nn.Linear(4, 3))


def sparse_data(num_samples):
    x = torch.arange(num_samples)[:, None] % 8
    return x, x[:, 0] % 3


def make_trainer(net, optimizer="momentum", **options):
    """Return a Trainer with an optimizer of this name, or with one that is made already."""
    made = OPTIMIZERS[optimizer](net) if isinstance(optimizer, str) else optimizer
    options.setdefault("loss", torch.nn.CrossEntropyLoss())
    return hvdtrain.Trainer(net, optimizer=made, **options)


def run(trainer, train=None, *, hooks=(), epochs=2, batch_size=BATCH, **how):
    """Fit without output and without a run folder."""
    how |= {"epochs": epochs, "batch_size": batch_size, "callbacks": list(hooks)}
    trainer.fit(data() if train is None else train, progress=False, run_dir=None, **how)
    return trainer


def fit(net, optimizer="momentum", train=None, *, hooks=(), epochs=2, **options):
    """Fit; `options` are the Trainer's."""
    return run(make_trainer(net, optimizer, **options), train, hooks=hooks, epochs=epochs)


class Infinite(Callback):
    """Makes a parameter's gradient infinite in these steps of one rank, and notes which steps were taken."""

    def __init__(self, parameter, steps, *, rank=1):
        self.taken, self._steps, self._rank = [], steps, rank
        parameter.register_hook(self._poison)

    def on_fit_begin(self, trainer):
        self._trainer = trainer

    def on_step_end(self, trainer, step):
        self.taken.append(trainer.step_taken)

    def _poison(self, grad):
        mine = self._trainer.world.rank == self._rank and self._trainer.global_step in self._steps
        return grad * float("inf") if mine else grad


class StoppedError(Exception):
    pass


class StopAt(Callback):
    def __init__(self, step):
        self._step = step

    def on_step_end(self, trainer, step):
        if trainer.global_step == self._step:
            raise StoppedError


def global_batches(epoch, size, num_samples=SAMPLES):
    """Yield the samples of each step of an epoch, `size` at once."""
    order = sharding.epoch_order(num_samples, epoch=epoch, seed=0)
    return (order[begin : begin + size] for begin in range(0, num_samples, size))


def mean_loss(net, batch, weight=None):
    """Return the mean loss of samples that weigh `weight(labels)`, and the sum of these weights."""
    x, y = batch
    losses = cross_entropy(net(x), y, reduction="none")
    counts = torch.ones(len(y)) if weight is None else weight(y)
    return (losses * counts).sum() / counts.sum(), float(counts.sum())


def own_step(weight):
    """Return a step of a user's own with this loss."""
    return lambda net, batch: hvdtrain.Loss(*mean_loss(net, batch, weight))


def take_step(net, optimizer, loss, clip_norm=None):
    optimizer.zero_grad()
    loss.backward()
    if clip_norm:
        torch.nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
    optimizer.step()


def assert_close(net, expected, atol=2e-6):
    """Fail unless the weights are those of a model, or those of a list."""
    weights = expected.parameters() if isinstance(expected, torch.nn.Module) else expected
    for ours, theirs in zip(net.parameters(), weights, strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach(), atol=atol, rtol=0)
