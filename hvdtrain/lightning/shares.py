"""Each rank's share of the batches of a DataLoader: every sample once, in the batches of one process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

import hvdtrain.torch as hvd
from hvdtrain.distributed.world import World
from hvdtrain.lightning.host import DistributedSamplerWrapper, require

log = logging.getLogger("hvdtrain")


class Share(Sampler[int]):
    """This rank's sample indices. Batch k of all ranks together is batch k of one process, of `size` times the length.

    The last batch may be short. Then ranks hold unequal parts of it, and `weight` says how much each counts. If it has
    fewer samples than there are ranks, a rank without one repeats another's sample, with weight 0, in training; in
    evaluation it reads one batch less than its length says, so that a part of all batches is the same on all ranks.

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
        return whole * self._batch_size + (max(mine, 1) if last else 0)

    def __iter__(self) -> Iterator[int]:
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

    def weight(self, place: int) -> float:
        """Return by what the loss of this rank's batch `place` of an epoch is multiplied: 1 but for a short one."""
        whole, last, mine = self._lengths()
        return 1.0 if place < whole or not last else mine * self._world.size / last


def share_batches(loader: object, world: World, *, repeats: bool) -> object:
    """Put a `Share` where Lightning has put a DistributedSampler, which repeats samples; return `loader`.

    With a batch sampler of another class, ranks share samples and not batches. A loader without a DistributedSampler
    for these ranks stays as it is.
    """
    batches: Any = getattr(loader, "batch_sampler", None)
    sampler: Any = getattr(batches, "sampler", None)
    is_plain = type(batches) is BatchSampler
    is_lightnings = type(sampler) in (DistributedSampler, DistributedSamplerWrapper) and not sampler.drop_last
    can_share = is_lightnings and (sampler.num_replicas, sampler.rank) == (world.size, world.rank)
    if not can_share or (repeats and not is_plain):
        warn_of_repeats(loader, world)
    if world.size == 1 or not can_share:
        return loader
    if draws := type(sampler) is DistributedSamplerWrapper:
        require(sampler.dataset, "_sampler")
    samples = sampler.dataset._sampler if draws else sampler.dataset
    order = type(sampler)(samples, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed)
    length, drops = (batches.batch_size, batches.drop_last) if is_plain else (1, False)
    batches.sampler = Share(order, world, batch_size=length, drop_last=drops, repeats=repeats, draws=draws)
    return loader


def share_of(loader: object) -> Share | None:
    """Return the Share of a loader whose batches are those of one process."""
    batches = getattr(loader, "batch_sampler", None)
    return batches.sampler if type(batches) is BatchSampler and isinstance(batches.sampler, Share) else None


def warn_of_repeats(loader: object, world: World) -> None:
    """Log on rank 0 if ranks do not get each sample of a DataLoader once."""
    if world.size == 1 or not world.is_root or not isinstance(loader, DataLoader):
        return
    if isinstance(loader.dataset, IterableDataset):
        log.warning(
            "Ranks do not share an IterableDataset: each takes all that it yields, and counts the same. Let it yield "
            "another part on each rank, of the same length. Received: %s",
            type(loader.dataset).__name__,
        )
        return
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    repeats = isinstance(sampler, DistributedSampler) and not sampler.drop_last
    if repeats and (repeated := sampler.total_size - len(sampler.dataset)):
        log.warning(
            "A DistributedSampler repeats %d sample(s) in each epoch, until all ranks have equally many. Losses and "
            "metrics count these twice.",
            repeated,
        )
