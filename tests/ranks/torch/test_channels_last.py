"""Gradients in channels_last are reduced where they lie in memory."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hvdtrain.errors import DesyncError

pytestmark = [pytest.mark.world_size(2, 3), pytest.mark.two_suffice]
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


class Copies(TorchDispatchMode):
    """Counts operations that copy as many numbers as a weight has."""

    def __init__(self, weight):
        super().__init__()
        self.found, self._numel = Counter(), weight.numel()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in ("copy_", "clone", "_to_copy", "_foreach_copy_", "contiguous"):
            first = args[0][0] if isinstance(args[0], list) else args[0]
            self.found[name] += first.numel() == self._numel
        return result


def network(layout):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(64, 256, 3), torch.nn.ReLU(), torch.nn.Conv2d(256, 3, 1))
    assert net[0].weight.nbytes > 2**19  # so that it travels alone, not in a bucket
    return net.to(memory_format=LAYOUTS[layout])


def train(hvd, layout, *, steps=3, **options):
    """Return a model after some steps of the drop-in, and the copies of its last one between forward and update."""
    net = network(layout)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters(), **options)
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(2, 64, 5, 5, generator=generator).to(memory_format=LAYOUTS[layout])
        loss = net(x).square().mean()
        with Copies(net[0].weight) as copies:
            loss.backward()
            optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    return net, copies.found


@pytest.mark.parametrize("options", [{}, {"gradient_predivide_factor": 2.0}], ids=str)
def test_a_large_gradient_is_not_copied(hvd, options):
    assert not +train(hvd, "channels_last", **options)[1]


def same(net, other):
    return all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))


@pytest.mark.world_size(2)  # on three ranks the place in memory decides the order of a sum
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_weights_have_the_bits_of_contiguous_gradients(hvd, compression, assert_same_on_all_ranks, monkeypatch):
    from hvdtrain.torch.reduction import reduction_unit

    options = {"compression": getattr(hvd.Compression, compression)}
    net, _ = train(hvd, "channels_last", **options)
    assert net[0].weight.grad.stride() == net[0].weight.stride()
    assert net[0].weight.is_contiguous(memory_format=torch.channels_last)
    monkeypatch.setattr(reduction_unit, "memory_order", lambda _: None)  # copied, and copied back
    assert same(net, train(hvd, "channels_last", **options)[0])
    assert_same_on_all_ranks(*net.parameters())


@pytest.mark.parametrize("what", ["no gradient", "another layout", "a history"])
def test_a_rank_whose_gradient_lies_otherwise_takes_part(hvd, rank, size, what, assert_same_on_all_ranks):
    weight = torch.nn.Parameter(torch.zeros(100, 200, 3, 3).to(memory_format=torch.channels_last))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
    numbers = torch.arange(weight.numel(), dtype=torch.float32).view(weight.shape)
    for step in range(3):
        optimizer.zero_grad()
        if rank or what != "no gradient":
            mine = numbers * (rank + 1)
            mine = mine if what == "another layout" and not rank else mine.to(memory_format=torch.channels_last)
            weight.grad = mine.requires_grad_(what == "a history" and not rank)
        optimizer.synchronize()
        ranks = sum(each + 1 for each in range(size)) - (what == "no gradient")
        torch.testing.assert_close(weight.grad.detach(), numbers * (ranks / size))
        assert step or weight.grad.shape == weight.shape
        weight.grad = weight.grad.detach()
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_same_on_all_ranks(weight)


def test_ranks_whose_weights_lie_otherwise_are_refused(hvd, rank):
    layout = torch.channels_last if rank else torch.contiguous_format
    weight = torch.nn.Parameter(torch.zeros(10, 3, 3, 3).to(memory_format=layout))
    with pytest.raises(DesyncError, match=r"rank 1 has weight .* with its dimensions in the order \(0, 2, 3, 1\)"):
        hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])


def test_they_are_refused_when_they_are_moved_later_too(hvd, rank):
    """Where all dimensions are equal, shapes would not show it, and numbers would be added up that do not belong."""
    weight = torch.nn.Parameter(torch.zeros(10_000, 3, 3, 3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
    if rank:
        weight.data = weight.data.to(memory_format=torch.channels_last)
    (weight * torch.arange(weight.numel()).view(weight.shape)).sum().backward()
    with pytest.raises(hvd.HorovodInternalError, match=r"[Mm]ismatched"):
        optimizer.synchronize()
