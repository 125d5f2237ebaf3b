"""SyncBatchNorm equals BatchNorm over the global batch, forward and backward."""

from __future__ import annotations

import warnings

import cuda_norm_kernels
import pytest
import torch

from hvdtrain.torch.ops import sync_batch_norm

pytestmark = pytest.mark.world_size(2, 3)


@pytest.fixture(params=["portable", "as on CUDA"])
def kernels(request, monkeypatch):
    """Run the test also with functions that take what torch's CUDA kernels take, and nothing else."""
    if request.param == "as on CUDA":
        monkeypatch.setattr(sync_batch_norm, "kernels_for", lambda tensor: cuda_norm_kernels.STRICT)


def shares(lengths):
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [slice(end - n, end) for end, n in zip(ends, lengths, strict=True)]


@pytest.mark.parametrize("uneven", ["even", "uneven", "one rank without samples"])
@pytest.mark.parametrize("shape", [(), (5,), (3, 2)], ids=["1d", "sequence", "image"])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.usefixtures("kernels")
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


def run(norm, x, weights, calls=1):
    """Return output, gradients of input and parameters, and buffers, of a layer called on its own outputs."""
    x = x.detach().clone().requires_grad_()
    out = x
    for _ in range(calls):
        out = norm(out)
    (out * weights).sum().backward()
    return out.detach(), x.grad, [p.grad.clone() for p in norm.parameters()], [b.clone() for b in norm.buffers()]


def assert_equal_to_one_process(hvd, rank, lengths, plain, ours, x, weights, calls=1, **close):
    """Compare a layer on this rank's rows with BatchNorm on all rows."""
    mine = shares(lengths)[rank]
    plain._check_input_dim = lambda _: None
    output, grad, of_params, buffers = run(plain, x, weights, calls)
    got_output, got_grad, got_of_params, got_buffers = run(ours, x[mine], weights[mine], calls)
    torch.testing.assert_close(got_output, output[mine], **close)
    torch.testing.assert_close(got_grad, grad[mine], **close)
    for got, expected in zip(got_of_params, of_params, strict=True):
        torch.testing.assert_close(hvd.allreduce(got, op=hvd.Sum), expected, **close)
    for got, expected in zip(got_buffers, buffers, strict=True):
        torch.testing.assert_close(got, expected, **close)


def global_batch(shape, lengths, dtype=torch.float64):
    torch.manual_seed(0)
    x = torch.randn(sum(lengths), 6, *shape, dtype=dtype) * 3 + 100
    return x, torch.randn(sum(lengths), 6, *shape, dtype=dtype)


@pytest.mark.parametrize("calls", [1, 2], ids=["called once", "called twice in one pass"])
@pytest.mark.parametrize("first", [0, 2], ids=["first rank empty", "uneven"])
@pytest.mark.usefixtures("kernels")
def test_float64_gradients_are_those_of_one_process_to_the_last_digits(hvd, rank, size, first, calls):
    lengths = [first, *[5] * (size - 1)]
    x, weights = global_batch((3, 2), lengths)
    plain, ours = (norm(6, dtype=torch.float64) for norm in (torch.nn.BatchNorm2d, hvd.SyncBatchNorm))
    assert_equal_to_one_process(hvd, rank, lengths, plain, ours, x, weights, calls, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.usefixtures("kernels")
def test_half_precision_input_is_rounded_once(hvd, rank, size, dtype, affine):
    lengths = [0, *[400] * (size - 1)]  # (400, 3, 2): counts that these types cannot hold
    x, weights = (each.to(dtype) for each in global_batch((3, 2), lengths))
    ours, plain = hvd.SyncBatchNorm(6, affine=affine), torch.nn.BatchNorm2d(6, affine=affine, dtype=torch.float64)
    plain._check_input_dim = lambda _: None
    mine = shares(lengths)[rank]
    output, grad, _, buffers = run(plain, x.double(), weights.double())
    got_output, got_grad, of_params, got_buffers = run(ours, x[mine], weights[mine])
    assert (got_output.dtype, got_grad.dtype) == (dtype, dtype)
    assert {each.dtype for each in of_params} == ({torch.float32} if affine else set())
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(got_output.double(), output[mine], rtol=step, atol=1e-4)
    torch.testing.assert_close(got_grad.double(), grad[mine], rtol=2 * step, atol=1e-4)
    for got, expected in zip(got_buffers[:2], buffers[:2], strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("kernels")
def test_a_layer_of_half_precision_tracks_statistics_in_its_type(hvd, rank, size):
    lengths = [4] * size
    x, weights = (each.to(torch.bfloat16) for each in global_batch((), lengths))
    ours = hvd.SyncBatchNorm(6).to(torch.bfloat16)
    mine = shares(lengths)[rank]
    *_, of_params, (mean, variance, batches) = run(ours, x[mine], weights[mine])
    assert {each.dtype for each in (*of_params, mean, variance)} == {torch.bfloat16}
    torch.testing.assert_close(mean.float(), 0.1 * x.float().mean(0), rtol=0.02, atol=0.02)
    torch.testing.assert_close(variance.float(), 0.9 + 0.1 * x.float().var(0), rtol=0.02, atol=0.02)
    assert int(batches) == 1


@pytest.mark.parametrize(
    ("shape", "layout"), [((3, 2), torch.channels_last), ((3, 2, 2), torch.channels_last_3d)], ids=["2d", "3d"]
)
@pytest.mark.usefixtures("kernels")
def test_channels_last_stays_channels_last(hvd, rank, size, shape, layout):
    lengths = [2 + r for r in range(size)]
    x, weights = global_batch(shape, lengths)
    mine = shares(lengths)[rank]
    ours, plain = hvd.SyncBatchNorm(6, dtype=torch.float64), torch.nn.BatchNorm2d(6, dtype=torch.float64)
    close = {"rtol": 1e-10, "atol": 1e-11}
    assert_equal_to_one_process(hvd, rank, lengths, plain, ours, x.to(memory_format=layout), weights, **close)
    local = x[mine].to(memory_format=layout).requires_grad_()
    output = ours(local)
    output.backward(weights[mine].contiguous())  # in the other layout
    assert output.is_contiguous(memory_format=layout)
    assert local.grad.is_contiguous(memory_format=layout)


@pytest.mark.usefixtures("kernels")
def test_inputs_of_other_strides_are_normalized_too(hvd, rank, size):
    lengths = [3] * size
    x, _ = global_batch((4, 5), lengths)
    mine = shares(lengths)[rank]
    expected = torch.nn.BatchNorm2d(6, dtype=torch.float64)(x.transpose(2, 3))[mine]
    layer = hvd.SyncBatchNorm(6, dtype=torch.float64)
    local = x[mine].requires_grad_()
    output = layer(local.transpose(2, 3))
    torch.testing.assert_close(output, expected)
    output.sum().backward()  # whose gradient is one number, expanded
    assert local.grad.abs().max() < 1e-10


@pytest.mark.parametrize("left_out", ["weight", "bias", "statistics", "gradient of weight", "gradient of input"])
@pytest.mark.usefixtures("kernels")
def test_a_layer_without_one_of_its_parts(hvd, rank, size, left_out):
    lengths = [2 + 3 * r for r in range(size)]
    x, weights = global_batch((5,), lengths)
    mine = shares(lengths)[rank]
    outputs, gradients = [], []
    for kind, rows in ((torch.nn.BatchNorm1d, slice(None)), (hvd.SyncBatchNorm, mine)):
        norm = kind(6, dtype=torch.float64, track_running_stats=left_out != "statistics")
        if left_out in ("weight", "bias"):
            setattr(norm, left_out, None)
        elif left_out == "gradient of weight":
            norm.weight.requires_grad_(False)
        local = x[rows].clone().requires_grad_(left_out != "gradient of input")
        outputs.append(norm(local))
        (outputs[-1] * weights[rows]).sum().backward()
        gradients.append((local.grad, [p.grad for p in norm.parameters()]))
    torch.testing.assert_close(outputs[1], outputs[0][mine])
    (expected, of_params), (got, got_of_params) = gradients
    assert (got is None) == (left_out == "gradient of input")
    if got is not None:
        torch.testing.assert_close(got, expected[mine])
    for part, whole in zip(got_of_params, of_params, strict=True):
        assert (part is None) == (whole is None)
        if part is not None:
            torch.testing.assert_close(hvd.allreduce(part, op=hvd.Sum), whole)


@pytest.mark.parametrize("on_input", [True, False], ids=["within a model", "as its first layer"])
def test_a_layer_takes_one_collective_forward_and_at_most_one_backward(hvd, native_calls, on_input):
    model = torch.nn.Sequential(hvd.SyncBatchNorm(4), hvd.SyncBatchNorm(4), hvd.SyncBatchNorm(4, affine=False))
    output = model(torch.randn(3, 4, requires_grad=on_input))
    assert native_calls.calls == {"allgather": 3}
    output.sum().backward()
    assert native_calls.calls == {"allgather": 3, "allreduce": 3 if on_input else 2}
    # 2 * channels + 1 numbers forward, 2 * channels backward, of float32
    assert native_calls.bytes_sent == {"allgather": 3 * 4 * 9, "allreduce": (3 if on_input else 2) * 4 * 8}


def test_the_compiler_stops_before_a_layer_and_does_not_warn_of_horovod(hvd, rank):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), hvd.SyncBatchNorm(6), torch.nn.Linear(6, 2))
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))
    found = []
    for model in (plain, torch.compile(plain, backend="eager")):
        plain.zero_grad()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")  # torch warns of its own too
            output = model(x)
        assert not [str(each.message) for each in warned if "horovod" in str(each.message)]
        output.sin().sum().backward()
        found.append([output, *[p.grad.clone() for p in plain.parameters()]])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_gradients_of_gradients_are_refused(hvd):
    x = torch.randn(3, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(hvd.SyncBatchNorm(2)(x).sin().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.usefixtures("kernels")
def test_too_few_values_are_an_error_on_every_rank(hvd, rank):
    layer = hvd.SyncBatchNorm(2)
    with pytest.raises(ValueError, match="more than 1 value"):
        layer(torch.randn(1 if rank == 0 else 0, 2))
    assert layer.num_batches_tracked == 0
    assert layer.running_var.tolist() == [1.0, 1.0]


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
