"""Each rank's share of the batches of a DataLoader: every sample once, in the batches of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler

import hvdtrain.torch as hvd
from hvdtrain.distributed.world import World


class Share(Sampler[int]):
    """This rank's sample indices. Batch k of all ranks together is batch k of one process, of `size` times the length.

    The last batch may be short. Then ranks hold unequal parts of it, and `next_weight` says how much each counts. If it
    has fewer samples than there are ranks, a rank without one repeats another's sample, with weight 0, in training; in
    evaluation it has one batch less.

    Args:
        order: yields all indices, equally on all ranks; it has `set_epoch`.
        batch_size: samples in a rank's batch.
        drop_last: leave the short batch out.
        repeats: True in training.
        draws: True if the order depends on this process's random state: then rank 0's is sent to all.
    """

    def __init__(
        self, order: Any, world: World, *, batch_size: int, drop_last: bool, repeats: bool, draws: bool = False
    ) -> None:
        self._order, self._world, self._batch_size = order, world, batch_size
        self._drop_last, self._repeats, self._draws = drop_last, repeats, draws
        self._done = 0  # batches of this epoch that `next_weight` has counted

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines the order."""
        self._order.set_epoch(epoch)

    def _lengths(self) -> tuple[int, int, int]:
        """Return the number of whole batches, of the last one's samples, and of those among them that are here."""
        whole, last = divmod(len(self._order), self._world.size * self._batch_size)
        last = 0 if self._drop_last else last
        return whole, last, len(range(self._world.rank, last, self._world.size))

    def __len__(self) -> int:
        whole, last, mine = self._lengths()
        return whole * self._batch_size + (max(mine, 1) if last and self._repeats else mine)

    def __iter__(self) -> Iterator[int]:
        self._done = 0
        whole, last, mine = self._lengths()
        size, rank = self._world.size, self._world.rank
        indices = hvd.broadcast_object(list(self._order)) if self._draws else list(self._order)
        end = whole * size * self._batch_size
        yield from indices[rank:end:size]
        yield from indices[end + rank : end + last : size]
        if last and not mine and self._repeats:
            yield indices[end]

    @property
    def is_even(self) -> bool:
        """True if all ranks hold equally many samples in each batch."""
        return self._lengths()[1] % self._world.size == 0

    def next_weight(self) -> float:
        """Return by what the loss of this rank's next batch is multiplied: 1 but for a short batch."""
        whole, last, mine = self._lengths()
        self._done += 1
        return 1.0 if self._done <= whole or not last else mine * self._world.size / last


def share_batches(loader: object, world: World, *, repeats: bool) -> object:
    """Put a `Share` where Lightning has put a DistributedSampler, which repeats samples; return `loader`.

    A loader stays as it is if it has another batch sampler or none, or if its DistributedSampler drops samples.
    """
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler or world.size == 1:
        return loader
    sampler: Any = loader.sampler
    if type(sampler) not in (DistributedSampler, DistributedSamplerWrapper) or sampler.drop_last:
        return loader
    if (sampler.num_replicas, sampler.rank) != (world.size, world.rank):
        return loader
    draws = type(sampler) is DistributedSamplerWrapper
    samples = sampler.dataset._sampler if draws else sampler.dataset
    order = type(sampler)(samples, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed)
    batches = loader.batch_sampler
    length, drops = batches.batch_size, batches.drop_last
    batches.sampler = Share(order, world, batch_size=length, drop_last=drops, repeats=repeats, draws=draws)
    return loader


def share_of(loader: object) -> Share | None:
    """Return the Share of a loader that has one."""
    sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    return sampler if isinstance(sampler, Share) else None
