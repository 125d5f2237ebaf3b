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


def norm_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


trained = weights


def everything(net):
    """Weights and running statistics."""
    return [value.numpy().copy() for value in net.state_dict().values()]


def first_name(net):
    return next(name for name, _ in net.named_parameters())


def adam_of(net):
    return torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=DECAY)


def loss_scale(run):
    return run._adapter._update.scaler.get_scale()


def set_loss_scale(run, scale):
    run._adapter._update.scaler.load_state_dict({**run._adapter._update.scaler.state_dict(), "scale": scale})


def random_model():
    """A model that draws at random, keeps statistics of its own on each rank, and whose weights depend on both."""
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)
    )


def deep_model(on_gradient):
    """A model of many small tensors, in more than one bucket, which says of each gradient that it is made."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Tanh()) for _ in range(9)]
    net = torch.nn.Sequential(torch.nn.Linear(6, 128), *layers, torch.nn.Linear(128, 3))
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: on_gradient())
    return net


def seed(number):
    torch.manual_seed(number)


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


def prepare_rows(net, x, y, **options):
    rows = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return hvdtrain.prepare(net, optimizer_of(net), torch.utils.data.DataLoader(rows, batch_size=4), **options)


def prepare_stream(net):
    return hvdtrain.prepare(net, optimizer_of(net), unequal_iterable([], [], rank=0))


class Rows(torch.utils.data.Dataset):
    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return torch.tensor([float(index)]), index


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __iter__(self):
        return ((torch.tensor([float(index)]), index) for index in range(self.num_samples))


def datasets(num_samples):
    """Every kind of data that torch users bring, over samples 0 to num_samples - 1."""
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    rows = Rows(num_samples)
    x = np.arange(num_samples, dtype=np.float32)[:, None]
    return {
        "arrays": (x, x),
        "tensors": (torch.from_numpy(x), torch.from_numpy(x)),
        "dataset": rows,
        "loader": DataLoader(rows, batch_size=3),
        "shuffled loader": DataLoader(rows, batch_size=3, shuffle=True),
        "loader with workers": DataLoader(rows, batch_size=3, num_workers=1),
        "batch sampler": DataLoader(rows, batch_sampler=BatchSampler(RandomSampler(rows), 4, drop_last=False)),
        "stream": Stream(num_samples),
        "loader of a stream": DataLoader(Stream(num_samples), batch_size=2),
    }


def streams(x, y):
    """Data that can only be iterated, in batches of 4."""
    return {"tf.data": unequal_iterable(x, y, rank=0), "other": unequal_iterable(x, y, rank=0)}


def check_random_orders(seen_by_all, *, num_samples):
    """A sampler of the user's own draws at random on each rank: rank 0's order is everybody's."""
    from torch.utils.data import DataLoader

    class Own(torch.utils.data.Sampler):
        def __len__(self):
            return num_samples

        def __iter__(self):
            return iter(np.random.default_rng().permutation(num_samples).tolist())

    seen, _ = seen_by_all(DataLoader(Rows(num_samples), batch_size=3, sampler=Own()))
    assert sorted(seen) == list(range(num_samples))


def prepare_arrays(net, x, y):
    # torch takes loaders, whose samples are not looked at; as the map-style dataset that they are, arrays are.
    from hvdtrain.data.reading import as_source

    return as_source((x, y), batch_size=4, world=hvdtrain.init())
