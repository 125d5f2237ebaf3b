"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from hvdtrain.distributed import launch_environment
from hvdtrain.torch.ops import engine
from hvdtrain.torch.ops.engine import Sum
from hvdtrain.torch.ops.gather_ops import allgather_async
from hvdtrain.torch.ops.submit import Reduction, submit


class SyncBatchNorm(_BatchNorm):
    """BatchNorm whose mean and variance are the global batch's; on CPU and GPU, local batches may differ in length.

    Takes input of shape (local_batch, channels, ...) and BatchNorm's own arguments. Every rank must call it equally
    often. As with any layer, the gradients of weight and bias are this rank's share: DistributedOptimizer reduces them.

    Attributes:
        batch_weight: the loop multiplies this rank's gradients of the present batch with it after backward. A batch of
            weight 0 does not count in the statistics.
    """

    batch_weight = 1.0

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm needs input of at least 2 dimensions. Received: {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Normalize `input`: (local_batch, channels, ...)."""
        self._check_input_dim(input)
        by_batch = self.training or self.running_mean is None
        if not by_batch or (engine.native().size() == 1 and not launch_environment.reduces_alone()):
            return super().forward(input)
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps, self.batch_weight)
        if self.training and self.track_running_stats:
            self._track(mean, variance, count)
        return output  # type: ignore[no-any-return]

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        unbiased = variance * (count / (count - 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            momentum: Any = self.momentum
            if momentum is None:  # on the device: the host does not know how many batches there were
                momentum = (1.0 / self.num_batches_tracked.double()).to(running.dtype)
            running.lerp_(new.to(running.dtype), momentum)


def convert_sync_batchnorm(module: nn.Module) -> nn.Module:
    """Let every BatchNorm of a model normalize by the batches of all ranks, as torch's function of this name does.

    Modules, parameters and buffers stay the same objects, so an optimizer may be made before or after.

    Args:
        module: a model, or a BatchNorm; it is changed in place.

    Returns:
        The same object.

    Raises:
        TypeError: a BatchNorm is lazy, or has a `forward` of its own, which would be lost; nothing is changed.
    """
    _convert(module, _BatchNorm)
    return module


def convert_torchs(module: nn.Module) -> str | None:
    """Convert `torch.nn.SyncBatchNorm`, which without torch.distributed is a plain BatchNorm; return a log line."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None  # it synchronizes over torch's own ranks
    names = _convert(module, nn.SyncBatchNorm)
    if not names:
        return None
    count = "1 layer" if len(names) == 1 else f"{len(names)} layers"
    return f"torch.nn.SyncBatchNorm -> hvdtrain.torch.SyncBatchNorm: {count}, {names[0] or 'the model itself'} first"


def _convert(module: nn.Module, kind: type[_BatchNorm]) -> list[str]:
    found = {name: each for name, each in module.named_modules() if isinstance(each, kind)}
    found = {name: each for name, each in found.items() if not isinstance(each, SyncBatchNorm)}
    for name, each in found.items():
        is_lazy = isinstance(each, LazyModuleMixin)
        if is_lazy or type(each).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
            reason = "has no weights yet: call the model on a batch first" if is_lazy else "has a forward of its own"
            raise TypeError(
                f"Only torch's own BatchNorm can become a SyncBatchNorm. Received: {name or 'a module'} of type "
                f"{type(each).__name__}, which {reason}."
            )
    for each in found.values():
        each.__class__ = SyncBatchNorm
        each.__dict__.pop("process_group", None)
    return list(found)


class _Normalize(torch.autograd.Function):
    """One collective forward, one backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, batch_weight: float
    ) -> Any:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        channels = x.shape[1]
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, channels] + [1] * (x.dim() - 2)
        xw = x.to(wide)
        local_count = x.numel() // max(channels, 1) if batch_weight else 0
        local_var, local_mean = torch.var_mean(xw, dim=dims, correction=0) if local_count else xw.new_zeros(2, channels)
        mine = torch.cat([local_mean, local_var, local_mean.new_tensor([float(local_count)])])
        # (size, 2 * channels + 1)
        parts = allgather_async(mine.unsqueeze(0), name=f"sync_batch_norm.{channels}.{wide}").wait()
        counts = parts[:, -1:]  # (size, 1)
        count = counts.sum()
        # Reading the sum makes the host wait for the device: only a rank that has nearly nothing itself does it.
        if local_count <= 1 and count <= 1:
            received = f"Received: {int(count)}, locally {tuple(x.shape)}"
            raise ValueError(f"Expected more than 1 value per channel over all ranks when training. {received}")
        means, variances = parts[:, :channels], parts[:, channels:-1]
        mean = (means * counts).sum(0) / count
        # Variances of parts, and of the parts' means: stable where a difference of squares is not.
        variance = ((variances + (means - mean) ** 2) * counts).sum(0) / count
        invstd = (variance + eps).rsqrt()
        normed = (xw - mean.view(shape)) * invstd.view(shape)
        output = normed if weight is None else normed * weight.to(wide).view(shape)
        if bias is not None:
            output = output + bias.to(wide).view(shape)
        ctx.save_for_backward(x, weight, mean, invstd, count)
        ctx.has_bias, ctx.batch_weight = bias is not None, batch_weight
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, mean, invstd, count = ctx.saved_tensors
        channels = x.shape[1]
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, channels] + [1] * (x.dim() - 2)
        dy = grads[0].to(mean.dtype)
        normed = (x.to(mean.dtype) - mean.view(shape)) * invstd.view(shape)
        sum_dy = dy.sum(dims)
        sum_dy_normed = (dy * normed).sum(dims)
        grad_weight = None if weight is None else sum_dy_normed.to(weight.dtype)
        grad_bias = sum_dy.to(weight.dtype if weight is not None else x.dtype) if ctx.has_bias else None
        grad_x = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([sum_dy, sum_dy_normed])
            if ctx.batch_weight != 1.0:  # write zeros instead of multiplying: a filler's gradient may not be finite
                sums = sums * ctx.batch_weight if ctx.batch_weight else torch.zeros_like(sums)
            how = Reduction(Sum, process_set=engine.global_set())
            submit([sums], how, name=f"sync_batch_norm.{channels}.{mean.dtype}.grad", in_place=True).wait()
            # Ranks add up gradients of one scale; this rank's own gradient is multiplied by its weight later.
            mean_dy, mean_dy_normed = (sums / (count * (ctx.batch_weight or 1.0))).split(channels)
            grad_x = dy - mean_dy.view(shape) - normed * mean_dy_normed.view(shape)
            scale = invstd if weight is None else invstd * weight.to(mean.dtype)
            grad_x = (grad_x * scale.view(shape)).to(x.dtype)
        return grad_x, grad_weight, grad_bias, None, None
