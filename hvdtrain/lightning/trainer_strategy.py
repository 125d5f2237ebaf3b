"""The strategy for Lightning's Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.plugins import TorchSyncBatchNorm
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn

import hvdtrain.torch as hvd
from hvdtrain.lightning import gradients
from hvdtrain.lightning.metrics import ComputeTogether, EpochValues, connect_metrics
from hvdtrain.lightning.ranks import OnRanks
from hvdtrain.lightning.shares import share_batches, share_of
from hvdtrain.torch.ops import names
from hvdtrain.torch.ops.average_buffers import average_buffers
from hvdtrain.torch.ops.sync_batch_norm import convert_torchs


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
        self._is_local = False  # backward passes are added up on this rank
        self._norms: list[Any] = []  # layers that normalize over all ranks
        self._classes: dict[nn.Module, type[nn.Module]] = {}  # of layers that sync_batchnorm=True has converted

    # Before training

    def setup(self, trainer: Any) -> None:
        """Prepare model and optimizers, and collect what is logged over all ranks."""
        epoch_loop = trainer.fit_loop.epoch_loop
        for loop in (epoch_loop, epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
            loop._results.__class__ = EpochValues
        if not any(isinstance(each, ComputeTogether) for each in trainer.callbacks):
            trainer.callbacks.insert(0, ComputeTogether())
        # Lightning says that samples are repeated, which `Share` does not do.
        warnings.filterwarnings("ignore", message="Using `DistributedSampler` with the dataloaders")
        super().setup(trainer)

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
        for config in self.lr_scheduler_configs:  # LearningRateMonitor finds a schedule's optimizer among these
            config.scheduler.optimizer = made.get(id(config.scheduler.optimizer), config.scheduler.optimizer)

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
        if len(loaders) > 1 and not all(share.is_even for share in shares):
            raise ValueError(
                f"Of several training DataLoaders, the last batches are short by different numbers. Received: "
                f"{len(loaders)} DataLoaders whose samples {self._world.size} ranks cannot share evenly, on rank "
                f"{self._world.rank}. Give each drop_last=True."
            )
        weights = [share.next_weight() for share in shares]
        self._weight = weights[0] if len(loaders) == 1 and weights else 1.0
        trainer.fit_loop.epoch_loop._results.is_filler = self._weight == 0
        for each in self._norms:  # the loss is multiplied before backward, so their gradients have the weight already
            each.batch_weight = float(self._weight != 0)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Compute gradients, and average them over ranks before a hook or a clipping sees them."""
        module, precision = self.lightning_module, self.precision_plugin
        counts = self._weight != 0
        loss: Tensor = closure_loss if self._weight in (0.0, 1.0) else closure_loss * self._weight
        self.pre_backward(loss)
        loss = precision.pre_backward(loss, module)
        with nullcontext() if counts else gradients.without_weight(module):
            precision.backward(loss, module, optimizer, *args, **kwargs)
        if not self._is_local:
            gradients.average(self._distributed)
        loss = precision.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Take a step; all ranks have the same gradients."""
        closure = gradients.averaged(closure, optimizer, self._distributed, weight=self._weight)
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
