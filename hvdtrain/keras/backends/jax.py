"""Gradients of the JAX backend: an ordered host callback, inside jit too, to Horovod's torch or TensorFlow library."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental import io_callback

from hvdtrain.distributed import wait_time
from hvdtrain.keras import basics, host_collectives
from hvdtrain.keras.reduction import Reduction, small_together

Tensor = Any


class LocalWeight:
    """A float on the host, which compiled steps ask for."""

    def __init__(self) -> None:
        self._value = 1.0

    def get(self) -> float:
        """Return the weight."""
        return self._value

    def set(self, value: float) -> None:
        """Set the weight of the steps from now on."""
        self._value = value

    def multiply(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return `gradients` times the weight; exact zeros at weight 0, whatever they held."""
        weight = self._read()
        return [jnp.where(weight == 0, jnp.zeros_like(g), g * weight.astype(g.dtype)) for g in gradients]

    def is_zero(self) -> Tensor:
        """Return a boolean scalar."""
        return self._read() == 0

    def _read(self) -> Tensor:
        # Ordered, so that XLA can neither reuse last step's answer nor ask too early.
        return io_callback(lambda: np.float32(self._value), jax.ShapeDtypeStruct((), jnp.float32), ordered=True)


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`: JAX traces by running it."""
    return function


def fused_update(optimizer: Any, step: Any, gradient: Any, variable: Any, learning_rate: Any) -> bool:
    """Return False: XLA fuses updates."""
    return False


def refuse_compiler() -> None:
    """Raise nothing: callbacks run under jit."""


def on_update_step(optimizer: Any, function: Callable[[list[Tensor]], list[Tensor]], gradients: list[Tensor]) -> Any:
    """Return `function(gradients)` on steps that update weights, else `gradients`.

    Keras's JAX optimizers compute every step's update and throw away those between updates; nothing needs to travel
    for them.
    """
    steps = optimizer.gradient_accumulation_steps
    if not steps:
        return function(gradients)
    is_update_step = (optimizer._iterations.value + 1) % steps == 0
    return jax.lax.cond(is_update_step, function, list, list(gradients))


def not_finite_now(gradients: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Return what returns a flag a gradient: whether something in it is not finite."""
    return lambda: jnp.stack([jnp.logical_not(jnp.isfinite(g).all()) for g in gradients])


def may_update(optimizer: Any, gradients: Sequence[Tensor]) -> Tensor:
    """Return a boolean scalar: whether all gradients are finite; true between updates, which change nothing."""
    finite = jnp.stack([jnp.isfinite(g).all() for g in gradients]).all()
    steps = optimizer.gradient_accumulation_steps
    return finite if not steps else finite | ((optimizer._iterations.value + 1) % steps != 0)


def tell_unless(finite: Tensor, function: Callable[..., None], *flags: Callable[[], Tensor]) -> None:
    """Call `function` with the values of `flags` on the host, unless `finite`."""

    def tell() -> None:
        io_callback(function, None, *(each() for each in flags), ordered=True)

    jax.lax.cond(finite, lambda: None, tell)


def take_if(finite: Tensor, take: Callable[[], None], leave: Callable[[], None]) -> None:
    """Run `take`: no variable changes before `stateless_apply` has chosen from old and new values."""
    take()


def wait_until_told() -> None:
    """Return when the calls to the host have been made: they may still be under way when a step's results are there."""
    jax.effects_barrier()


def everywhere(flag: Tensor, name: str, how: Reduction) -> Tensor:
    """Return a boolean scalar: whether `flag` holds on all ranks."""

    def on_host(mine: Any) -> Any:
        mine = np.asarray(mine).astype(np.int32).reshape(1)
        result = host_collectives.call(
            "allreduce", mine, name=name, op=_native(basics.Min), process_set=how.process_set
        )
        return np.bool_(result[0])

    return io_callback(on_host, jax.ShapeDtypeStruct((), jnp.bool_), flag, ordered=True)


def reduce_gradients(
    gradients: Sequence[Tensor], names: Sequence[str], variables: Sequence[Any], how: Reduction
) -> list[Tensor]:
    """Return `gradients` reduced over ranks.

    Args:
        gradients: one array a variable.
        names: one name a gradient, equal on all ranks.
        variables: what the gradients belong to.
        how: the options.
    """
    wires = [_to_wire(g, how) for g in gradients]
    shapes = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in wires]
    buckets = how.buckets(variables) or small_together([w.size * w.dtype.itemsize for w in wires])
    # The callback holds no traced value but its arguments: JAX may run it long after this trace is gone.
    on_host = functools.partial(_reduce_on_host, list(names), buckets, how)
    results = io_callback(on_host, shapes, *wires, ordered=True)
    return [r.astype(g.dtype) for r, g in zip(results, gradients, strict=True)]


def _to_wire(gradient: Tensor, how: Reduction) -> Tensor:
    if how.compression.wire is not None and jnp.issubdtype(gradient.dtype, jnp.floating):
        return gradient.astype(how.compression.wire)
    return gradient.astype(jnp.float32) if gradient.dtype == jnp.bfloat16 else gradient


def _native(op: int) -> Any:
    """Return the engine's constant for one of ours."""
    names = {basics.Average: "Average", basics.Sum: "Sum", basics.Min: "Min"}
    return getattr(basics.running(), names[op])


@wait_time.counted()
def _reduce_on_host(names: list[str], buckets: list[list[int]], how: Reduction, *wires: Any) -> list[Any]:
    arrays = [np.asarray(w) for w in wires]
    sent: list[tuple[list[int], Callable[[], Any]]] = []
    for bucket in buckets:
        for dtype in {arrays[i].dtype: None for i in bucket}:
            alike = [i for i in bucket if arrays[i].dtype == dtype]
            # JAX's arrays are read-only: this copy is sent in place, and its parts are what is given back.
            flat = np.concatenate([arrays[i].reshape(-1) for i in alike])
            reduce = _reduce_bf16 if dtype == ml_dtypes.bfloat16 else _allreduce
            sent.append((alike, reduce(flat, names[alike[0]], how)))
    outputs: list[Any] = list(arrays)
    for alike, wait in sent:
        parts = np.split(wait(), np.cumsum([arrays[i].size for i in alike])[:-1])
        for i, part in zip(alike, parts, strict=True):
            outputs[i] = part.reshape(arrays[i].shape)
    return outputs


def _allreduce(flat: Any, name: str, how: Reduction) -> Callable[[], Any]:
    """Send `flat`, which is this function's from now on; return what waits for the result."""
    return host_collectives.allreduce_in_place(
        flat, name=f"{name}.{flat.dtype}", op=_native(how.op), process_set=how.process_set, **how.scales
    )


def _reduce_bf16(flat: Any, name: str, how: Reduction) -> Callable[[], Any]:
    """Return what returns bfloat16 numbers, summed in float32; see the torch backend's function of this name."""
    size = how.size()
    total = flat.size
    padded = np.concatenate([flat, np.zeros(-total % size, flat.dtype)])
    received = host_collectives.call(
        "alltoall", padded.view(np.uint8), name=f"{name}.bf16_shards", process_set=how.process_set
    )
    shards = received.view(flat.dtype).astype(np.float32).reshape(size, -1)  # (ranks, shard)
    shard = shards.sum(axis=0) * np.float32(how.factor / (size if how.average else 1))
    bits = shard.astype(flat.dtype).view(np.uint8)
    gathered = host_collectives.call("allgather", bits, name=f"{name}.bf16_sums", process_set=how.process_set)
    return lambda: gathered.view(flat.dtype)[:total]
