"""The tests' model and a reference loop in plain PyTorch; keras_kit.py is its twin."""

from __future__ import annotations

import numpy as np
import torch

import hvdtrain

LR, MOMENTUM, DECAY = 0.1, 0.9, 0.01


def model(seed=0, *, hidden=16):
    generator = torch.Generator().manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(6, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 3))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return net


def optimizer_of(net):
    return torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)


def loss():
    return torch.nn.CrossEntropyLoss()


def trainer(net, **options):
    options.setdefault("optimizer", optimizer_of(net))
    options.setdefault("loss", loss())
    return hvdtrain.Trainer(net, metrics=["accuracy"], **options)


def weights(net):
    return [p.detach().numpy().copy() for p in net.parameters()]


def optimizer_steps(net, groups, *, clip_norm=None):
    """Train in one process: each group is a list of (x, y) whose samples all weigh the same in one step."""
    plain = optimizer_of(net)
    for group in groups:
        plain.zero_grad()
        x = torch.from_numpy(np.concatenate([x for x, _ in group]))
        y = torch.from_numpy(np.concatenate([y for _, y in group]))
        loss()(net(x), y).backward()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        plain.step()


def outputs(net, x):
    with torch.no_grad():
        return net(torch.from_numpy(x)).numpy()


def unequal_iterable(x, y, *, rank):
    """Return a dataset that can only be iterated, with rank-dependent length, in batches of 4."""

    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(zip(x, y, strict=True))

    return torch.utils.data.DataLoader(Rows(), batch_size=4)


def timeline(hvd_name="horovod.torch"):
    import horovod.torch as native

    return native


def set_first_weight(net, value):
    with torch.no_grad():
        next(iter(net.parameters())).fill_(value)


def batch_norm_model():
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    return net, lambda: [net[1].running_mean.numpy().copy(), net[1].running_var.numpy().copy()]


def own_loop(net, x, y, *, batch_size, epochs):
    """Contract C, as a user writes it."""
    rows = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    loader = torch.utils.data.DataLoader(rows, batch_size=batch_size, shuffle=True)
    net, optimizer, loader = hvdtrain.prepare(net, optimizer_of(net), loader)
    steps = set()
    for _ in range(epochs):
        counts = []
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss()(net(inputs), targets).backward()
            optimizer.step()
            counts.append(loader.count)
        steps.add(len(counts))
        assert len(counts) == len(loader)
        assert sum(counts) == len(range(hvdtrain.init().rank, len(x), hvdtrain.init().size))


def prepare_stream(net):
    return hvdtrain.prepare(net, optimizer_of(net), unequal_iterable([], [], rank=0))
