"""The strategy for Lightning Fabric."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.fabric.strategies import ParallelStrategy
from torch import Tensor, nn

import hvdtrain.torch as hvd
from hvdtrain.lightning import gradients
from hvdtrain.lightning.host import _BackwardSyncControl, _InfiniteBarrier, fabric, require
from hvdtrain.lightning.metrics import connect_metrics
from hvdtrain.lightning.ranks import OnRanks
from hvdtrain.lightning.shares import warn_of_repeats
from hvdtrain.torch.ops import names
from hvdtrain.torch.ops.average_buffers import average_buffers
from hvdtrain.torch.ops.sync_batch_norm import convert_torchs


class HorovodFabricStrategy(OnRanks, ParallelStrategy):
    """Average gradients over Horovod's ranks: `Fabric(strategy=HorovodFabricStrategy())`, or strategy="horovod".

    See `HorovodStrategy` for arguments and errors. `fabric.setup_dataloaders` shards as for DDP: samples are repeated
    until all ranks hold equally many.
    """

    def __init__(
        self,
        *,
        compression: Any = hvd.Compression.none,
        groups: Any = None,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision, compression=compression, groups=groups)
        self._modules: list[nn.Module] = []
        self._local: list[Any] = []  # optimizers whose gradients are added up on this rank
        require(self, "_backward_sync_control")
        self._backward_sync_control = _KeepLocal(self)

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module to this rank's device."""
        module.to(self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Make a module equal on all ranks."""
        if self._world.size > 1:
            convert_torchs(module)
        gradients.broadcast_weights(module)
        connect_metrics(module)
        self._modules.append(module)
        return module

    def process_dataloader(self, dataloader: Any) -> Any:
        """Say of a DataLoader where samples count twice; return it."""
        warn_of_repeats(dataloader, self._world)
        return dataloader

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Let an optimizer's gradients be averaged; its modules were set up before."""
        named = [
            (f"{number}.{name}" if number else name, parameter)
            for number, module in enumerate(self._modules)
            for name, parameter in names.parameters(module)
        ]
        distributed = gradients.distribute(optimizer, named, self._distributed, self._options)
        self._distributed.append(distributed)
        return distributed

    @contextmanager
    def kept_local(self, module: nn.Module) -> Iterator[None]:
        """Within it, backward passes add to this rank's gradients of `module` only."""
        own = {id(parameter) for parameter in module.parameters()}
        chosen = [each for each in self._distributed if any(id(p) in own for p in names.parameters_of(each))]
        before, self._local = self._local, self._local + chosen
        try:
            with gradients.kept_local(chosen):
                yield
        finally:
            self._local = before

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Compute gradients, and average them over ranks."""
        super().backward(tensor, module, *args, **kwargs)
        gradients.average([each for each in self._distributed if each not in self._local])

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Take a step; all ranks have the same gradients."""
        if kwargs.get("closure") is not None:
            kwargs["closure"] = gradients.checked(kwargs["closure"], optimizer, self._distributed)
        with gradients.averaged_already(self._distributed):
            return super().optimizer_step(optimizer, **kwargs)

    def save_checkpoint(self, path: Any, state: Any, *args: Any, **kwargs: Any) -> None:
        """Write a file on rank 0. Every rank calls it: running statistics are made equal before."""
        if self._world.size > 1:
            for module in self._modules:
                average_buffers(list(names.buffers(module)), self._world)
        super().save_checkpoint(path, state, *args, **kwargs)

    def teardown(self) -> None:
        """Let backward send nothing any more; no collective."""
        gradients.release(self._distributed)
        self._modules, self._distributed = [], []
        super().teardown()


class _KeepLocal(_BackwardSyncControl):
    """`fabric.no_backward_sync(module)`."""

    def __init__(self, strategy: HorovodFabricStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Return a context in which backward passes add to this rank's gradients of `module` only."""
        return self._strategy.kept_local(module) if enabled else nullcontext()


class _Barrier(_InfiniteBarrier):
    """The barrier of `fabric.rank_zero_first()`: Lightning's own waits for torch.distributed's ranks alone."""

    def __enter__(self) -> Any:
        super().__enter__()
        if self.group is None and hvd.is_initialized():
            self.barrier = hvd.barrier
        return self


fabric._InfiniteBarrier = _Barrier
