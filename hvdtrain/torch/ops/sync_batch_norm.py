"""Batch normalization over the batches of all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from hvdtrain.distributed import launch_environment, world
from hvdtrain.torch.ops import engine
from hvdtrain.torch.ops.engine import Sum
from hvdtrain.torch.ops.gather_ops import allgather_async
from hvdtrain.torch.ops.norm_kernels import kernels_for, statistics_type
from hvdtrain.torch.ops.submit import Reduction, submit

_NO_SAMPLES = 1e-30  # instead of a count of 0


class SyncBatchNorm(_BatchNorm):
    """BatchNorm whose mean and variance are the global batch's; local batches may differ in length.

    Takes input of shape (local_batch, channels, ...) and BatchNorm's own arguments. Every rank must call it equally
    often; on a Grid, those with other samples in this rank's stage: ranks of a tensor group have the same ones. As with
    any layer, the gradients of weight and bias are this rank's share: DistributedOptimizer reduces them.

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
        if not by_batch or (_ranks().size() == 1 and not launch_environment.reduces_alone()):
            return super().forward(input)
        if torch.compiler.is_compiling():  # the compiler cannot see into Horovod: one break of the graph, not many
            output: Tensor = torch.compiler.disable(self._over_ranks)(input)
            return output
        return self._over_ranks(input)

    def _over_ranks(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Normalize `input` by the batches of all ranks."""
        wide = statistics_type(input.dtype)
        # Before the kernels, which take one type and one layout; autograd converts gradients back.
        affine: list[Tensor | None] = [self.weight, self.bias]
        weight, bias = [None if each is None else each.to(wide) for each in affine]
        if weight is None and bias is not None:
            weight = torch.ones_like(bias)  # torch's kernels have the bias's gradient beside the weight's only
        running = self._running_to_update(input, wide)
        dense = input.contiguous(memory_format=_layout(input))
        output = _Normalize.apply(dense, weight, bias, running, self.eps, self.batch_weight)
        self._track(running)
        return output  # type: ignore[no-any-return]

    def _running_to_update(self, x: Tensor, wide: torch.dtype) -> _Running | None:
        """Return what the kernels update: the layer's buffers, or new ones where the kernels cannot use these."""
        if not self.training or not self.track_running_stats or self.num_batches_tracked is None:
            return None
        if self.running_mean is None or self.running_var is None:
            return None
        # With momentum None, that of a batch is known on the device only: the host does not count batches.
        if self.momentum is not None and self.running_mean.dtype == self.running_var.dtype == wide:
            return _Running(self.running_mean, self.running_var, self.momentum)
        fresh = torch.zeros(2, x.shape[1], dtype=wide, device=x.device)
        return _Running(fresh[0], fresh[1], 1.0)

    @torch.no_grad()
    def _track(self, running: _Running | None) -> None:
        """Count the batch, and move the buffers towards its statistics unless the kernels have."""
        if running is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        for buffer, new in ((self.running_mean, running.mean), (self.running_var, running.variance)):
            if buffer is not None and buffer is not new:
                momentum: Any = self.momentum
                if momentum is None:
                    momentum = (1.0 / self.num_batches_tracked.double()).to(buffer.dtype)
                buffer.lerp_(new.to(buffer.dtype), momentum)


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
    is_initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    if is_initialized and torch.distributed.get_backend() != "horovod":
        return None  # it synchronizes over torch's own ranks; on a Grid's backend it would not
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


def _ranks() -> Any:
    """Return the process set of the ranks whose batches are the global one: on a Grid, those that divide the data."""
    return engine.global_set(world.data_set())


@dataclass(frozen=True)
class _Running:
    """Buffers that the kernels update, and the weight of a batch in them."""

    mean: Tensor
    variance: Tensor
    momentum: float


class _Normalize(torch.autograd.Function):
    """One collective forward, one backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: _Running | None,
        eps: float,
        batch_weight: float,
    ) -> Tensor:
        kernels = kernels_for(x)
        ctx.ranks = _ranks()
        rows = _statistics_of_all(x, eps, batch_weight, ctx.ranks)  # (size, 2 * channels + 1)
        means, invstds, counts = rows.tensor_split((x.shape[1], 2 * x.shape[1]), dim=1)
        buffers = (None, None, 0.0) if running is None else (running.mean, running.variance, running.momentum)
        # A count of 0 before all others would be a division by 0 in torch's kernel; this one adds nothing to a sum.
        divisible = counts.squeeze(1).clamp(min=_NO_SAMPLES)
        mean, invstd = kernels.gather_stats_with_counts(rows, means, invstds, *buffers, eps, divisible)
        ctx.save_for_backward(x, weight, mean, invstd, counts.squeeze(1).to(torch.int32))
        ctx.batch_weight = batch_weight
        if not x.numel():
            return torch.empty_like(x)
        output: Tensor = kernels.elemt(x, weight, bias, mean, invstd, eps)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, weight, mean, invstd, counts = ctx.saved_tensors
        kernels = kernels_for(x)
        wants_x, wants_weight, wants_bias = wanted = ctx.needs_input_grad[:3]
        dy = dy.contiguous(memory_format=_layout(x))
        if x.numel():
            sums = kernels.backward_reduce(dy, x, mean, invstd, weight, *wanted)
        else:
            sums = mean.new_zeros(4, x.shape[1])
        sum_dy, sum_dy_xmu, grad_weight, grad_bias = sums  # the last two are this rank's
        grad_x = None
        if wants_x:
            of_all = _reduced(torch.cat([sum_dy, sum_dy_xmu]), ctx.batch_weight, ctx.ranks).chunk(2)
            grad_x = kernels.backward_elemt(dy, x, mean, invstd, weight, *of_all, counts) if x.numel() else dy
        return grad_x, grad_weight if wants_weight else None, grad_bias if wants_bias else None, None, None, None


def _statistics_of_all(x: Tensor, eps: float, batch_weight: float, ranks: Any) -> Tensor:
    """Return mean, 1 / sqrt(variance + eps) and count of each rank; (size, 2 * channels + 1)."""
    channels = x.shape[1]
    count = x.numel() // max(channels, 1) if batch_weight else 0
    wide = statistics_type(x.dtype)
    if count:
        mean, invstd = kernels_for(x).stats(x, eps)
    else:  # finite, because their weight is 0
        mean, invstd = x.new_zeros(channels, dtype=wide), x.new_ones(channels, dtype=wide)
    # Exact up to 16 million values per channel on a rank; a larger count is rounded as any number in float32.
    mine = torch.cat([mean, invstd, x.new_full((1,), count, dtype=wide)])
    rows: Tensor = allgather_async(mine.unsqueeze(0), f"sync_batch_norm.{channels}.{wide}", ranks).wait()
    # Reading the sum makes the host wait for the device: only a rank that has nearly nothing itself does it.
    if count <= 1 and (of_all := float(rows[:, -1].sum())) <= 1:
        received = f"Received: {int(of_all)}, locally {tuple(x.shape)}"
        raise ValueError(f"Expected more than 1 value per channel over all ranks when training. {received}")
    return rows


def _reduced(sums: Tensor, batch_weight: float, ranks: Any) -> Tensor:
    """Return the sum over ranks of each rank's weight times its sums, in the scale of this rank's gradients."""
    if batch_weight != 1.0:  # write zeros instead of multiplying: a filler's gradient may not be finite
        sums = sums * batch_weight if batch_weight else torch.zeros_like(sums)
    how = Reduction(Sum, process_set=ranks)
    submit([sums], how, name=f"sync_batch_norm.{len(sums) // 2}.{sums.dtype}.grad", in_place=True).wait()
    # Ranks add up gradients of one scale; this rank's own gradient is multiplied by its weight later.
    return sums if batch_weight in (0.0, 1.0) else sums / batch_weight


def _layout(x: Tensor) -> torch.memory_format:
    """Return the layout in which torch's kernels take x without a copy, or to which it is copied."""
    for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dims and x.is_contiguous(memory_format=layout):
            return layout
    return torch.contiguous_format
