"""Gradients of the torch backend: Horovod's asynchronous operations, eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch
from packaging.version import Version

from hvdtrain.distributed import tuning, wait_time, watchdog
from hvdtrain.keras import basics
from hvdtrain.keras.reduction import Reduction, small_together

Tensor = torch.Tensor


class LocalWeight:
    """A float on the host: every step runs this code anew."""

    def __init__(self) -> None:
        self._value = 1.0

    def get(self) -> float:
        """Return the weight."""
        return self._value

    def set(self, value: float) -> None:
        """Set the weight of the steps from now on."""
        self._value = value

    @torch.no_grad()
    def multiply(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return `gradients` times the weight; exact zeros at weight 0, whatever they held."""
        if self._value == 1.0:
            return list(gradients)
        if self._value == 0.0:
            return [torch.zeros_like(g) for g in gradients]
        return [g * self._value for g in gradients]

    def is_zero(self) -> bool:
        """Return whether the weight is 0."""
        return self._value == 0.0


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`: nothing is traced."""
    return function


def fused_update(optimizer: Any, step: Any, gradient: Any, variable: Any, learning_rate: Any) -> bool:
    """Return False: torch's optimizers update all variables together."""
    return False


def refuse_compiler() -> None:
    """Raise where torch.compile traces.

    Raises:
        RuntimeError: the step is being compiled by torch.compile.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "Horovod's operations do not compile under torch.compile, and this step is being compiled. "
            "Compile the model's forward pass instead of the whole step."
        )
    _refuse_ddp()


def _refuse_ddp() -> None:
    """Raise where Keras's torch trainer (from 3.16 on) averages by itself, through DistributedDataParallel.

    Raises:
        RuntimeError: torch.distributed was initialised with more than one rank.
    """
    available = torch.distributed.is_available() and torch.distributed.is_initialized()
    if available and torch.distributed.get_world_size() > 1 and _keras_uses_ddp():
        raise RuntimeError(
            "torch.distributed is initialised, so Keras's torch trainer averages gradients with "
            "DistributedDataParallel, and Horovod would reduce them a second time. Use one of the two: do not call "
            f"torch.distributed.init_process_group. Received: {torch.distributed.get_world_size()} ranks in it"
        )


def _keras_uses_ddp() -> bool:
    return Version(keras.__version__) >= Version("3.16.0.dev0")


def on_update_step(optimizer: Any, function: Callable[[list[Tensor]], list[Tensor]], gradients: list[Tensor]) -> Any:
    """Return `function(gradients)`: Keras comes here in the branch that updates weights, and in no other."""
    return function(gradients)


@torch.no_grad()
def not_finite_now(gradients: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Return what returns a flag a gradient: whether something in it is not finite.

    Looked at at once, since gradients are reduced in place. Extremes are NaN if anything is.
    """
    if all(g.is_cuda and g.numel() for g in gradients):
        norms = _largest(gradients)
        return lambda: norms.isfinite().logical_not().cpu()
    extremes = [torch.stack(torch.aminmax(g)).float() if g.numel() else torch.zeros(2) for g in gradients]
    return lambda: torch.stack([e.isfinite().all().logical_not().cpu() for e in extremes])


def _largest(gradients: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value of each, NaN if there is one: a launch for many on GPUs, slow on CPUs."""
    return torch.stack(torch._foreach_norm(list(gradients), float("inf")))


@torch.no_grad()
def may_update(optimizer: Any, gradients: Sequence[Tensor]) -> bool:
    """Return whether all gradients are finite.

    A sum over a tensor holds whatever in it is not finite, and costs less than looking at each element. Where it
    overflowed without that, each element is looked at.
    """
    if all(g.is_cuda and g.numel() for g in gradients):
        return bool(_largest(gradients).isfinite().all())
    sums = torch.stack([g.sum(dtype=torch.float32) for g in gradients])
    return bool(sums.isfinite().all()) or all(bool(g.isfinite().all()) for g in gradients)


def tell_unless(finite: Any, function: Callable[..., None], *flags: Callable[[], Tensor]) -> None:
    """Call `function` with the values of `flags`, unless `finite`."""
    if not finite:
        function(*(each().numpy() for each in flags))


def take_if(finite: bool, take: Callable[[], None], leave: Callable[[], None]) -> None:
    """Run `take` if `finite`, else `leave`."""
    (take if finite else leave)()


def wait_until_told() -> None:
    """Return: nothing runs beside Python."""


@torch.no_grad()
def everywhere(flag: Any, name: str, how: Reduction) -> Tensor:
    """Return a boolean scalar: whether `flag` holds on all ranks."""
    refuse_compiler()
    hvd: Any = basics.running()
    flag = torch.as_tensor(flag)
    mine = flag.to(torch.int32).reshape(1)
    everybody: Tensor = hvd.allreduce(mine, name=name, op=hvd.Min, **how.options)
    return everybody.to(torch.bool).reshape(()).to(flag.device)


@torch.no_grad()
@wait_time.counted()
def reduce_gradients(
    gradients: Sequence[Tensor], names: Sequence[str], variables: Sequence[Any], how: Reduction
) -> list[Tensor]:
    """Return `gradients` reduced over ranks, those that are a variable's own `.grad` in place.

    Args:
        gradients: one tensor a variable.
        names: one name a gradient, equal on all ranks.
        variables: what the gradients belong to.
        how: the options.
    """
    refuse_compiler()
    hvd: Any = basics.running()
    if how.compression.wire == "bfloat16":
        return _reduce_bf16(gradients, names[0], how)
    wires = [_to_wire(g, how) for g in gradients]
    common: dict[str, Any] = {"op": how.op, **how.scales, **how.options}
    pending: list[tuple[list[int], Any]] = []
    grouped = how.buckets(variables)
    for bucket in grouped or small_together([w.nbytes for w in wires]):
        for dtype in {str(wires[i].dtype): None for i in bucket}:
            alike = [i for i in bucket if str(wires[i].dtype) == dtype]
            if len(alike) > 1 and grouped is not None:
                handle = hvd.grouped_allreduce_async([wires[i] for i in alike], name=names[alike[0]], **common)
            elif len(alike) > 1:
                flat = torch.cat([wires[i].reshape(-1) for i in alike])
                handle = hvd.allreduce_async_(flat, name=f"{names[alike[0]]}.and_{len(alike) - 1}_more", **common)
            else:
                (i,) = alike
                # A variable's own .grad may change, as it does in hvdtrain.torch; a tensor of the caller's may not.
                ours = wires[i] is not gradients[i] or wires[i] is _own_gradient(variables[i])
                send = hvd.allreduce_async_ if ours else hvd.allreduce_async
                handle = send(wires[i], name=names[i], **common)
            pending.append((alike, handle))
    outputs: list[Tensor] = list(gradients)
    for alike, handle in pending:
        result = hvd.synchronize(handle)
        if len(alike) == 1:
            parts = [result]
        else:
            parts = result if grouped is not None else result.split([wires[i].numel() for i in alike])
        for i, part in zip(alike, parts, strict=True):
            outputs[i] = part.reshape(gradients[i].shape).to(gradients[i].dtype)
    if tuning.gpu_async() and any(g.is_cuda for g in gradients):  # no host waits: see hvdtrain.torch.reducer
        behind = torch.cuda.Event()
        behind.record()
        watchdog.note_device(behind.query)
    return outputs


def _own_gradient(variable: Any) -> Tensor | None:
    gradient: Tensor | None = getattr(variable, "value", variable).grad
    return gradient


def _to_wire(tensor: Tensor, how: Reduction) -> Tensor:
    if how.compression.wire == "float16" and tensor.is_floating_point():
        return tensor.to(torch.float16)
    return (tensor.to(torch.float32) if tensor.dtype == torch.bfloat16 else tensor).contiguous()


def _reduce_bf16(tensors: Sequence[Tensor], name: str, how: Reduction) -> list[Tensor]:
    """Return `tensors` reduced with bfloat16 on the wire and float32 in the sum.

    Horovod knows no bfloat16, but moves bytes. Each rank receives its shard of everybody's bits, sums it in float32,
    and sends the rounded sum to all: twice 2 bytes a number, and bitwise equal results by construction.
    """
    hvd: Any = basics.running()
    size = how.size()
    flat = torch.cat([t.reshape(-1).to(torch.bfloat16) for t in tensors])
    total = flat.numel()
    flat = torch.nn.functional.pad(flat, (0, -total % size))
    received = hvd.alltoall(flat.view(torch.uint8), name=f"{name}.bf16_shards", **how.options)
    shards = received.view(torch.bfloat16).to(torch.float32).reshape(size, -1)  # (ranks, shard)
    shard = shards.sum(dim=0) * (how.factor / (size if how.average else 1))
    bits = shard.to(torch.bfloat16).view(torch.uint8)
    gathered = hvd.allgather(bits, name=f"{name}.bf16_sums", **how.options).view(torch.bfloat16)[:total]
    parts = gathered.split([t.numel() for t in tensors])
    return [p.reshape(t.shape).to(t.dtype) for p, t in zip(parts, tensors, strict=True)]
