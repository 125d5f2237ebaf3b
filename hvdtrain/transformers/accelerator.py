"""accelerate's Accelerator on Horovod's ranks: what it prepares is Horovod's, and nothing is wrapped in DDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import find_batch_size, gather_object, recursively_apply

import hvdtrain.torch as hvd
from hvdtrain.distributed import streams
from hvdtrain.distributed.world import World, current
from hvdtrain.torch.ops import dtypes
from hvdtrain.torch.reduction.optimizer import DistributedMixin
from hvdtrain.torch.steps import training_state
from hvdtrain.transformers import batches


class HorovodAccelerator(Accelerator):
    """Prepares a model, its optimizer and its data for Horovod's ranks; one process has accelerate's own.

    Attributes:
        rows: while an evaluation reads batches, this rank's number of samples in the current one; else None.
        is_alone: True while a loss is computed, which then is that of one process.
    """

    rows: int | None = None
    is_alone = False

    @property
    def world(self) -> World:
        """Horovod's ranks."""
        return current()

    @property
    def num_processes(self) -> int:
        """Number of ranks; 1 within `alone`."""
        return 1 if self.is_alone else int(super().num_processes)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it, `num_processes` is 1: what multiplies a loss by it leaves the loss as in one process."""
        self.is_alone = True
        try:
            yield
        finally:
            self.is_alone = False

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Return the model with rank 0's weights, in mixed precision if so configured."""
        if self.world.size == 1:
            return super().prepare_model(model, device_placement, evaluation_mode)
        dtypes.check(model)
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        if not evaluation_mode:  # dropout draws other numbers on each rank; rank 0's are those of one process
            streams.separate(training_state.random_states(), training_state.reseed, world=self.world)
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Return the optimizer, which averages gradients over ranks."""
        if self.world.size > 1 and not isinstance(unwrapped(optimizer), DistributedMixin):
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=self._names(optimizer))
            # Checkpointed layers may add to a gradient several times in a pass.
            optimizer._hvd_reducer.count_again()  # type: ignore[attr-defined]
        return super().prepare_optimizer(optimizer, device_placement)

    def _names(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return the parameters of the prepared models with their names; None if the optimizer has others."""
        for model in self._models:
            named = list(model.named_parameters())
            known = {parameter for _, parameter in named}
            if all(parameter in known for group in optimizer.param_groups for parameter in group["params"]):
                return named
        return None

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Return the DataLoader with this rank's batches, which it puts on the device."""
        if self.world.size == 1 or getattr(data_loader, "_is_accelerate_prepared", False):
            return super().prepare_data_loader(data_loader, device_placement, slice_fn_for_dispatch)
        seed = self.dataloader_config.data_seed
        seed = torch.random.initial_seed() if seed is None else seed
        prepared = prepare_data_loader(
            batches.share_out(data_loader, self.world, seed),
            self.device,
            num_processes=1,  # it is shared out already
            process_index=0,
            put_on_device=self.device_placement if device_placement is None else device_placement,
            rng_types=[],
            dispatch_batches=False,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
            non_blocking=self.non_blocking,
        )
        prepared._is_accelerate_prepared = True
        self._dataloaders.append(prepared)
        return prepared

    @property
    def is_at_filler(self) -> bool:
        """True if the batch that was read last stands for none: this rank has no samples in the epoch's last step."""
        loader = self.gradient_state.active_dataloader
        found = batches.find(loader)
        return found is not None and found.is_absent and bool(loader.end_of_dataloader)

    @contextmanager
    def evaluating(self, loader: Any) -> Iterator[Any]:
        """Yield the batches of `loader`; within it, `gather` leaves out what is no sample of this rank."""
        try:
            yield _CountedRows(loader, self)
        finally:
            self.rows = None

    def gather(self, tensor: Any) -> Any:
        """Return all ranks' tensors, in the order of the samples while an evaluation reads batches."""
        if self.rows is None:
            return super().gather(tensor)
        return recursively_apply(self._gather_rows, tensor, self.rows, error_on_other_type=True)

    def _gather_rows(self, tensor: torch.Tensor, count: int | None) -> torch.Tensor:
        rows = tensor[None] if tensor.ndim == 0 else tensor
        return hvd.allgather(rows[:count].contiguous())

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return all ranks' samples, each once."""
        rows = self.rows
        if rows is None:  # in a loop of the user's own, which takes what one process would cut off
            if batches.find(self.gradient_state.active_dataloader) is None:
                return super().gather_for_metrics(input_data, use_gather_object)
            rows = 0 if self.is_at_filler else None
        if use_gather_object and isinstance(input_data, list):  # of one object for each sample
            return gather_object(input_data[:rows])
        return recursively_apply(self._gather_rows, input_data, rows, error_on_other_type=True)


class _CountedRows:
    """A DataLoader that says how many samples the current batch has, as `HorovodAccelerator.rows`."""

    def __init__(self, loader: Any, accelerator: HorovodAccelerator) -> None:
        self._loader, self._accelerator = loader, accelerator

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._accelerator.rows = 0 if self._accelerator.is_at_filler else find_batch_size(batch)
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer that accelerate has wrapped."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
