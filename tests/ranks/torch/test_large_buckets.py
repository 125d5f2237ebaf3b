"""Buckets as large as on GPUs, here on CPUs: what a step sends and copies, and that weights do not change by it."""

from __future__ import annotations

import itertools
from copy import deepcopy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hvdtrain.distributed.buckets import ON_GPU, ON_HOST

pytestmark = [pytest.mark.world_size(2, 3), pytest.mark.two_suffice]
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


class Copies(TorchDispatchMode):
    """Lists operations that copy tensors: their names, and for several tensors at once the pairs."""

    COPYING = ("copy_", "clone", "_to_copy", "_foreach_copy_", "contiguous", "cat")

    def __init__(self):
        super().__init__()
        self.found, self.pairs = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in self.COPYING:
            self.found.append(name)
        if name == "_foreach_copy_":
            self.pairs += zip(*args[:2], strict=True)
        return result


@pytest.fixture
def use(monkeypatch):
    """Let gradients be sent by the given limits from now on; buckets on a GPU carry no flags."""
    from hvdtrain.torch.ops import pack
    from hvdtrain.torch.reduction import bucket

    can_carry_flags = bucket.can_carry_flags

    def chosen(limits):
        monkeypatch.setattr(pack, "limits", lambda _: limits)
        carries = can_carry_flags if limits is ON_HOST else lambda *_: False
        monkeypatch.setattr(bucket, "can_carry_flags", carries)

    return chosen


@pytest.fixture
def sent(hvd, monkeypatch):
    """The names of what is sent, in order, and its bytes."""
    from hvdtrain.torch.ops import engine

    native, found = engine.native(), []
    send = native.allreduce_async_

    def noting(tensor, name=None, **options):
        found.append((name, tensor.nbytes))
        return send(tensor, name=name, **options)

    monkeypatch.setattr(native, "allreduce_async_", noting)
    return found


def network(layout="contiguous"):
    """Return convolutions of 0.3 to 2.4 MB, with norms, and a layer of 8.4 MB."""
    torch.manual_seed(0)
    widths = [3, 128, 256, 256]
    convolutions = [
        torch.nn.Sequential(torch.nn.Conv2d(a, b, 3, padding=1, bias=False), torch.nn.BatchNorm2d(b), torch.nn.ReLU())
        for a, b in itertools.pairwise(widths)
    ]
    head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(256, 8200), torch.nn.Linear(8200, 2)]
    return torch.nn.Sequential(*convolutions, *head).to(memory_format=LAYOUTS[layout])


def batch(rank, step, rows=2):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 3, 6, 6, generator=generator)


def optimizer_of(net):
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01)


def train(hvd, net, *, steps=3, **options):
    """Take some steps; return the copies of the last one between its forward pass and its update."""
    optimizer = hvd.DistributedOptimizer(optimizer_of(net), net.named_parameters(), **options)
    for step in range(steps):
        optimizer.zero_grad()
        loss = net(batch(hvd.rank(), step)).square().mean()
        with Copies() as copies:
            loss.backward()
            optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
    return copies


def test_most_gradients_travel_in_a_few_operations(hvd, use, sent):
    use(ON_GPU)
    net = network()
    train(hvd, net, steps=1)
    sent.clear()
    train(hvd, net, steps=2)
    tensors = len([*net.parameters()])
    assert len(sent) == tensors + 1 + 4  # in the first step each alone
    names, nbytes = zip(*sent[tensors + 1 :], strict=True)
    assert names == ("5.weight", "6.bias.bucket", "0.1.bias.bucket", "gradients.present")
    assert ON_GPU.alone <= nbytes[0]
    assert nbytes[1] <= ON_GPU.bucket
    assert nbytes[2] <= ON_GPU.last


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_bucket_is_copied_once_in_and_once_out_and_a_large_gradient_never(hvd, use, layout):
    use(ON_GPU)
    net = network(layout)
    loss = net(batch(hvd.rank(), 0)).square().mean()
    with Copies() as alone:
        loss.backward()
    net.zero_grad()
    copies = train(hvd, net)
    assert copies.found == [*alone.found, *["_foreach_copy_"] * 4]  # two buckets
    assert len(copies.pairs) == 2 * 12
    assert max(one.nbytes for one, _ in copies.pairs) < ON_GPU.alone
    # By these torch decides whether one kernel copies all of them on a GPU, or one kernel each.
    assert all(one.shape == other.shape and one.stride() == other.stride() for one, other in copies.pairs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_weights_are_those_of_small_buckets(hvd, size, use, layout, compression, assert_same_on_all_ranks):
    nets = []
    for limits in (ON_GPU, ON_HOST):
        use(limits)
        nets.append(network(layout))
        train(hvd, nets[-1], compression=getattr(hvd.Compression, compression))
    for large, small in zip(*(net.parameters() for net in nets), strict=True):
        if size == 2:
            assert torch.equal(large, small)
        else:  # on more ranks MPI adds up in an order that depends on the tensor
            near = {"rtol": 1e-5, "atol": 1e-6} if compression == "none" else {"rtol": 1e-2, "atol": 1e-4}
            torch.testing.assert_close(large, small, **near)
    assert_same_on_all_ranks(*nets[0].parameters())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_one_processs(hvd, size, use, layout):
    use(ON_GPU)
    ours = network(layout).eval()  # so that norms see no batch
    alone = deepcopy(ours)
    train(hvd, ours)
    optimizer = optimizer_of(alone)
    for step in range(3):
        optimizer.zero_grad()
        alone(torch.cat([batch(rank, step) for rank in range(size)])).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
    for a, b in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_ranks_whose_weights_lie_otherwise_do_not_send_under_one_name(hvd, use, sent):
    """They begin alike; what is moved later is found by the name, or ranks would add up what does not belong."""
    use(ON_GPU)
    names = {}
    for layout in LAYOUTS:
        net = network(layout)
        net(batch(0, 0))
        sent.clear()
        train(hvd, net, steps=2)
        names[layout] = {name for name, _ in sent if ".bucket" in name}
    assert len(names["contiguous"]) == len(names["channels_last"]) == 2
    assert names["contiguous"].isdisjoint(names["channels_last"])
