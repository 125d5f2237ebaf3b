"""The strategy for Lightning's Trainer."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

import hvdtrain.torch as hvd
from hvdtrain.lightning import gradients
from hvdtrain.lightning.host import _MockOptimizer, require
from hvdtrain.lightning.metrics import ComputeTogether, EpochValues, connect_metrics, counting_nothing
from hvdtrain.lightning.ranks import OnRanks
from hvdtrain.lightning.shares import share_batches, share_of
from hvdtrain.torch.ops import names
from hvdtrain.torch.ops.average_buffers import average_buffers
from hvdtrain.torch.ops.sync_batch_norm import convert_torchs
from hvdtrain.torch.reduction.loss_weights import without_weight


class HorovodStrategy(OnRanks, ParallelStrategy):
    """Average gradients over Horovod's ranks: `Trainer(strategy=HorovodStrategy())`, or strategy="horovod".

    N ranks with batch B train the weights of one process with batch N x B, if the loss is a mean over the batch. The
    launcher decides how many ranks there are; without one, the script is one process. Every rank makes the Trainer.

    Args:
        compression: how gradients travel: `hvdtrain.torch.Compression.fp16`, or a name that
            `hvdtrain.Trainer(compression=...)` takes, such as "fp16" or "powersgd:4".
        groups: number of groups to send gradients in, or a list of lists of parameters.
        accelerator: as in Lightning's strategies.
        checkpoint_io: as in Lightning's strategies.
        precision_plugin: as in Lightning's strategies.

    Raises:
        RuntimeError: torch.distributed is initialized.
        ValueError: by the Trainer: devices= or num_nodes= contradict the launcher.
    """

    optimizers: list[Any]

    def __init__(
        self,
        *,
        compression: Any = hvd.Compression.none,
        groups: Any = None,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
    ) -> None:
        super().__init__(accelerator, checkpoint_io, precision_plugin, compression=compression, groups=groups)
        self._weight = 1.0  # of this rank's batch, in the mean over ranks
        self._first_batch: int | None = None  # not 0 if a run resumes within an epoch, whose data then begin again
        self._is_local = False  # backward passes are added up on this rank
        self._norms: list[Any] = []  # layers that normalize over all ranks
        self._classes: dict[nn.Module, type[nn.Module]] = {}  # of layers that sync_batchnorm=True has converted

    # Before training

    def setup(self, trainer: Any) -> None:
        """Prepare model and optimizers, and collect what is logged over all ranks."""
        self._refuse_clocks(trainer)
        self._first_batch = None
        epoch_loop = trainer.fit_loop.epoch_loop
        for loop in (epoch_loop, epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            require(loop, "_results")
            loop._results.__class__ = EpochValues
        require(trainer.fit_loop, "_combined_loader")
        require(self, "_layer_sync")
        if not any(isinstance(each, ComputeTogether) for each in trainer.callbacks):
            trainer.callbacks.insert(0, ComputeTogether())
        # Lightning says that samples are repeated, which `Share` does not do.
        warnings.filterwarnings("ignore", message="Using `DistributedSampler` with the dataloaders")
        super().setup(trainer)

    def _refuse_clocks(self, trainer: Any) -> None:
        """Raise ValueError where ranks would decide by their own clocks."""
        if self._world.size > 1 and getattr(trainer, "_val_check_time_interval", None) is not None:
            raise ValueError(
                "val_check_interval as a time lets ranks validate at different batches, and they wait. Give a "
                f"number of batches, or a part of an epoch. Received on rank {self._world.rank}"
            )

    def model_to_device(self) -> None:
        """Move the model to this rank's device."""
        self.model.to(self.root_device)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        """Make the model equal on all ranks."""
        if self._world.size > 1:
            convert_torchs(model)
            before = {each: type(each) for each in model.modules()}
            if isinstance(self._layer_sync, TorchSyncBatchNorm):
                hvd.convert_sync_batchnorm(model)
            elif self._layer_sync is not None:
                model = self._layer_sync.apply(model)
            self._norms = [each for each in model.modules() if isinstance(each, hvd.SyncBatchNorm)]
            self._classes = {each: before[each] for each in self._norms if before.get(each) not in (None, type(each))}
        gradients.broadcast_weights(model)
        connect_metrics(model)
        return model

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers, and let their gradients be averaged."""
        super().setup_optimizers(trainer)
        named, made = list(names.parameters(self.lightning_module)), {}
        self._distributed = []
        for each in self.optimizers:
            if isinstance(each, _MockOptimizer):
                continue
            made[id(each)] = gradients.distribute(each, named, self._distributed, self._options)
            self._distributed.append(made[id(each)])
        self.optimizers = [made.get(id(each), each) for each in self.optimizers]
        self._refuse_own_steps()
        for config in self.lr_scheduler_configs:  # LearningRateMonitor finds a schedule's optimizer among these
            config.scheduler.optimizer = made.get(id(config.scheduler.optimizer), config.scheduler.optimizer)

    def _refuse_own_steps(self) -> None:
        """Raise ValueError for a schedule that reads values of single steps, which differ between ranks."""
        for config in self.lr_scheduler_configs:
            if self._world.size > 1 and config.reduce_on_plateau and config.interval == "step":
                raise ValueError(
                    f"ReduceLROnPlateau in each step would read this rank's {config.monitor!r}, and ranks would train "
                    f"at different rates. Received: interval='step' on rank {self._world.rank}. Use interval='epoch'."
                )

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load the optimizers' states; all ranks then have rank 0's."""
        super().load_optimizer_state_dict(checkpoint)
        for each in self._distributed:
            hvd.broadcast_optimizer_state(each, root_rank=0)

    def process_dataloader(self, dataloader: object) -> object:
        """Let each rank take its share of each batch, so that no sample is repeated."""
        return share_batches(dataloader, self._world, repeats=self.lightning_module.trainer.training)

    # A step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Find out how much this rank's batch counts."""
        trainer = self.lightning_module.trainer
        loaders = trainer.fit_loop._combined_loader.flattened
        shares = [share for share in map(share_of, loaders) if share is not None]
        reads_itself = "dataloader_iter" in inspect.signature(self.lightning_module.training_step).parameters
        if (len(loaders) > 1 or reads_itself) and not all(share.is_even for share in shares):
            raise ValueError(
                "With several training DataLoaders, or where training_step takes dataloader_iter, nothing says which "
                f"batch a loss is of, and so how much it counts. Received: {len(loaders)} DataLoader(s) whose samples "
                f"{self._world.size} ranks cannot share evenly, on rank {self._world.rank}. Give each drop_last=True."
            )
        if batch_idx == 0 or self._first_batch is None:
            self._first_batch = batch_idx
        is_single = len(loaders) == len(shares) == 1
        self._weight = shares[0].weight(batch_idx - self._first_batch) if is_single else 1.0
        trainer.fit_loop.epoch_loop._results.weight = self._weight
        for each in self._norms:  # the loss is multiplied before backward, so their gradients have the weight already
            each.batch_weight = float(self._weight != 0)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take the user's step; metrics do not count a batch that only repeats another rank's sample."""
        with counting_nothing(self.lightning_module) if self._weight == 0 else nullcontext():
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Compute gradients, and average them over ranks before a hook or a clipping sees them."""
        module, precision = self.lightning_module, self.precision_plugin
        counts = self._weight != 0
        loss: Tensor = closure_loss if self._weight in (0.0, 1.0) else closure_loss * self._weight
        self.pre_backward(loss)
        loss = precision.pre_backward(loss, module)
        with nullcontext() if counts else without_weight(module):
            precision.backward(loss, module, optimizer, *args, **kwargs)
        if not self._is_local:
            gradients.average(self._distributed)
        loss = precision.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Take a step; all ranks have the same gradients."""
        closure = gradients.checked(closure, optimizer, self._distributed, weight=self._weight)
        with gradients.averaged_already(self._distributed):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within it, backward passes add to this rank's gradients only."""
        self._is_local = True
        try:
            with gradients.kept_local(self._distributed):
                yield
        finally:
            self._is_local = False

    # Buffers such as BatchNorm's statistics, which each rank computes from its own batches

    def _average_buffers(self) -> None:
        module = self.lightning_module
        if self._world.size > 1 and module.trainer.state.fn == TrainerFn.FITTING:
            average_buffers(list(names.buffers(module)), self._world)

    def on_validation_start(self) -> None:
        """Make buffers equal on all ranks."""
        self._average_buffers()

    def on_train_end(self) -> None:
        """Make buffers equal on all ranks."""
        self._average_buffers()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a file on rank 0. Every rank calls it: buffers, which `checkpoint` has, are made equal before."""
        self._average_buffers()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def teardown(self) -> None:
        """Leave the model as it was; no collective, because an error may have ended this rank alone."""
        gradients.release(self._distributed)
        for each, kind in self._classes.items():
            each.__class__ = kind
        self._norms, self._classes = [], {}
        super().teardown()
