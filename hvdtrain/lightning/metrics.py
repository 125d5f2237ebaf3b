"""Metrics over all ranks: objects of torchmetrics, and the values of `self.log`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric

import hvdtrain.torch as hvd
from hvdtrain.lightning.host import _ResultCollection, _ResultMetric
from hvdtrain.lightning.ranks import refuse_group

# Hooks that have no batch. What they log is a value of all samples, or of none.
_OUTSIDE_BATCHES = ("_epoch_start", "_epoch_end", "_train_start", "_validation_start", "_test_start")


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


@contextmanager
def counting_nothing(module: nn.Module) -> Iterator[None]:
    """Within it, the torchmetrics objects in `module` compute, and afterwards have the state that they had before."""
    metrics = [each for each in module.modules() if isinstance(each, Metric)]
    held = [apply_to_collection(each.metric_state, Tensor, torch.clone) for each in metrics]
    try:
        yield
    finally:
        for metric, state in zip(metrics, held, strict=True):
            for name, value in state.items():
                setattr(metric, name, value)


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
        weight: of this rank's batch, in the mean over ranks; 0 if it only repeats another rank's sample.
    """

    weight = 1.0
    _compared: frozenset[Any] = frozenset()  # DataLoaders of this epoch of which ranks have compared what they logged

    def __setitem__(self, key: str, metric: Any) -> None:
        super().__setitem__(key, _OverRanks(metric.meta, metric.is_tensor))

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Add a value to the epoch's."""
        metric = self[key]
        if self.weight == 0 and metric.is_tensor:
            batch_size = 0
            value = torch.zeros_like(value) if metric.meta.is_sum_reduction else value
        super().update_metrics(key, value, batch_size)
        if self.weight != 1 and metric.is_shared_mean:  # of ranks with unequal parts of a batch
            metric.share_step(value * self.weight)

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

    def last_steps(self) -> dict[str, Tensor]:
        """Return the means over ranks of what they have logged of their last steps. A collective."""
        mine = {
            each.meta.forked_name(True): each._forward_cache.double() * self.weight
            for _, each in self.valid_items()
            if each.is_own_mean
        }
        names = [name for name in mine if all(name in others for others in hvd.allgather_object(list(mine)))]
        if not names:
            return {}
        means = hvd.allreduce(torch.stack([mine[name] for name in names]), name="lightning.last_steps")
        return dict(zip(names, means.to(torch.get_default_dtype()), strict=True))

    def _compare(self) -> None:
        """Raise ValueError on every rank if ranks have logged different values, for which they would wait for ever."""
        logged = [each.meta for _, each in self.valid_items()]
        ours = [meta.name for meta in logged if meta.on_epoch and not meta.sync.rank_zero_only]
        for rank, theirs in enumerate(hvd.allgather_object(ours)):
            if theirs != ours:
                raise ValueError(
                    "Values of an epoch are over all ranks, and ranks have logged different ones. Received: "
                    f"{ours} on rank {hvd.rank()}, {theirs} on rank {rank}. Call self.log on every rank, in the same "
                    "order, or on rank 0 with rank_zero_only=True. A DataLoader needs a sample for each rank."
                )


class _OverRanks(_ResultMetric):
    """A value of `self.log`. Lightning's own is this rank's, unless sync_dist is set; then its mean cuts counts off."""

    @property
    def is_shared_mean(self) -> bool:
        """True if its value of a step is the mean over ranks."""
        return self._is_mean_of_steps and self.meta.sync.should

    @property
    def is_own_mean(self) -> bool:
        """True if its value of a step is this rank's mean over a batch."""
        return self._is_mean_of_steps and not self.meta.sync.should

    @property
    def _is_mean_of_steps(self) -> bool:
        meta = self.meta
        return bool(self.is_tensor and meta.on_step and meta.is_mean_reduction and not meta.sync.rank_zero_only)

    def share_step(self, part: Tensor) -> None:
        """Let the value of a step be the mean of the ranks' parts. A collective."""
        self._forward_cache = self.meta.sync(part)
        if not self.meta.on_epoch:
            self.value = self._forward_cache

    def compute(self) -> Any:
        """Return the epoch's value; a collective, unless rank 0 logs alone. A torchmetrics object does it itself."""
        if not self.is_tensor or self.meta.sync.rank_zero_only:
            return super().compute()
        refuse_group(self.meta.sync.group)
        name = f"lightning.{self.meta.fx}.{self.meta.name}"  # of which a stalled rank reports
        if not self.meta.sync.should and self.meta.fx.endswith(_OUTSIDE_BATCHES):
            return self._equal(super().compute(), name)
        if self.meta.is_mean_reduction:
            held = torch.stack([self.value.double(), self.cumulated_batch_size.double()])
            total, count = hvd.allreduce(held, op=hvd.Sum, name=name)
            return (total / count).to(self.value.dtype)
        op = hvd.Max if self.meta.is_max_reduction else hvd.Min if self.meta.is_min_reduction else hvd.Sum
        return hvd.allreduce(self.value, op=op, name=name)

    def _equal(self, value: Tensor, name: str) -> Tensor:
        """Return rank 0's value; raise ValueError on every rank if ranks have others: none is one process's."""
        everyones = hvd.allgather(value.reshape(1), name=name)
        if not torch.allclose(everyones, everyones[:1], rtol=1e-5, atol=1e-8, equal_nan=True):
            raise ValueError(
                f"self.log({self.meta.name!r}) in {self.meta.fx} differs between ranks, and one process would "
                f"compute it of all samples. Received: {everyones.tolist()}, on rank {hvd.rank()}. Log a torchmetrics "
                "object, or compute the value of what self.all_gather returns. To have the ranks' mean, pass "
                "sync_dist=True; to have rank 0's, log on rank 0 with rank_zero_only=True."
            )
        return everyones[0]


class ComputeTogether(Callback):
    """Computes an epoch's values on all ranks at once, before other callbacks: a progress bar reads them on rank 0."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Compute the values of training. Schedules and callbacks decide by those of the last step, too."""
        results = trainer.fit_loop.epoch_loop._results
        trainer.callback_metrics.update(results.last_steps())
        results.weight = 1.0  # of what is logged from here on, which is of no batch

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Compute the values of validation."""
        _ = trainer.callback_metrics

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Compute the values of a test."""
        _ = trainer.callback_metrics
