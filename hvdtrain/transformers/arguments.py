"""TrainingArguments that know Horovod's ranks, and the arguments that several ranks refuse."""

from __future__ import annotations

import copyreg
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from hvdtrain.distributed import launch_environment
from hvdtrain.distributed.world import World, init, refuse_grid
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.grid import groups

log = logging.getLogger("hvdtrain")


def join() -> World:
    """Join the ranks that the launcher started, and tell torch.distributed and accelerate; return the World.

    `TrainingArguments` of this module call it. One process changes nothing.
    """
    world = init("torch")
    if world.size > 1:
        if launch_environment.is_elastic():
            raise HvdTrainError(
                "hvdtrain.transformers does not train in elastic jobs: transformers cannot change its number of ranks. "
                "Start the job with a fixed -np, or use hvdtrain.Trainer."
            )
        refuse_grid("hvdtrain.transformers", "Use hvdtrain.Trainer, or a custom loop")
        if not (dist.is_initialized() and dist.get_backend() == groups.BACKEND):
            groups.start()  # for what transformers and accelerate gather; gradients go by hvd.DistributedOptimizer
        _describe(world)
    return world


def _describe(world: World) -> None:
    """Put the ranks where accelerate looks for them, in place of what it finds in the environment."""
    device = torch.device(world.device)
    kind = DistributedType.MULTI_CPU if device.type == "cpu" else DistributedType.MULTI_GPU
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._shared_state.update(
        _cpu=device.type == "cpu",
        backend=None,  # with a name, accelerate gathers by a function that torch 2.13 deprecates
        debug=False,
        device=device,
        distributed_type=kind,
        fork_launched=False,
        num_processes=world.size,
        process_index=world.rank,
        local_process_index=world.local_rank,
    )


class ArgumentsOnRanks:
    """Put before a class of TrainingArguments: its world_size, process_index and device are Horovod's."""

    @cached_property
    def _setup_devices(self) -> torch.device:
        if join().size == 1:
            found: torch.device = super()._setup_devices  # type: ignore[misc]
            return found
        self.distributed_state = PartialState()
        device: torch.device = self.distributed_state.device
        self._n_gpu = int(device.type != "cpu")
        return device

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The training_args.bin of a checkpoint must not need hvdtrain to be read.
        return copyreg._reconstructor, (_plain(type(self)), object, None), dict(self.__dict__)  # type: ignore[attr-defined]


def _plain(cls: type) -> type:
    """Return the first class of transformers, or of a user, that an arguments class of ours extends."""
    return next(base for base in cls.__mro__ if not issubclass(base, ArgumentsOnRanks))


@dataclass
class TrainingArguments(ArgumentsOnRanks, transformers.TrainingArguments):
    """`transformers.TrainingArguments` on Horovod's ranks; joins them."""


@dataclass
class Seq2SeqTrainingArguments(ArgumentsOnRanks, transformers.Seq2SeqTrainingArguments):
    """`transformers.Seq2SeqTrainingArguments` on Horovod's ranks; joins them."""


def check(args: Any, world: World) -> None:
    """Raise ValueError for arguments with which several ranks would not train as one process does."""
    if world.size == 1:
        return
    if args.world_size != world.size or args.process_index != world.rank:
        raise ValueError(
            f"The arguments were made for {args.world_size} process(es), and Horovod runs {world.size} ranks: "
            "each would train alone. Use hvdtrain.transformers.TrainingArguments, or put "
            "hvdtrain.transformers.ArgumentsOnRanks before your class of arguments. "
            f"Received: {type(args).__name__} on rank {world.rank}"
        )
    for what, why in _refused(args, world):
        raise _no(what, why, world)
    unused = [name for name in _DDP if getattr(args, name, None) is not None]
    if unused and world.is_root:
        log.info("%s: not used. Horovod sends the gradients, and DistributedDataParallel is not there.", unused)


def check_accelerator(accelerator: Any, world: World) -> None:
    """Raise ValueError for an Accelerator that brings ranks of its own, by environment variables of accelerate's."""
    if world.size > 1 and accelerator.distributed_type not in (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU):
        raise _no(f"{accelerator.distributed_type}", "Unset the variables that begin with ACCELERATE_.", world)


def _no(what: str, why: str, world: World) -> ValueError:
    return ValueError(f"On several ranks, hvdtrain.transformers takes no {what}: {why} Received on rank {world.rank}.")


_DDP = ("ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_find_unused_parameters", "ddp_static_graph")


def _refused(args: Any, world: World) -> Iterator[tuple[str, str]]:
    """Yield each argument that is refused, with the reason."""
    loading = args.accelerator_config
    if args.deepspeed or args.fsdp or getattr(args, "parallelism_config", None) is not None:
        yield "deepspeed, fsdp or parallelism_config", "each brings its own ranks. Launch it with torchrun, without us."
    if args.ddp_backend is not None:
        yield "ddp_backend", "gradients go through Horovod. Leave it out."
    if args.auto_find_batch_size:
        yield "auto_find_batch_size", "one rank would try again alone. Give per_device_train_batch_size."
    if not args.average_tokens_across_devices:
        yield "average_tokens_across_devices=False", "a rank with less text would count more. Leave it at True."
    if args.train_sampling_strategy == "batch_rebalance":
        yield 'train_sampling_strategy="batch_rebalance"', 'it gives ranks batches by itself. Use "group_by_length".'
    if loading.split_batches or loading.dispatch_batches:
        yield "split_batches or dispatch_batches", "each rank reads its own batches. Leave them out."
    if not getattr(args, "dataloader_in_order", True):
        yield "dataloader_in_order=False", "an epoch's last batch must come last. Leave it at True."
    if getattr(args, "enable_jit_checkpoint", False):
        yield "enable_jit_checkpoint", "ranks get the signal at different steps. Use save_steps."
    if "lomo" in str(args.optim).lower():
        yield "optim of LOMO", "it steps during backward, before gradients are averaged. Use another optimizer."
    if args.batch_eval_metrics and "inputs" in args.include_for_metrics:
        yield 'include_for_metrics="inputs" with batch_eval_metrics', "transformers gathers no inputs. Leave one out."
    if args.use_cpu and world.device != "cpu":
        yield "use_cpu=True beside a GPU", 'init has chosen the GPU. Set CUDA_VISIBLE_DEVICES="" instead.'
