"""Check a torch model, its optimizers, loss and step for what the Trainer cannot train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hvdtrain.adapter import Need, Options, Refusal, shard_refusals
from hvdtrain.distributed.world import World
from hvdtrain.torch.ops import divided, dtypes, lazy
from hvdtrain.torch.ops.compression import resolve
from hvdtrain.torch.ops.sync_batch_norm import SyncBatchNorm
from hvdtrain.torch.reduction.shardable import check_class
from hvdtrain.torch.steps.closure import needs_closure
from hvdtrain.torch.steps.named_steps import check_optimizers


def check(
    model: nn.Module, optimizers: dict[str, Any], loss: Any, step: Any, options: Options, *, grid: Any = None
) -> None:
    """Raise ValueError or TypeError for what the Trainer cannot train, or cannot combine."""
    if loss is not None and step is not None:
        raise ValueError(f"Give loss= or step=, not both: step computes the loss. Received: {loss=}, {step=}")
    if step is None and not callable(loss):
        wanted = "loss must be a torch loss, or a callable (outputs, targets) -> mean; or give step="
        raise TypeError(f"{wanted}, a callable (model, batch) -> hvdtrain.Loss. Received: loss={loss!r}")
    if step is not None and not callable(step):
        raise TypeError(f"step must be a callable (model, batch) -> hvdtrain.Loss. Received: step={step!r}")
    if step is None and list(optimizers) != [""]:
        raise ValueError(f"Several optimizers need step=, which yields their names. Received: {', '.join(optimizers)}")
    check_optimizers(optimizers)
    dtypes.check(model, precision=options.precision, may_be_divided=grid is not None)
    if options.micro_batch == "auto":
        _check_repeatable(model, several=list(optimizers) != [""])
    if options.needs is not None:
        options.needs.check(_refusals(model, optimizers, options, grid))
    if options.shard == "gradients":
        _check_sharded_gradients(optimizers, options)
    for optimizer in optimizers.values():
        if options.shard is not None:
            check_class(optimizer)
        if needs_closure(optimizer):
            _check_closure(optimizer, options, several=list(optimizers) != [""])
        check_parameters(model, optimizer)
        if hasattr(optimizer, "skip_synchronize"):
            raise ValueError(
                "optimizer must be the plain one: the Trainer distributes it, with its own options. Received: a "
                f"DistributedOptimizer of {type(optimizer).__name__}"
            )


def _check_sharded_gradients(optimizers: dict[str, Any], options: Options) -> None:
    """Raise ValueError for what needs whole gradients."""
    received = None
    if list(optimizers) != [""]:
        received = f"the optimizers {', '.join(optimizers)}"
    elif options.compression not in ("none", "fp16"):
        received = f"compression={options.compression!r}"
    if received is not None:
        raise ValueError(
            "shard='gradients' takes one optimizer, and compression 'none' or 'fp16': ranks send each gradient by a "
            f"reducescatter. Use shard='optimizer', which reduces whole gradients. Received: {received}"
        )


def _refusals(model: nn.Module, optimizers: dict[str, Any], options: Options, grid: Any) -> Iterator[Refusal]:
    """Yield what ranks must do together in every step."""
    if resolve(options.compression).has_memory and options.precision == "fp16":
        received = f"compression={options.compression!r} and precision='fp16'"
        reason = "its errors have the loss's scale, which a rank that is behind does not know; use precision='bf16'"
        yield Refusal(("open steps",), received, reason)
    yield from shard_refusals(options)
    if grid is not None:
        reason = (
            "a replica takes its steps in every rank at once, and between replicas ranks average weights or gradients"
        )
        yield Refusal(("host steps", "delay", "open steps"), str(grid), reason)
        if any(divided.is_averaged_over(each, "replica") for each in model.parameters()):
            reason = 'torch averages over replicas in every step; use fully_shard(layer, mesh=grid.mesh("shard"))'
            yield Refusal(("lone steps",), 'weights on grid.mesh("replica", "shard")', reason)
    unequal: tuple[Need, ...] = ("lone steps", "delay")  # steps of ranks that do not wait for each other
    each: tuple[Need, ...] = (*unequal, "open steps")
    if any(isinstance(module, SyncBatchNorm) for module in model.modules()):
        yield Refusal(unequal, "SyncBatchNorm", "its layers exchange statistics in every step; use BatchNorm")
    if list(optimizers) != [""]:
        names = f"the optimizers {', '.join(optimizers)}"
        yield Refusal(each, names, "ranks agree on the optimizer at each yield; use one optimizer")
    if lazy.first(model) is not None:
        reason = "its parameters have no shapes before the first batch; call the model once on a batch before"
        yield Refusal(each, "a lazy module", reason)
    if any(map(needs_closure, optimizers.values())):
        reason = "ranks search along one line together; use another optimizer"
        yield Refusal(each, "an optimizer that needs a closure", reason)
    if options.micro_batch == "auto":
        reason = "all ranks repeat a step when one runs out of memory; use micro_batch=N"
        yield Refusal(each, "micro_batch='auto'", reason)
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        reason = "its statistics would depend on what was cut off; use LayerNorm or GroupNorm"
        yield Refusal(("open steps",), "BatchNorm", reason)
    if options.micro_batch is not None:
        reason = "batches are cut off whole; use a smaller batch_size and accumulate"
        yield Refusal(("open steps",), f"micro_batch={options.micro_batch}", reason)


def _check_repeatable(model: nn.Module, *, several: bool) -> None:
    """Raise ValueError if a step cannot be undone and repeated on all ranks when one runs out of memory."""
    reason = None
    if several:
        reason = "With several optimizers a step cannot be repeated: those of earlier yields have taken their steps"
    elif any(isinstance(module, SyncBatchNorm) for module in model.modules()):
        reason = "With SyncBatchNorm a step cannot be repeated: other ranks wait in its layers for the rank that fails"
    if reason:
        raise ValueError(f"{reason}. Use micro_batch=N, the samples that fit. Received: micro_batch='auto'")


def check_collectives(options: Options) -> None:
    """Raise ValueError if a step calls collectives, such as `allgather`, and ranks may compute different batches."""
    reasons = {
        "cutoff": options.cutoff and "ranks contribute different batches to a step",
        "micro_batch='auto'": options.micro_batch == "auto"
        and "other ranks wait for the rank that runs out of memory; use micro_batch=N",
    }
    for received, reason in reasons.items():
        if reason:
            raise ValueError(f"Collectives in a step need all ranks. Received: {received}: {reason}.")


def _check_closure(optimizer: torch.optim.Optimizer, options: Options, *, several: bool) -> None:
    """Raise ValueError for what cannot be combined with an optimizer that evaluates a step several times."""
    reasons = {
        "several optimizers": several and "step yields each loss once",
        f"clip_norm={options.clip_norm}": options.clip_norm
        and "a clipped gradient is not the loss's, which it searches",
        f"nan_policy={options.nan_policy!r}": options.nan_policy and "weights move between the gradients of one step",
        "micro_batch='auto'": options.micro_batch == "auto" and "it has changed weights when memory runs out",
        "precision='fp16'": options.precision == "fp16" and "torch's loss scaling takes no closure",
        f"compression={options.compression!r}": resolve(options.compression).has_memory
        and "an error that is added to the gradient is not the loss's, which it searches",
    }
    for received, reason in reasons.items():
        if reason:
            raise ValueError(
                f"{type(optimizer).__name__} computes loss and gradient several times in one step: {reason}. Use "
                f"another optimizer, or leave the option out. Received: {received}"
            )


def check_grid(model: nn.Module, optimizers: dict[str, Any], options: Options, world: World, *, has_step: bool) -> None:
    """Raise ValueError for what the Trainer cannot train where a Grid divides the model."""
    grid = world.grid
    if grid is None:
        return
    is_stage = getattr(model, "grid", None) is grid
    if grid.stages > 1 and not is_stage:
        raise ValueError(
            f"With {grid} the model is a stage: Trainer(grid.pipeline(model, micro_batches=...), ...). Received: "
            f"{type(model).__name__} on rank {world.rank}"
        )
    if (grid.shards > 1 or grid.tensors > 1) and not any(map(divided.is_divided, model.parameters())):
        raise ValueError(
            f"With {grid} the model is divided before the Trainer is made, by torch: fully_shard(model, "
            'mesh=grid.mesh("shard")), or parallelize_module(model, grid.mesh("tensor"), plan). Received: '
            f"{type(model).__name__}, whose parameters are whole, on rank {world.rank}"
        )
    has_norm = any(isinstance(module, SyncBatchNorm) for module in model.modules())
    reasons = {
        "BatchNorm": grid.stages > 1
        and grid.shards > 1
        and any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
        and "its statistics would count the rows that fill up the micro-batches of a shard group's ranks: use "
        "LayerNorm or GroupNorm",
        "a stage whose layers alone are sharded": grid.stages > 1
        and grid.shards > 1
        and not hasattr(model, "reshard")
        and 'divide the stage itself too, after its layers: fully_shard(stage, mesh=grid.mesh("shard"))',
        "weights that are trained and not divided over the shards": any(map(grid.is_left_out, model.parameters()))
        and 'divide the model itself too, after its layers: fully_shard(model, mesh=grid.mesh("shard"))',
        "several optimizers": list(optimizers) != [""] and "give one over this rank's parameters",
        "an optimizer that needs a closure": any(map(needs_closure, optimizers.values()))
        and "it would search along a line of its own on each part: use another optimizer, such as AdamW",
        "step=": grid.stages > 1 and has_step and "stages compute layer by layer: give loss=",
        f"micro_batch={options.micro_batch!r}": options.micro_batch is not None
        and "set the pipeline's micro_batches, or a smaller batch_size and accumulate",
        f"shard={options.shard!r}": options.shard is not None
        and "use Grid(shard=...) with torch's fully_shard, which divides the optimizer's state too",
        f"compression={options.compression!r}": options.compression != "none"
        and any(map(divided.is_divided, model.parameters()))
        and "parts of divided weights are averaged as they are",
        "precision='fp16'": options.precision == "fp16"
        and len(set(map(divided.is_divided, model.parameters()))) > 1
        and "torch's loss scaling takes weights that are all divided, or all whole: use precision='bf16'",
        "cutoff": options.cutoff and "stages wait for each other in every step",
        "SyncBatchNorm": has_norm
        and (grid.stages > 1 or grid.tensors > 1)
        and "a replica that has fewer samples may leave out a micro-batch, in which others wait for it: use BatchNorm",
        "weights without values": any(each.is_meta for each in model.parameters())
        and "give this rank's part values: stage.to_empty(device=\"cpu\"), then its layers' reset_parameters()",
        "a lazy module": lazy.first(model) is not None and "call the model once on a batch before it is divided",
    }
    for received, reason in reasons.items():
        if reason:
            raise ValueError(f"With {grid}: {reason}. Received: {received} on rank {world.rank}")


def check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError unless the optimizer is over parameters of this model that can be trained."""
    own = set(model.parameters())
    is_stage = (
        getattr(getattr(model, "grid", None), "stages", 1) > 1
    )  # all of it may be frozen, if another stage is not
    if not is_stage and not any(parameter.requires_grad for parameter in own):
        raise ValueError(
            f"model has no trainable parameters. Received: {type(model).__name__} with {len(own)} parameters, "
            "none with requires_grad"
        )
    for index, group in enumerate(optimizer.param_groups):
        foreign = [tuple(p.shape) for p in group["params"] if p not in own]
        if foreign:
            raise ValueError(
                f"optimizer must be made from this model's own parameters(). Received: parameter group {index} with "
                f"{len(foreign)} others, the first of shape {foreign[0]}"
            )
