"""Metrics over all ranks: objects of torchmetrics, and the values of `self.log`."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch import Tensor, nn
from torchmetrics import Metric

import hvdtrain.torch as hvd
from hvdtrain.lightning.ranks import refuse_group


def connect_metrics(module: nn.Module) -> None:
    """Let the torchmetrics objects in `module`, itself included, compute over Horovod's ranks.

    The strategies do this for a module's own metrics. A metric with a `dist_sync_fn` of the user's keeps it.
    """
    for each in module.modules():
        if isinstance(each, Metric) and each.dist_sync_fn is None:
            each.distributed_available_fn = _has_ranks
            each.dist_sync_fn = gather


def _has_ranks() -> bool:
    return bool(hvd.size() > 1)


def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Return every rank's tensor, in rank order; shapes may differ. A collective."""
    refuse_group(group)
    held = hvd.allgather_object((tuple(tensor.shape), tensor.dtype))
    # A rank without samples has an empty tensor of torch's default type, whatever the others have.
    dtype = next((dtype for shape, dtype in held if 0 not in shape), tensor.dtype)
    everyones = hvd.allgather(tensor.detach().to(dtype).reshape(-1))
    lengths = [torch.Size(shape).numel() for shape, _ in held]
    return [part.reshape(shape) for part, (shape, _) in zip(everyones.split(lengths), held, strict=True)]


class EpochValues(_ResultCollection):
    """What `self.log` has collected in a loop; values of an epoch are over all ranks, with or without sync_dist.

    Attributes:
        is_filler: True during a batch that only repeats another rank's sample, and does not count.
    """

    is_filler = False
    _compared: frozenset[Any] = frozenset()  # DataLoaders of this epoch of which ranks have compared what they logged

    def __setitem__(self, key: str, metric: Any) -> None:
        super().__setitem__(key, _OverRanks(metric.meta, metric.is_tensor))

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Add a value to the epoch's."""
        if self.is_filler and self[key].is_tensor:
            batch_size = 0
            value = torch.zeros_like(value) if self[key].meta.is_sum_reduction else value
        super().update_metrics(key, value, batch_size)

    def metrics(self, on_step: bool) -> Any:
        """Return values; those of an epoch are computed at the first call, which all ranks make."""
        if not on_step and self.dataloader_idx not in self._compared:
            self._compared |= {self.dataloader_idx}
            self._compare()
        return super().metrics(on_step)

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """Begin an epoch."""
        self._compared = frozenset()
        super().reset(*args, **kwargs)

    def _compare(self) -> None:
        """Raise ValueError on every rank if ranks have logged different values, for which they would wait for ever."""
        logged = [each.meta for _, each in self.valid_items()]
        ours = [meta.name for meta in logged if meta.on_epoch and not meta.sync.rank_zero_only]
        for rank, theirs in enumerate(hvd.allgather_object(ours)):
            if theirs != ours:
                raise ValueError(
                    "Values of an epoch are over all ranks, and ranks have logged different ones. Received: "
                    f"{ours} on rank {hvd.rank()}, {theirs} on rank {rank}. Call self.log on every rank, in the same "
                    "order, or on rank 0 with rank_zero_only=True."
                )


class _OverRanks(_ResultMetric):
    """A value of `self.log`. Lightning's own is this rank's, unless sync_dist is set; then its mean cuts counts off."""

    def compute(self) -> Any:
        """Return the epoch's value; a collective, unless rank 0 logs alone. A torchmetrics object does it itself."""
        if not self.is_tensor or self.meta.sync.rank_zero_only:
            return super().compute()
        refuse_group(self.meta.sync.group)
        name = f"lightning.{self.meta.fx}.{self.meta.name}"  # of which a stalled rank reports
        if self.meta.is_mean_reduction:
            held = torch.stack([self.value.double(), self.cumulated_batch_size.double()])
            total, count = hvd.allreduce(held, op=hvd.Sum, name=name)
            return (total / count).to(self.value.dtype)
        op = hvd.Max if self.meta.is_max_reduction else hvd.Min if self.meta.is_min_reduction else hvd.Sum
        return hvd.allreduce(self.value, op=op, name=name)


class ComputeTogether(Callback):
    """Computes an epoch's values on all ranks at once, before other callbacks: a progress bar reads them on rank 0."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Compute the values of training."""
        _ = trainer.callback_metrics

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Compute the values of validation."""
        _ = trainer.callback_metrics

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Compute the values of a test."""
        _ = trainer.callback_metrics
