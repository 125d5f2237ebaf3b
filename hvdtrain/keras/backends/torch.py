"""Gradients of the torch backend: Horovod's asynchronous operations, eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import torch
from keras.src.backend.torch.core import get_device
from packaging.version import Version

from hvdtrain.distributed import gpu_path, watchdog
from hvdtrain.distributed.buckets import ON_GPU
from hvdtrain.distributed.recorder import recorder
from hvdtrain.keras import basics
from hvdtrain.keras.backends import (  # noqa: F401 - part of each backend
    Array,
    HostWeight,
    compiling_again,
    fused_update,
    on_update_step,
    untraced,
    wait_for_reports,
)
from hvdtrain.keras.ops import in_set
from hvdtrain.keras.reduction import GradientReduction, by_dtype, small_together
from hvdtrain.torch.reduction.memory import in_use

Tensor = torch.Tensor


class BatchWeight(HostWeight):
    """A weight that every step's Python code reads."""

    @torch.no_grad()
    def multiply(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return `gradients` times the weight; exact zeros at weight 0, whatever they held."""
        if self.value == 1.0:
            return list(gradients)
        return [g * self.value if self.value else torch.zeros_like(g) for g in gradients]


def on_host(value: Any) -> Array:
    """Return a variable's or a tensor's value as an array on the host, of its memory on CPUs."""
    tensor = getattr(value, "value", value)
    if not isinstance(tensor, Tensor) or tensor.dtype == torch.bfloat16:  # which NumPy lacks
        return np.asarray(keras.ops.convert_to_numpy(value))
    return tensor.detach().cpu().numpy()


def give(variable: Any, array: Array) -> None:
    """Assign an array, which is copied into the variable's memory, and nowhere else."""
    variable.assign(torch.from_numpy(array) if array.dtype.kind in "biufc" else array)


def memory_in_use() -> tuple[int, int] | None:
    """Return the bytes that torch takes on the GPU now, and took at most; None if Keras computes on the host."""
    device = torch.device(get_device())
    return in_use([device]) if device.type == "cuda" else None


def _refuse_compiler() -> None:
    """Raise RuntimeError where torch.compile traces, or where Keras averages gradients too."""
    if torch.compiler.is_compiling():
        raise RuntimeError("Horovod's operations do not compile under torch.compile. Compile the forward pass alone.")
    if Version(keras.__version__) < Version("3.16.0.dev0"):  # from which on Keras averages through DDP by itself
        return
    group = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
        raise RuntimeError(
            "torch.distributed is initialised, so Keras's torch trainer averages gradients with "
            "DistributedDataParallel, and Horovod would reduce them a second time. Use one of the two: do not call "
            f"torch.distributed.init_process_group. Received: {group.get_world_size()} ranks in it"
        )


@torch.no_grad()
def non_finite_flags(gradients: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Return a function that returns, for each gradient, whether something in it is not finite now."""
    # They are reduced in place. Norms and extremes are NaN if anything is.
    if all(g.is_cuda and g.numel() for g in gradients):  # by one launch; slow on CPUs
        norms = torch.stack(torch._foreach_norm(list(gradients), float("inf")))
        return lambda: norms.isfinite().logical_not().cpu()
    extremes = [torch.stack(torch.aminmax(g)).float() if g.numel() else g.new_zeros(2) for g in gradients]
    return lambda: torch.stack([e.isfinite().all().logical_not().cpu() for e in extremes])


def may_update(optimizer: Any, gradients: Sequence[Tensor]) -> bool:
    """Return whether all gradients are finite."""
    from hvdtrain.torch.ops.finite import all_finite  # not at the top: see `reduce_gradients`

    return all_finite(gradients)


def report_unless(finite: Any, function: Callable[..., None], *flags: Callable[[], Tensor]) -> None:
    """Call `function` with the values of `flags_of`, unless `finite`."""
    if not finite:
        function(*(each().numpy() for each in flags))


def run_if(finite: bool, update: Callable[[], None], skip: Callable[[], None]) -> None:
    """Run `update` if `finite`, else `skip`."""
    (update if finite else skip)()


@torch.no_grad()
def true_on_all_ranks(flag: Any, name: str, how: GradientReduction) -> Tensor:
    """Return a boolean scalar: whether `flag` holds on all ranks."""
    _refuse_compiler()
    hvd: Any = basics.running()
    flag = flag if isinstance(flag, Tensor) else torch.tensor(bool(flag), dtype=torch.bool, device="cpu")
    mine = flag.to(torch.int32).reshape(1)
    least: Tensor = hvd.allreduce(mine, name=name, op=hvd.Min, **in_set(how.process_set))
    return least.to(torch.bool).reshape(()).to(flag.device)


@recorder.waiting()
def reduce_gradients(
    gradients: Sequence[Tensor], names: Sequence[str], variables: Sequence[Any], how: GradientReduction
) -> list[Tensor]:
    """Return `gradients` reduced over ranks, those that are a variable's own `.grad` in place."""
    # A variable's own .grad may change, as it does in hvdtrain.torch; a tensor of the caller's may not.
    return start(gradients, names, variables, how, may_change=is_own)()


def is_own(gradient: Tensor, variable: Any) -> bool:
    """Return whether a gradient is the variable's own `.grad`."""
    return gradient is getattr(variable, "value", variable).grad


@torch.no_grad()
def start(
    gradients: Sequence[Tensor],
    names: Sequence[str],
    variables: Sequence[Any],
    how: GradientReduction,
    *,
    may_change: Callable[[Tensor, Any], bool],
) -> Callable[[], list[Tensor]]:
    """Start to reduce gradients over ranks, in place where they `may_change`; return a function that waits for them."""
    _refuse_compiler()
    hvd: Any = basics.running()
    if how.compression.wire == "bfloat16":
        # Not at the top: a Keras process without ranks needs nothing of it.
        from hvdtrain.torch.ops.compression import BF16Compressor
        from hvdtrain.torch.ops.submit import Reduction

        process_set = how.process_set or hvd.global_process_set
        in_all = Reduction(hvd.Sum, postscale_factor=how.sum_factor, process_set=process_set)
        return BF16Compressor().exchange(gradients, in_all, names[0]).wait
    wires = [how.compression.compress(g)[0].contiguous() for g in gradients]
    if how.compression.scheme is not None:
        compressed: Any = how.compression
        means = compressed.start(wires, names[0], how)
        return lambda: [mean.to(g.dtype) for mean, g in zip(means(), gradients, strict=True)]
    common: dict[str, Any] = {"op": how.op, **how.scales, **in_set(how.process_set)}
    groups = how.buckets(variables)
    sizes = [w.nbytes for w in wires]
    on_gpu = {"limit": ON_GPU.alone, "room": ON_GPU.bucket} if any(w.is_cuda for w in wires) else {}
    buckets = by_dtype(groups or small_together(sizes, **on_gpu), [str(w.dtype) for w in wires])
    handles = []
    for bucket in buckets:
        first, others = bucket[0], len(bucket) - 1
        if others and groups is not None:
            handle = hvd.grouped_allreduce_async([wires[i] for i in bucket], name=names[first], **common)
        elif others:
            flat = torch.cat([wires[i].reshape(-1) for i in bucket])
            handle = hvd.allreduce_async_(flat, name=f"{names[first]}.and_{others}_more", **common)
        else:
            in_place = wires[first] is not gradients[first] or may_change(wires[first], variables[first])
            send = hvd.allreduce_async_ if in_place else hvd.allreduce_async
            handle = send(wires[first], name=names[first], **common)
        handles.append(handle)

    @torch.no_grad()
    def wait() -> list[Tensor]:
        outputs: list[Tensor] = list(gradients)
        for bucket, handle in zip(buckets, handles, strict=True):
            result = hvd.synchronize(handle)
            if groups is None:
                result = result.reshape(-1).split([wires[i].numel() for i in bucket])
            elif len(bucket) == 1:
                result = [result]
            for i, part in zip(bucket, result, strict=True):
                outputs[i] = part.reshape(gradients[i].shape).to(gradients[i].dtype)
        # No host waits: see hvdtrain.torch.reduction.reducer.
        if gpu_path.is_async() and any(g.is_cuda for g in gradients):
            behind = torch.cuda.Event()
            behind.record()
            watchdog.note_device(behind.query)
        return outputs

    return wait
