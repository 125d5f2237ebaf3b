"""torch's CUDA kernels of batch normalization do what hvdtrain's own functions, and those of the rank tests, do."""

from __future__ import annotations

import pytest
import torch

from hvdtrain.torch.ops import norm_kernels

pytestmark = pytest.mark.cuda_only

INPUTS = {
    "2d": ((6, 4), torch.contiguous_format),
    "image": ((6, 4, 5, 3), torch.contiguous_format),
    "channels_last": ((6, 4, 5, 3), torch.channels_last),
    "channels_last_3d": ((2, 4, 3, 2, 2), torch.channels_last_3d),
}


@pytest.fixture(params=["portable", "strict"])
def expected(request, load_script):
    if request.param == "portable":
        return norm_kernels.PORTABLE
    return load_script("ranks/torch/cuda_norm_kernels.py").STRICT


def assert_close(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.dtype, a.stride()) == (b.dtype, b.stride())
            step = torch.finfo(a.dtype).eps
            torch.testing.assert_close(a, b, rtol=20 * step, atol=200 * step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("affine", [True, False])
def test_a_step_of_one_rank(device, expected, dtype, kind, affine):
    torch.manual_seed(0)
    shape, layout = INPUTS[kind]
    x, dy = (torch.randn(shape, device=device).to(dtype, memory_format=layout) for _ in range(2))
    assert norm_kernels.kernels_for(x) is norm_kernels.TORCHS
    wide, channels = norm_kernels.statistics_type(dtype), shape[1]
    weight, bias = torch.rand(2, channels, device=device, dtype=wide) if affine else (None, None)
    sums = torch.rand(2, channels, device=device, dtype=wide)
    counts = torch.tensor([x.numel() // channels, 0, 7], device=device, dtype=torch.int32)
    found = []
    for kernels in (norm_kernels.TORCHS, expected):
        mean, invstd = kernels.stats(x, 1e-5)
        output = kernels.elemt(x, weight, bias, mean, invstd, 1e-5)
        reduced = kernels.backward_reduce(dy, x, mean, invstd, weight, True, affine, affine)
        grad = kernels.backward_elemt(dy, x, mean, invstd, weight, *sums, counts)
        found.append((mean, invstd, output, *reduced, grad))
    assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("counts", [[5, 7, 300], [1e-30, 5, 1e-30], [1e-30, 1, 1]], ids=str)
def test_the_statistics_of_ranks_and_of_ranks_without_samples(device, expected, dtype, counts):
    torch.manual_seed(0)
    rows = torch.randn(3, 9, device=device, dtype=dtype)
    counts = torch.tensor(counts, device=device, dtype=dtype)
    means, invstds = rows[:, :4], rows[:, 4:8].square_().add_(0.5)
    found = []
    for kernels in (norm_kernels.TORCHS, expected):
        running = torch.ones(2, 4, device=device, dtype=dtype)
        of_all = kernels.gather_stats_with_counts(rows, means, invstds, *running, 0.1, 1e-5, counts)
        found.append((*of_all, *running, *kernels.gather_stats_with_counts(
            rows, means, invstds, None, None, 0.0, 1e-5, counts
        )))  # fmt: skip
    assert_close(*found)
