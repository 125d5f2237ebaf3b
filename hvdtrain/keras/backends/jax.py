"""Gradients of the JAX backend: an ordered host callback, inside jit too, to Horovod's torch or TensorFlow library."""

from __future__ import annotations

import functools
import importlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
from jax.experimental import io_callback
from packaging.version import Version

from hvdtrain.distributed.recorder import recorder
from hvdtrain.keras import basics, ops
from hvdtrain.keras.backends import (  # noqa: F401 - part of each backend
    Array,
    HostWeight,
    fused_update,
    host_calls,
    untraced,
)
from hvdtrain.keras.reduction import GradientReduction, by_dtype, small_together
from hvdtrain.system import large_arrays

Tensor = Any

_REMOVES_BARRIERS = "cse_barrier_expander"  # XLA's name of the pass


class BatchWeight(HostWeight):
    """A weight on the host, which compiled steps read by a callback."""

    def read(self) -> Tensor:
        """Return the weight as a scalar."""
        # Ordered, so that XLA can neither reuse last step's value nor read it too early.
        return io_callback(lambda: np.float32(self.value), jax.ShapeDtypeStruct((), jnp.float32), ordered=True)


def on_host(value: Any) -> Array:
    """Return a variable's or a tensor's value as an array on the host, of its memory on CPUs."""
    return np.asarray(keras.ops.convert_to_tensor(value))


def give(variable: Any, array: Array) -> None:
    """Assign an array that nobody else uses: on CPUs, JAX takes its memory."""
    variable.assign(array)
    large_arrays.give_back_after(array.nbytes)


def memory_in_use() -> tuple[int, int] | None:
    """Return the bytes that JAX takes on the GPU now, and took at most; None if it computes on the host."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return (stats["bytes_in_use"], stats["peak_bytes_in_use"]) if "peak_bytes_in_use" in stats else None


def on_update_step(
    optimizer: Any, function: Callable[..., Any], otherwise: Callable[..., Any], gradients: list[Tensor]
) -> Any:
    """Return `function(gradients)` on steps that update weights, else `otherwise(gradients)`, which Keras discards."""
    steps = optimizer.gradient_accumulation_steps
    if not steps:
        return function(gradients)
    return jax.lax.cond(_is_update_step(optimizer, steps), function, otherwise, list(gradients))


def _is_update_step(optimizer: Any, steps: int) -> Tensor:
    return (optimizer._iterations.value + 1) % steps == 0


def non_finite_flags(gradients: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Return a function that returns, for each gradient, whether something in it is not finite."""
    return lambda: jnp.stack([~jnp.isfinite(g).all() for g in gradients])


def may_update(optimizer: Any, gradients: Sequence[Tensor]) -> Tensor:
    """Return a boolean scalar: whether all gradients are finite; true between updates, which change nothing."""
    finite = jnp.stack([jnp.isfinite(g).all() for g in gradients]).all()
    steps = optimizer.gradient_accumulation_steps
    return finite | ~_is_update_step(optimizer, steps) if steps else finite


def report_unless(finite: Tensor, function: Callable[..., None], *flags: Callable[[], Tensor]) -> None:
    """Call `function` with the values of `flags_of` on the host, unless `finite`."""
    report = functools.partial(io_callback, function, None, ordered=True)
    jax.lax.cond(finite, lambda: None, lambda: report(*(each() for each in flags)))


def wait_for_reports() -> None:
    """Return when the calls to the host were made: they may be in flight when a step's results are there."""
    jax.effects_barrier()


def run_if(finite: Tensor, update: Callable[[], None], skip: Callable[[], None]) -> None:
    """Run `update`: no variable changes before `stateless_apply` has chosen from old and new values."""
    update()


def true_on_all_ranks(flag: Tensor, name: str, how: GradientReduction) -> Tensor:
    """Return a boolean scalar: whether `flag` holds on all ranks."""

    def on_host(mine: Any) -> Any:
        mine = np.asarray(mine).astype(np.int32).reshape(1)
        least = ops.call("allreduce", mine, name=name, op=basics.Min, process_set=how.process_set)
        return np.bool_(least[0])

    return io_callback(on_host, jax.ShapeDtypeStruct((), jnp.bool_), flag, ordered=True)


def reduce_gradients(
    gradients: Sequence[Tensor], names: Sequence[str], variables: Sequence[Any], how: GradientReduction
) -> list[Tensor]:
    """Return `gradients` reduced over ranks."""
    wires = [how.compression.compress(g)[0] for g in gradients]
    shapes = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in wires]
    given = list(names), buckets_of(wires, variables, how), how
    in_place = how.compression.scheme is None
    function = functools.partial(_reduce_in_place, *given) if in_place else functools.partial(_compress, shapes, *given)
    results = host_calls.call(function, shapes, wires, in_place=in_place)
    return [r.astype(g.dtype) for r, g in zip(results, gradients, strict=True)]


def buckets_of(wires: Sequence[Tensor], variables: Sequence[Any], how: GradientReduction) -> list[list[int]]:
    """Return positions of tensors that are copied together, to be sent together."""
    if how.compression.scheme is not None:
        return [[i] for i in range(len(wires))]
    buckets = how.buckets(variables) or small_together([w.nbytes for w in wires])
    return by_dtype(buckets, [w.dtype.name for w in wires])


@recorder.waiting()
def _reduce_in_place(
    names: list[str], buckets: list[list[int]], how: GradientReduction, _: list[Array], results: list[Array]
) -> None:
    """Reduce arrays: a large one in its own memory, small ones together. All buckets are in flight at once."""

    def put(index: int, mean: Array) -> None:
        host_calls.fill(results[index], mean)

    flat = (results[b[0]] if len(b) == 1 else np.concatenate([results[i] for i in b]) for b in buckets)
    ops.finish_in_turn(_started(names, buckets, how, [result.size for result in results], flat, put))


@recorder.waiting()
def _compress(
    shapes: list[Any],
    names: list[str],
    buckets: list[list[int]],
    how: GradientReduction,
    arguments: list[Array],
    results: list[Array],
) -> None:
    """Reduce compressed arrays, from copies: a compressor changes what it gets."""
    found = start(names, buckets, how, shapes=[s.shape for s in shapes], flat=flat_arrays(buckets, arguments))()
    for result, mean in zip(results, found, strict=True):
        result[:] = mean.reshape(-1)


def flat_arrays(buckets: list[list[int]], wires: Sequence[Any]) -> Iterator[Any]:
    """Yield a copy of each bucket's arrays, flat: JAX's are read-only and belong to the step."""
    return (np.concatenate([np.asarray(wires[i]).reshape(-1) for i in bucket]) for bucket in buckets)


def start(
    names: list[str], buckets: list[list[int]], how: GradientReduction, *, shapes: list[Any], flat: Iterable[Any]
) -> Callable[[], list[Any]]:
    """Start to reduce the arrays of `flat_arrays`, in place; return a function that waits for the gradients."""
    if how.compression.scheme is not None:
        compressed: Any = how.compression
        arrays = [array.reshape(shape) for array, shape in zip(flat, shapes, strict=True)]
        means: Callable[[], list[Any]] = compressed.start(arrays, names[0], how)
        return means
    outputs: list[Any] = [None] * len(shapes)

    def put(index: int, mean: Array) -> None:
        outputs[index] = mean.reshape(shapes[index])

    pending = list(_started(names, buckets, how, [math.prod(shape) for shape in shapes], flat, put))

    def wait() -> list[Any]:
        ops.finish_in_turn(pending)
        return outputs

    return wait


def _started(
    names: list[str],
    buckets: list[list[int]],
    how: GradientReduction,
    sizes: list[int],
    flat: Iterable[Array],
    put: Callable[[int, Array], None],
) -> Iterator[Callable[[], None]]:
    """Start to reduce each bucket's array, in place; yield a function that waits and puts each tensor's mean."""
    for bucket, array in zip(buckets, flat, strict=True):
        reduce = _reduce_bf16 if array.dtype == ml_dtypes.bfloat16 else _allreduce
        wait = reduce(array, f"{names[bucket[0]]}.{array.dtype}", how)
        yield functools.partial(_put_parts, wait, bucket, sizes, put)


def _put_parts(
    wait: Callable[[], Array], bucket: list[int], sizes: list[int], put: Callable[[int, Array], None]
) -> None:
    parts = np.split(wait(), np.cumsum([sizes[i] for i in bucket])[:-1])
    for index, part in zip(bucket, parts, strict=True):
        put(index, part)


def _allreduce(flat: Any, name: str, how: GradientReduction) -> Callable[[], Any]:
    """Start to reduce `flat`, which must not be used again; return a function that waits for the result."""
    return ops.allreduce_in_place(flat, name=name, op=how.op, process_set=how.process_set, **how.scales)


def _reduce_bf16(flat: Any, name: str, how: GradientReduction) -> Callable[[], Any]:
    """Return a function that returns `flat`, summed in float32, as `hvdtrain.torch` does it."""
    size = how.size()
    padded = np.concatenate([flat, np.zeros(-flat.size % size, flat.dtype)])
    options = {"process_set": how.process_set}
    received = ops.call("alltoall", padded.view(np.uint8), name=f"{name}.shards", **options)
    bits = mean_of_bf16(received.view(flat.dtype).reshape(size, -1), how).view(np.uint8)
    gathered = ops.call("allgather", bits, name=f"{name}.sums", **options)
    return lambda: gathered.view(flat.dtype)[: flat.size]


def mean_of_bf16(rows: Array, how: GradientReduction) -> Array:
    """Return the reduction of bfloat16 rows, of one from each rank, summed in float32."""
    mean: Array = rows.astype(np.float32).sum(axis=0) * np.float32(how.sum_factor)
    return mean.astype(rows.dtype)


def compiling_again(model: Any) -> tuple[Callable[[], AbstractContextManager[Any]], str]:
    """Return the block in which a step of `model` is compiled, and why it saves no memory all the same, or "".

    `jax.checkpoint` puts a barrier before the second computation. On CPUs, XLA removes barriers, then finds two equal
    computations, and does one: memory and time of a step were those without checkpoints (JAX 0.10.2). For GPUs, XLA's
    source removes barriers after that; no GPU has run it.
    """
    trainer: Any = importlib.import_module("keras.src.backend.jax.trainer")
    flags, is_compiled = os.environ.get("XLA_FLAGS", ""), model.jit_compile and not model.run_eagerly
    if not is_compiled or jax.default_backend() != "cpu" or _REMOVES_BARRIERS in flags:
        return nullcontext, ""
    # Keras may use Flax's compiler; JAX 0.5 raises for this option.
    if not hasattr(trainer, "jit") or trainer.jit is not jax.jit or Version(jax.__version__) < Version("0.6.2"):
        return nullcontext, (
            "checkpoint_activations saves no memory with JAX on CPUs here: it needs JAX 0.6.2 or newer, and Keras "
            f"without Flax. Received: JAX {jax.__version__}, and Keras compiles by {getattr(trainer, 'jit', None)}. "
            f"Or add --xla_disable_hlo_passes={_REMOVES_BARRIERS} to XLA_FLAGS before Python starts"
        )
    users = re.findall(r"--xla_disable_hlo_passes=(\S+)", flags)[-1:]  # which the option would replace
    options = {"xla_disable_hlo_passes": ",".join([*users, _REMOVES_BARRIERS])}
    return functools.partial(_compiled_with, trainer, options), ""


@contextmanager
def _compiled_with(trainer: Any, options: dict[str, str]) -> Iterator[None]:
    """Give what Keras compiles within the block these options of XLA's."""
    jit = trainer.jit
    trainer.jit = functools.partial(jit, compiler_options=options)
    try:
        yield
    finally:
        trainer.jit = jit
