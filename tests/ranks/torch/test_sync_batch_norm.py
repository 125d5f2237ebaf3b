"""SyncBatchNorm equals BatchNorm over the global batch, forward and backward."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.world_size(2, 3)


def shares(lengths):
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [slice(end - n, end) for end, n in zip(ends, lengths, strict=True)]


@pytest.mark.parametrize("uneven", ["even", "uneven", "one rank without samples"])
@pytest.mark.parametrize("shape", [(), (5,), (3, 2)], ids=["1d", "sequence", "image"])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
def test_equal_to_batch_norm_over_the_global_batch(hvd, rank, size, uneven, shape, momentum, affine):
    lengths = {"even": [4] * size, "uneven": [2 + 3 * r for r in range(size)]}.get(uneven, [0] + [4] * (size - 1))
    mine = shares(lengths)[rank]
    torch.manual_seed(0)
    x = (torch.randn(sum(lengths), 6, *shape) * 3 + 100).requires_grad_()  # far from zero: a test of stability
    weights = torch.randn(sum(lengths), 6, *shape)
    plain = torch.nn.BatchNorm2d(6, momentum=momentum, affine=affine)
    plain._check_input_dim = lambda _: None
    ours = hvd.SyncBatchNorm(6, momentum=momentum, affine=affine)
    local = x.detach()[mine].clone().requires_grad_()
    for _ in range(2):
        expected = plain(x)
        got = ours(local)
        torch.testing.assert_close(got, expected[mine], atol=1e-4, rtol=1e-4)
        (expected * weights).sum().backward()
        (got * weights[mine]).sum().backward()
    torch.testing.assert_close(local.grad, x.grad[mine], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.running_mean, plain.running_mean)
    torch.testing.assert_close(ours.running_var, plain.running_var, atol=1e-4, rtol=1e-4)
    assert int(ours.num_batches_tracked) == 2
    if affine:
        for param, reference in zip(ours.parameters(), plain.parameters(), strict=True):
            total = hvd.allreduce(param.grad, op=hvd.Sum)
            torch.testing.assert_close(total, reference.grad, atol=1e-3, rtol=1e-3)
    ours.eval()
    plain.eval()
    torch.testing.assert_close(ours(local), plain(x)[mine], atol=1e-4, rtol=1e-4)


def test_half_precision_input_keeps_its_type(hvd, rank):
    layer = hvd.SyncBatchNorm(2)
    x = torch.randn(3, 2, dtype=torch.bfloat16, requires_grad=True)
    out = layer(x)
    out.sum().backward()
    assert (out.dtype, x.grad.dtype) == (torch.bfloat16, torch.bfloat16)


def test_too_few_values_are_an_error_on_every_rank(hvd, rank):
    layer = hvd.SyncBatchNorm(2)
    with pytest.raises(ValueError, match="more than 1 value"):
        layer(torch.randn(1 if rank == 0 else 0, 2))


@pytest.mark.over_gloo
def test_trains_like_one_process(hvd, task, difference):
    def model(norm):
        layers = task.model()
        return torch.nn.Sequential(layers[0], norm(16), *layers[1:])

    ours, alone = model(hvd.SyncBatchNorm), model(torch.nn.BatchNorm1d)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1), ours.named_parameters())
    task.train(ours, optimizer, 5)
    task.train_alone(alone, torch.optim.SGD(alone.parameters(), lr=0.1), 5)
    assert difference(ours, alone) < 1e-5
