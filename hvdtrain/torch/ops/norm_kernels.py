"""The arithmetic of a batch normalization over ranks: five functions, between which the ranks exchange statistics.

On CUDA devices they are torch's own kernels. torch has these for CUDA only, so for other devices the same functions
are here: with torch's names, arguments, results and types. Inputs are (local_batch, channels, ...); what is per channel
is float64 for inputs of float64, and else float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class NormKernels:
    """The five functions, under the last words of torch's names for them."""

    stats: Callable[..., Any]
    gather_stats_with_counts: Callable[..., Any]
    elemt: Callable[..., Any]
    backward_reduce: Callable[..., Any]
    backward_elemt: Callable[..., Any]


def kernels_for(tensor: Tensor) -> NormKernels:
    """Return the functions for the device of `tensor`."""
    return TORCHS if tensor.is_cuda else PORTABLE


def statistics_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of statistics, weights and sums of an input of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / sqrt(variance + eps) of this rank's values, each (channels,)."""
    variance, mean = torch.var_mean(x.to(statistics_type(x.dtype)), dim=_all_but_channels(x), correction=0)
    return mean, variance.add_(eps).rsqrt_()


def batch_norm_gather_stats_with_counts(
    x: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / sqrt(variance + eps) over all ranks, and update the running statistics.

    Args:
        x: a tensor of the type of the statistics; torch's kernel reads nothing else of it.
        means: mean of each rank, (ranks, channels).
        invstds: 1 / sqrt(variance + eps) of each rank, (ranks, channels).
        running_mean: (channels,), changed in place; None, with `running_var`, to update nothing.
        running_var: the same; gets the unbiased variance.
        momentum: weight of this batch in the running statistics.
        eps: what was added to the variances of ranks, and is added to the variance of all.
        counts: values per channel on each rank, (ranks,), all positive.
    """
    count, weights = counts.sum(), counts.unsqueeze(1)
    mean = (means * weights).sum(0) / count
    # Variances of parts, and of the parts' means: stable where a difference of squares is not.
    variances = (invstds.pow(-2) - eps).clamp_(min=0)
    variance = (variances.add_((means - mean).square_()) * weights).sum(0) / count
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean, momentum)
        running_var.lerp_(variance * (count / (count - 1)), momentum)
    return mean, variance.add_(eps).rsqrt_()


def batch_norm_elemt(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    """Return x, normalized, times `weight` plus `bias`; torch's kernel does not use `eps` either."""
    output = (x - _broadcast(mean, x)) * _broadcast(_scale(invstd, weight), x)
    if bias is not None:
        output += _broadcast(bias, x)
    return output.to(x.dtype)


def batch_norm_backward_reduce(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Return this rank's sums of dy and of dy * (x - mean), and its gradients of weight and bias; (channels,) each."""
    dims = _all_but_channels(x)
    sum_dy = dy.sum(dims, dtype=mean.dtype)
    sum_dy_xmu = (dy * (x - _broadcast(mean, x))).sum(dims)
    return (
        sum_dy if input_g else None,
        sum_dy_xmu if input_g else None,
        sum_dy_xmu * invstd if weight_g else None,
        sum_dy.clone() if bias_g else None,
    )


def batch_norm_backward_elemt(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    """Return the gradient of x, from sums and `counts` (int32, one per rank) over all ranks."""
    count = counts.sum()
    by_spread = _broadcast(sum_dy_xmu / count * invstd.square(), x)
    grad = (x - _broadcast(mean, x)).mul_(by_spread).add_(_broadcast(sum_dy / count, x))
    return torch.sub(dy, grad).mul_(_broadcast(_scale(invstd, weight), x)).to(x.dtype)


def _scale(invstd: Tensor, weight: Tensor | None) -> Tensor:
    return invstd if weight is None else invstd * weight


def _broadcast(per_channel: Tensor, x: Tensor) -> Tensor:
    """Return (channels,) as (1, channels, 1, ...), of as many dimensions as x."""
    return per_channel.view(1, -1, *[1] * (x.dim() - 2))


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


PORTABLE = NormKernels(
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
)
TORCHS = NormKernels(
    torch.batch_norm_stats,
    torch.batch_norm_gather_stats_with_counts,
    torch.batch_norm_elemt,
    torch.batch_norm_backward_reduce,
    torch.batch_norm_backward_elemt,
)
