"""Gradients of the TensorFlow backend: Horovod's own operations, in graphs and eagerly."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.distributed.division import Division
from hvdtrain.distributed.recorder import recorder
from hvdtrain.distributed.watchdog import waits
from hvdtrain.keras import basics
from hvdtrain.keras.backends import (  # noqa: F401 - part of each backend
    Array,
    HostWeight,
    compiling_again,
    on_update_step,
    wait_for_reports,
)
from hvdtrain.keras.reduction import GradientReduction, NoneCompressor, by_dtype, small_together
from hvdtrain.system import large_arrays

Tensor = Any

untraced = tf.autograph.experimental.do_not_convert


class BatchWeight(HostWeight):
    """A weight in a variable, which a traced graph reads on every step. No optimizer or model tracks it."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("/CPU:0"):
            self._variable = tf.Variable(1.0, dtype=tf.float32, trainable=False, name="hvdtrain_batch_weight")

    def set(self, value: float) -> None:
        """Set the weight of the steps from now on."""
        if value != self.value:  # an assignment costs more than a small model's gradient
            super().set(value)
            self._variable.assign(value)

    def read(self) -> Tensor:
        """Return the weight as a scalar."""
        return self._variable.read_value()

    def multiply(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return `gradients` times the weight; exact zeros at weight 0, whatever they held."""
        values, multiply = _values(gradients), super().multiply
        # The usual weight is 1: then the branch passes its inputs through, and nothing is copied.
        is_one = tf.equal(self.read(), 1.0)
        weighted = tf.cond(is_one, lambda: [tf.identity(v) for v in values], lambda: multiply(values))
        return [
            tf.IndexedSlices(v, g.indices, g.dense_shape) if isinstance(g, tf.IndexedSlices) else v
            for g, v in zip(gradients, weighted, strict=True)
        ]


def on_host(value: Any) -> Array:
    """Return a variable's or a tensor's value as an array on the host, of its memory on CPUs."""
    tensor = tf.convert_to_tensor(value)
    if np.dtype(tensor.dtype.as_numpy_dtype).kind not in "biufc":  # bfloat16, of which there are no views
        return np.asarray(tensor.numpy())
    return np.asarray(memoryview(tensor))


def give(variable: Any, array: Array) -> None:
    """Assign an array, which is copied once."""
    variable.assign(array)
    large_arrays.give_back_after(array.nbytes)


def memory_in_use() -> tuple[int, int] | None:
    """Return the bytes that TensorFlow takes on the GPU now, and took at most; None if it computes on the host."""
    if not tf.config.list_logical_devices("GPU"):
        return None
    info = tf.config.experimental.get_memory_info("GPU:0")
    return info["current"], info["peak"]


def _values(gradients: Sequence[Tensor]) -> list[Tensor]:
    return [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]


def _refuse_compiler() -> None:
    """Raise RuntimeError where XLA compiles: it has none of Horovod's operations."""
    from tensorflow.python.ops import control_flow_util

    if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise RuntimeError("Horovod's operations do not compile under XLA. Pass jit_compile=False to your tf.function.")


def non_finite_flags(gradients: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Return a function that returns, for each gradient, whether something in it is not finite."""
    return lambda: tf.stack([tf.logical_not(_is_finite(v)) for v in _values(gradients)])


def may_update(optimizer: Any, gradients: Sequence[Tensor]) -> Tensor:
    """Return a boolean scalar: whether all gradients are finite; see `hvdtrain.torch.ops.finite.all_finite`."""
    values = _values(gradients)
    sums = tf.stack([tf.cast(tf.reduce_sum(v), tf.float32) for v in values])
    return tf.cond(_is_finite(sums), lambda: tf.constant(True), lambda: tf.reduce_all([_is_finite(v) for v in values]))


def _is_finite(tensor: Tensor) -> Tensor:
    return tf.reduce_all(tf.math.is_finite(tensor))


def report_unless(finite: Tensor, function: Callable[..., None], *flags: Callable[[], Tensor]) -> None:
    """Call `function` with the values of `flags_of` on the host, unless `finite`."""

    def report() -> None:
        tf.numpy_function(function, [each() for each in flags], [])

    tf.cond(finite, lambda: None, report)


def run_if(finite: Tensor, update: Callable[[], None], skip: Callable[[], None]) -> None:
    """Run `update` if `finite`, else `skip`."""
    tf.cond(finite, update, skip)


def fused_update(optimizer: Any, step: Any, gradient: Tensor, variable: Any, learning_rate: Any) -> bool:
    """Update `variable` and its slots in one pass, if TensorFlow has an operation for the rule of `step`; else False.

    Keras writes an update as arithmetic operations, which XLA fuses. But XLA does not compile a step with Horovod's
    operations, and without it each reads and writes whole variables: 17 of an MLP's 53 ms with SGD, 46 ms with Adam.
    """
    # Keyed by the method: AdamW has Adam's, and a user's subclass with another `update_step` is not changed.
    rule = getattr(step, "__func__", step)
    if rule is keras.optimizers.SGD.update_step:
        kinds = [optimizer.momentums] if optimizer.momentum else []
    elif rule is keras.optimizers.Adam.update_step and not optimizer.amsgrad:
        kinds = [optimizer._momentums, optimizer._velocities]
    else:
        return False
    position = optimizer._get_variable_index(variable)
    plain: list[Any] = [_plain(v) for v in (variable, *(kind[position] for kind in kinds))]
    if any(p is None for p in plain) or len({p.dtype for p in plain}) > 1 or not isinstance(gradient, tf.Tensor):
        return False

    def number(value: Any) -> Tensor:
        return keras.ops.cast(value, plain[0].dtype.name)

    target, *slots = (p.handle for p in plain)
    rate, gradient = number(learning_rate), number(gradient)
    if not slots:
        tf.raw_ops.ResourceApplyGradientDescent(var=target, alpha=rate, delta=gradient, use_locking=True)
        return True
    given = {"var": target, "lr": rate, "grad": gradient, "use_locking": True}
    if len(slots) == 1:
        given |= {"accum": slots[0], "momentum": number(optimizer.momentum), "use_nesterov": optimizer.nesterov}
        tf.raw_ops.ResourceApplyKerasMomentum(**given)
    else:
        steps = number(optimizer.iterations + 1)
        for name, beta in (("beta1", number(optimizer.beta_1)), ("beta2", number(optimizer.beta_2))):
            given |= {name: beta, f"{name}_power": tf.pow(beta, steps)}
        tf.raw_ops.ResourceApplyAdam(**given, m=slots[0], v=slots[1], epsilon=number(optimizer.epsilon))
    return True


def _plain(variable: Any) -> Any | None:
    """Return the tf.Variable of `variable`; None where tf.distribute has several of it, or the dtype is narrow."""
    value = variable.value if isinstance(variable, keras.Variable) else variable
    plain = isinstance(value, tf.Variable) and not tf.distribute.has_strategy() and hasattr(value, "handle")
    return value if plain and value.dtype in (tf.float32, tf.float64) else None


def true_on_all_ranks(flag: Tensor, name: str, how: GradientReduction) -> Tensor:
    """Return a boolean scalar: whether `flag` holds on all ranks."""
    _refuse_compiler()
    return tf.cast(_allreduce(tf.cast(flag, tf.int32), name, how, op=basics.Min), tf.bool)


def reduce_gradients(
    gradients: Sequence[Tensor], names: Sequence[str], variables: Sequence[Any], how: GradientReduction
) -> Any:
    """Return `gradients` reduced over ranks, tensors as tensors, IndexedSlices as IndexedSlices; record the wait."""
    return watched(lambda: reduce_unwatched(gradients, names, variables, how), gradients, lambda: tuple(names))


def watched(
    collective: Callable[[], list[Any]],
    inputs: Sequence[Tensor],
    names: Callable[[], tuple[str, ...]],
    *,
    beside: Sequence[Tensor] = (),
) -> list[Any]:
    """Return what `collective` makes of `inputs`; record the wait for it, and let the watchdog see it in graphs.

    What is computed meanwhile, up to the tensors `beside`, is no wait.
    """
    _refuse_compiler()
    if tf.executing_eagerly():  # a thread that waits there can be seen from outside
        with recorder.waiting():
            return collective()
    if not tf.compat.v1.executing_eagerly_outside_functions():  # a session of TensorFlow 1 initialises its variables
        return collective()
    inputs = _values(inputs)
    began, ended, seconds = _marks(names())
    # Begun once the first gradient is there: backward makes the last layer's first.
    with tf.control_dependencies(inputs[-1:]):
        counted = began.assign_add(1, read_value=False)
    with tf.control_dependencies([*inputs, *beside]):
        ready = tf.timestamp()
    results = collective()
    with tf.control_dependencies([counted, *_values(results)]):
        ended.assign(began.read_value(), read_value=False)
        with tf.control_dependencies([ready]):
            seconds.assign_add(tf.timestamp() - ready, read_value=False)
    return results


@functools.cache
def _marks(names: tuple[str, ...]) -> tuple[Any, Any, Any]:
    """Return the variables of the reduction of these names: two counters for the watchdog, seconds for the recorder."""
    with tf.device("/CPU:0"):
        began, ended = (untracked(0, tf.int64) for _ in range(2))
        seconds = untracked(0.0, tf.float64)
    waits.note_graph(names, lambda: (int(began.numpy()), int(ended.numpy())))
    recorder.note_graph(lambda: float(seconds.numpy()))
    return began, ended, seconds


def untracked(value: Any, dtype: Any, shape: Any = None) -> Any:
    """Return a new variable, also while a graph is traced; with a `shape`, its values may have any that fits."""
    # The class itself: tf.Variable asks the tf.function that is traced, which refuses it when it is traced again.
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    with tf.init_scope():
        return ResourceVariable(value, dtype=dtype, trainable=False, shape=shape)


def reduce_unwatched(
    gradients: Sequence[Tensor], names: Sequence[str], variables: Sequence[Any], how: GradientReduction
) -> list[Tensor]:
    """Return what `reduce_gradients` does, without a record of the wait."""
    if how.compression.scheme is not None:
        return _reduce_compressed(gradients, names[0], how)
    reduced = [tf.convert_to_tensor(g) if how.sparse_as_dense else g for g in gradients]
    dense = [i for i, g in enumerate(reduced) if not isinstance(g, tf.IndexedSlices)]
    for i, gradient in enumerate(reduced):
        if isinstance(gradient, tf.IndexedSlices):
            reduced[i] = reduce_sparse(gradient, names[i], how)
    if dense:
        tensors = [reduced[i] for i in dense]
        with tf.device(how.device_dense or None):
            if how.compression.wire == "bfloat16":
                outputs = _reduce_bf16(tensors, names[dense[0]], how)
            else:
                outputs = _reduce_dense(tensors, [names[i] for i in dense], [variables[i] for i in dense], how)
        for i, output in zip(dense, outputs, strict=True):
            reduced[i] = output
    return reduced


def _reduce_dense(tensors: list[Tensor], names: list[str], variables: list[Any], how: GradientReduction) -> Any:
    wires = [how.compression.compress(t)[0] for t in tensors]
    groups = how.buckets(variables)
    if groups is None and tf.executing_eagerly():  # each call would wait for its answer alone
        groups = [list(range(len(wires)))]
    outputs: list[Tensor] = [None] * len(wires)
    for bucket in by_dtype(groups or small_together([_nbytes(w) for w in wires]), [w.dtype.name for w in wires]):
        together, name = [wires[i] for i in bucket], names[bucket[0]]
        if len(bucket) == 1:
            results = [_allreduce(together[0], name, how)]
        elif groups is not None:
            name = _graph_name(f"{name}.{together[0].dtype.name}")
            results = _horovod()._grouped_allreduce(together, name=name, op=how.op, **_common(how), **how.scales)
        else:  # as one: this copies each, and saves all rounds of messages but one
            flat = tf.concat([tf.reshape(t, [-1]) for t in together], axis=0)
            flat = _allreduce(flat, f"{name}.{flat.dtype.name}.and_{len(bucket) - 1}", how)
            results = _split(flat, together)
        for i, result in zip(bucket, results, strict=True):
            outputs[i] = tf.cast(result, tensors[i].dtype)
    return outputs


def _reduce_compressed(gradients: Sequence[Tensor], name: str, how: GradientReduction) -> list[Tensor]:
    """Return means of what ranks send of their gradients, sparse ones as dense ones; the host compresses them."""
    compressed: Any = how.compression
    dense = [tf.convert_to_tensor(g) for g in gradients]
    wires = [compressed.compress(g)[0] for g in dense]

    def on_host(*arrays: Any) -> list[Any]:
        means: list[Any] = compressed.start(arrays, name, how)()
        return means

    with tf.device("/CPU:0"):
        if tf.executing_eagerly():
            means = on_host(*(w.numpy() for w in wires))
        else:
            means = tf.numpy_function(on_host, wires, [w.dtype for w in wires])
    return [tf.cast(tf.ensure_shape(m, g.shape), g.dtype) for m, g in zip(means, dense, strict=True)]


def _split(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    parts = tf.split(flat, [tf.size(t) for t in like])
    return [tf.reshape(part, tf.shape(t)) for part, t in zip(parts, like, strict=True)]


def _horovod() -> Any:
    return importlib.import_module("horovod.tensorflow.mpi_ops")


def _common(how: GradientReduction) -> dict[str, Any]:
    """Return the arguments of all of Horovod's operations; name scopes differ between a branch and its inlined copy."""
    return {"ignore_name_scope": True, "process_set": how.process_set or basics.process_sets().global_process_set}


def _graph_name(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def _allreduce(tensor: Tensor, name: str, how: GradientReduction, op: int | None = None) -> Tensor:
    options = {"op": how.op, **how.scales} if op is None else {"op": op}
    return _horovod()._allreduce(tensor, name=_graph_name(name), **_common(how), **options)


def _nbytes(tensor: Tensor) -> int:
    """Return the size in bytes; that of a large tensor where it is not known while tracing."""
    count = tensor.shape.num_elements()
    return 2**62 if count is None else int(count * tensor.dtype.size)


def number_of_ranks(how: GradientReduction) -> Tensor:
    """Return how many ranks take part, read on every step: an elastic job changes it under a graph."""
    return _horovod().size_op(process_set_id=_common(how)["process_set"].process_set_id)


def _sum_factor(how: GradientReduction, dtype: Any) -> Tensor:
    """Return what turns a sum over ranks into the result."""
    ranks = tf.cast(number_of_ranks(how) if how.op == basics.Average else 1, tf.float64)
    return tf.cast(how.factor / ranks, dtype)


def reduce_sparse(gradient: Tensor, name: str, how: GradientReduction) -> Tensor:
    """Return every rank's rows: their sum, scattered, is the sum over ranks."""

    def gather(tensor: Tensor, what: str) -> Tensor:
        return _horovod().allgather(tensor, name=_graph_name(f"{name}.{what}"), **_common(how))

    with tf.device(how.device_sparse or None):
        values = gather(NoneCompressor.compress(gradient.values)[0], "values")
        indices = gather(gradient.indices, "indices")
        values = tf.cast(values * _sum_factor(how, values.dtype), gradient.values.dtype)
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _reduce_bf16(tensors: list[Tensor], name: str, how: GradientReduction) -> list[Tensor]:
    """Return `tensors` with bfloat16 on the wire and float32 in the sum, as `hvdtrain.torch` does it."""
    common = _common(how)
    size = number_of_ranks(how)
    flat = tf.concat([tf.reshape(tf.cast(t, tf.float32), [-1]) for t in tensors], axis=0)
    total = tf.shape(flat)[0]
    flat = tf.pad(flat, [[0, -total % size]])
    received = _horovod().alltoall(_bits(flat), name=_graph_name(f"{name}.bf16_shards"), **common)
    shards = tf.reshape(_floats(received), [size, -1])  # (ranks, shard)
    shard = tf.reduce_sum(shards, axis=0) * _sum_factor(how, tf.float32)
    gathered = _floats(_horovod().allgather(_bits(shard), name=_graph_name(f"{name}.bf16_sums"), **common))
    return [tf.cast(p, t.dtype) for p, t in zip(_split(gathered[:total], tensors), tensors, strict=True)]


def allgather(tensor: Tensor, name: str, how: GradientReduction) -> Tensor:
    """Return all ranks' vectors, one after the other, bit for bit."""
    is_bf16 = tensor.dtype == tf.bfloat16  # which Horovod does not know
    sent = tf.reshape(tf.bitcast(tensor, tf.uint8), [-1]) if is_bf16 else tensor
    received = _horovod().allgather(sent, name=_graph_name(name), **_common(how))
    return tf.bitcast(tf.reshape(received, [-1, 2]), tf.bfloat16) if is_bf16 else received


def sum_of_parts(
    pieces: Tensor, lengths: Sequence[int], name: str, division: Division, how: GradientReduction
) -> Tensor:
    """Return the reduction over ranks of the piece that each has for this rank.

    Args:
        pieces: a vector of the pieces for all ranks, in their order.
        lengths: of the pieces, known while the graph is traced.
        name: equal on all ranks.
        division: of these ranks.
        how: the reduction.
    """
    rank, is_bf16 = how.rank(), pieces.dtype == tf.bfloat16  # which Horovod does not know
    part, counts, own = division.sent(lengths, rank)
    sent = tf.reshape(tf.bitcast(pieces[part], tf.uint8), [-1]) if is_bf16 else pieces[part]
    splits = [2 * n for n in counts] if is_bf16 else counts
    with tf.device(how.device_dense or None):
        received, _ = _horovod().alltoall(sent, splits=splits, name=_graph_name(f"{name}.parts"), **_common(how))
    received = _floats(received) if is_bf16 else received
    rows = tf.unstack(tf.reshape(received, [division.size - (own is not None), lengths[rank]]))
    if own is not None:
        rows.insert(rank, tf.cast(pieces[own], received.dtype))
    return tf.cast(tf.add_n(rows) * tf.cast(how.sum_factor, received.dtype), pieces.dtype)


def _bits(floats: Tensor) -> Tensor:
    return tf.reshape(tf.bitcast(tf.cast(floats, tf.bfloat16), tf.uint8), [-1])


def _floats(bits: Tensor) -> Tensor:
    return tf.cast(tf.bitcast(tf.reshape(bits, [-1, 2]), tf.bfloat16), tf.float32)
