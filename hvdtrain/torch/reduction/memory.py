"""The sizes of weights, gradients, optimizer state and buckets, as tensors show them; of a script too."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from hvdtrain.telemetry import rank_memory
from hvdtrain.telemetry.memory import Held, Parts, Use
from hvdtrain.telemetry.rank_memory import Place
from hvdtrain.torch.ops import engine
from hvdtrain.torch.ops.names import parameters_of

# Numbers that torch's optimizers keep for each number of a weight, by default; these options of a group add one.
_MOMENTS = {"SGD": 0, "Adagrad": 1, "RMSprop": 1, "ASGD": 1}
_MOMENTS |= dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop"), 2)
_ADDED = ("momentum", "amsgrad", "centered")

_of_script: weakref.WeakSet[Any] = weakref.WeakSet()  # distributed optimizers; a Trainer's are not asked


def held_by(tensors: Iterable[Tensor], optimizers: Sequence[Any], compressors: Sequence[Any] = ()) -> Held:
    """Return what a rank holds where its weights lie: also gradients and state that only a step makes.

    Args:
        tensors: weights and buffers.
        optimizers: plain or distributed ones.
        compressors: others than the optimizers', which may remember something.
    """
    weights = [each for each in tensors if not is_lazy(each)]
    devices = {each.device for each in weights if each.is_cuda}
    gradients = state = buckets = missing = 0
    known: set[Tensor] = set()  # two optimizers may train the same weights
    for optimizer in optimizers:
        shards, reducer = (getattr(optimizer, name, None) for name in ("_hvd_shards", "_hvd_reducer"))
        trained = {p for p in parameters_of(optimizer) if p.requires_grad and not is_lazy(p)} - known
        known |= trained
        ranks = shards.process_set.size() if shards else 1
        made = sum(_size(v, devices) for entries in optimizer.state.values() for v in entries.values())
        coming = max(0, _expected(optimizer) // ranks - made)
        whole = sum(p.nbytes for p in trained)
        scatters = reducer is not None and reducer.scatters  # the parts have one place for all steps
        gradients += whole // ranks if scatters else whole
        state, missing = state + made + coming, missing + coming
        missing += 0 if scatters else sum(p.nbytes for p in trained if p.grad is None)
        buckets += reducer.nbytes if reducer else 0
    buckets += sum(each.memory.nbytes for each in compressors if hasattr(each, "memory"))
    parts = Parts(
        weights=sum(_size(each, devices) for each in weights), gradients=gradients, optimizer=state, buckets=buckets
    )
    return Held(parts=parts, missing=missing, device=in_use(devices))


def in_use(devices: Iterable[torch.device]) -> tuple[int, int] | None:
    """Return the bytes that torch's tensors take on GPUs now, and took at most; None without GPUs."""
    stats = [(torch.cuda.memory_allocated(each), torch.cuda.max_memory_allocated(each)) for each in devices]
    return (sum(now for now, _ in stats), sum(most for _, most in stats)) if stats else None


def measure_script(optimizer: Any) -> None:
    """Let an out-of-memory error of a script that has made its optimizer distributed say what takes the memory."""
    _of_script.add(optimizer)
    rank_memory.measure_script(_held_by_script, _use_of_script, _place)


def _held_by_script() -> Held:
    optimizers = [*_of_script]
    return held_by(dict.fromkeys(p for each in optimizers for p in each._hvd_reducer.names), optimizers)


def _use_of_script() -> Use:
    optimizers = [*_of_script]
    bound = [each._hvd_reducer.options.compression for each in optimizers]
    options = {"compression": next((each.name for each in bound if each.has_memory), "none")}
    options |= {"shard": "optimizer"} if any(each._hvd_shards is not None for each in optimizers) else {}
    return Use("torch", engine.native().size(), options, in_script=True)


def _place() -> Place:
    return Place(engine.native().rank(), engine.native().local_size())


def _size(value: Any, devices: set[torch.device]) -> int:
    """Return the bytes of a tensor on one of the GPUs, or without GPUs on the host; 0 for anything else."""
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided
    return value.nbytes if is_dense and (value.device in devices or not (devices or value.is_cuda)) else 0


def _expected(optimizer: Any) -> int:
    """Return the size of the whole state after a step, if it is a class of torch's; else 0."""
    names = [each.__name__ for each in type(optimizer).__mro__ if each.__module__.startswith("torch.")]
    if not names or names[0] not in _MOMENTS:
        return 0
    moments = [_MOMENTS[names[0]] + sum(bool(g.get(each)) for each in _ADDED) for g in optimizer.param_groups]
    trained = [[p.nbytes for p in g["params"] if p.requires_grad and not is_lazy(p)] for g in optimizer.param_groups]
    return sum(count * sum(sizes) for count, sizes in zip(moments, trained, strict=True))
