"""torch's five CUDA kernels of batch normalization, as plain operations on any device.

They check types, shapes and layouts as torch's do (aten/src/ATen/native/cuda/Normalization.cu, .cuh), or more strictly
where torch would read memory in a wrong order, and merge the ranks' statistics by the same formula. No GPU has compared
them with torch's: tests/gpu/test_norm_kernels.py does.
"""

from __future__ import annotations

import torch

from hvdtrain.torch.ops.norm_kernels import NormKernels


def wide_type(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def per_channel(x, *tensors):
    """Check tensors of one value per channel, in the type in which the kernels add up."""
    for each in tensors:
        assert each is None or (each.shape, each.dtype) == ((x.shape[1],), wide_type(x.dtype)), (each, x.dtype)
        assert each is None or each.is_contiguous()


def layouts(x):
    found = {torch.contiguous_format} if x.is_contiguous() else set()
    for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dims and x.is_contiguous(memory_format=layout):
            found.add(layout)
    assert found, f"neither contiguous nor channels_last: {x.stride()} of {tuple(x.shape)}"
    return found


def flat(x):
    """Return x as (channels, values) in the wide type."""
    assert x.numel(), "torch calls no kernel for an empty tensor"
    layouts(x)
    return x.detach().transpose(0, 1).reshape(x.shape[1], -1).to(wide_type(x.dtype))


def like(values, x):
    """Return (channels, values) as a tensor of the shape, type and layout of x."""
    shaped = values.view(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)
    return torch.empty_like(x).copy_(shaped)


def batch_norm_stats(x, eps):
    values = flat(x)
    return values.mean(1), (values.var(1, correction=0) + eps).rsqrt()


def batch_norm_gather_stats_with_counts(x, means, invstds, running_mean, running_var, momentum, eps, counts):
    kind = x.dtype if running_mean is None else running_mean.dtype
    types = {each.dtype for each in (x, means, invstds, running_mean, running_var, counts) if each is not None}
    assert types == {kind} <= {torch.float32, torch.float64}, types
    assert isinstance(momentum, float)
    ranks, channels = means.shape
    assert (invstds.shape, counts.shape) == ((ranks, channels), (ranks,))
    average, var_n = torch.zeros_like(means[0]), torch.zeros_like(means[0])
    n = torch.zeros((), dtype=torch.int32, device=means.device)
    for mean, invstd, count in zip(means, invstds, counts, strict=True):
        spread = ((1.0 / invstd) ** 2 - eps) * count
        factor = 1.0 / (n + count)
        var_n = var_n + spread + (average - mean) ** 2 * n * count * factor
        average = n * factor * average + count * factor * mean
        n = (n + count).to(torch.int32)  # the kernel's n is an integer
    if running_mean is not None:
        running_mean.copy_((1 - momentum) * running_mean + momentum * average)
        running_var.copy_((1 - momentum) * running_var + momentum * (var_n / (n - 1)))
    return average, (var_n / n + eps).rsqrt()


def batch_norm_elemt(x, weight, bias, mean, invstd, eps):
    per_channel(x, weight, bias, mean, invstd)
    values = (flat(x) - mean[:, None]) * invstd[:, None]
    values = values if weight is None else values * weight[:, None]
    return like(values if bias is None else values + bias[:, None], x)


def batch_norm_backward_reduce(dy, x, mean, invstd, weight, input_g, weight_g, bias_g):
    assert all(isinstance(each, bool) for each in (input_g, weight_g, bias_g))
    assert dy.dtype == x.dtype
    assert weight is not None or not (weight_g or bias_g), "torch makes both gradients like the weight"
    per_channel(x, mean, invstd, weight)
    assert layouts(dy) == layouts(x)
    sum_dy = flat(dy).sum(1)
    sum_dy_xmu = (flat(dy) * (flat(x) - mean[:, None])).sum(1)
    affine = (sum_dy_xmu * invstd if weight_g else None, sum_dy.clone() if bias_g else None)
    return (sum_dy, sum_dy_xmu, *affine) if input_g else (None, None, *affine)


def batch_norm_backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, counts):
    per_channel(x, mean, invstd, weight, sum_dy, sum_dy_xmu)
    assert (counts.dtype, counts.dim(), counts.is_contiguous()) == (torch.int32, 1, True)
    assert layouts(dy) == layouts(x), "torch asks dy alone for the order of both"
    count = counts.to(torch.int64).sum()
    values = flat(dy) - (sum_dy / count)[:, None]
    values -= (flat(x) - mean[:, None]) * (sum_dy_xmu / count * invstd**2)[:, None]
    return like(values * (invstd if weight is None else invstd * weight)[:, None], x)


STRICT = NormKernels(
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
)
