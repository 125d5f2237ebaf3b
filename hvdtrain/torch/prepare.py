"""Custom loops in PyTorch: prepare model, optimizer and DataLoaders for this rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

import hvdtrain.torch as hvd
from hvdtrain.data.reading import as_source
from hvdtrain.data.trees import tree_map
from hvdtrain.data.workers import warn_of_stale_epochs
from hvdtrain.distributed import streams
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.world import World
from hvdtrain.torch.data.short_batches import ShortBatches
from hvdtrain.torch.ops import device_copies, dtypes, names
from hvdtrain.torch.ops.average_buffers import average_buffers
from hvdtrain.torch.ops.sync_batch_norm import convert_torchs
from hvdtrain.torch.sources import LoaderSource
from hvdtrain.torch.steps import meta_device, training_state
from hvdtrain.torch.steps.arguments import check_parameters
from hvdtrain.torch.steps.closure import needs_closure
from hvdtrain.torch.steps.losses import as_tensor

log = logging.getLogger("hvdtrain")


def prepare(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[Any, ...],
    *,
    batch_size: int,
    rank_streams: bool,
    world: World,
) -> tuple[Any, ...]:
    """See `hvdtrain.prepare`."""
    check_parameters(model, optimizer)
    if needs_closure(optimizer):
        raise ValueError(
            "prepare weighs the gradients of short batches, but not the loss that a closure returns. Use "
            f"hvdtrain.Trainer, which weighs both. Received: {type(optimizer).__name__}"
        )
    if world.size > 1:
        dtypes.check(model)
        if (converted := convert_torchs(model)) and world.is_root:
            log.info("%s", converted)
    device = torch.device(world.device)
    meta_device.place(model, [optimizer], device, world)
    loaders = [_prepare_loader(each, model, world) for each in data]
    # Also on one rank, which reduces nothing: a loop that clips calls `synchronize` there, too.
    named = model.named_parameters()
    distributed = hvd.DistributedOptimizer(optimizer, named_parameters=named, process_set=world.data_set)
    if world.size > 1:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(distributed, root_rank=0)
        if rank_streams:
            streams.separate(training_state.random_states(), training_state.reseed, world=world)
    return (model, distributed, *loaders)


def _prepare_loader(loader: Any, model: torch.nn.Module, world: World) -> PreparedLoader:
    if not isinstance(loader, DataLoader):
        raise TypeError(f"data must be torch DataLoaders. Received: {type(loader).__name__} on rank {world.rank}")
    source = as_source(loader, batch_size=loader.batch_size or 1, world=world, seed=world.seed or 0)
    if not isinstance(source, LoaderSource):
        raise TypeError(
            "prepare needs a DataLoader over a map-style dataset with a batch_size. Received: an iterable dataset or a "
            f"batch_sampler on rank {world.rank}. Use hvdtrain.Trainer, which accepts such data."
        )
    if world.is_root:
        warn_of_stale_epochs(loader)
    return PreparedLoader(loader, source, model, world)


class PreparedLoader:
    """Yields this rank's batches on its device, the same number on every rank; each iteration is a new epoch.

    During a short batch, the model's gradients are scaled so that their mean over ranks equals one process's mean over
    all samples; a loop that computes them in another order gets an error (`ShortBatches`). After a pass in which the
    model trains, ranks average its running statistics. `count` is the number of this rank's samples in the current
    batch. It is 0 for a filler, which has no weight in the gradient and must not count in metrics.
    """

    def __init__(self, loader: DataLoader[Any], source: LoaderSource, model: torch.nn.Module, world: World) -> None:
        self._loader, self._source, self._model, self._world = loader, source, model, world
        self._device = next(model.parameters()).device
        self._copies = device_copies.of(self._device)
        self._epoch = self.count = 0

    def __len__(self) -> int:
        return self._source.steps or 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which determines its order; for example after a resume."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        size = DataRanks(self._world).size
        weights = ShortBatches.of(self._model, self._world.rank) if size > 1 else None  # one process has no weights
        if weights is not None:
            weights.restart(id(self))
        for index, batch in enumerate(self._source.epoch(epoch, shuffle=True), start=1):
            self.count = count = batch.local_count
            item, held = batch.item, batch.global_count
            if item is None:  # this rank has no samples in the epoch; it takes the first sample
                item = self._loader.collate_fn([self._loader.dataset[0]])
            if weights is not None:  # the last batch alone can be short: on all ranks, though some may hold as many
                is_short = held < size * (self._loader.batch_size or 1)
                how = {"is_short": is_short, "is_before": index == len(self) - 1}
                weights.begin(id(self), count * size / held, **how)
            placed, is_left = tree_map(lambda value: as_tensor(value, self._device, None, self._copies), item), True
            try:
                yield placed
                is_left = False
            finally:  # also if the loop ends early
                if weights is not None:
                    weights.end(id(self), placed, is_left=is_left)
                del placed
        if size > 1 and self._model.training:  # equal also in evaluation, and in the file that rank 0 writes
            average_buffers(list(names.buffers(self._model)), self._world)
