"""Gradients of the TensorFlow backend: Horovod's own operations, in graphs and eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.keras import basics
from hvdtrain.keras.backends import tensorflow_marks
from hvdtrain.keras.backends.tensorflow_updates import fused_update as fused_update
from hvdtrain.keras.reduction import Reduction, small_together

Tensor = Any

untraced = tf.autograph.experimental.do_not_convert


class LocalWeight:
    """A float in a variable, which a traced graph reads on every step. No optimizer or model tracks it."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("/CPU:0"):
            self._variable = tf.Variable(1.0, dtype=tf.float32, trainable=False, name="hvdtrain_batch_weight")
        self._value = 1.0  # the same: an assignment costs more than a small model's gradient

    def get(self) -> float:
        """Return the weight."""
        return self._value

    def set(self, value: float) -> None:
        """Set the weight of the steps from now on."""
        if value != self._value:
            self._value = value
            self._variable.assign(value)

    def multiply(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return `gradients` times the weight; exact zeros at weight 0, whatever they held."""
        weight = self._variable.read_value()
        values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        # The usual weight is 1: then the branch hands its inputs on, and nothing is copied.
        weighted = tf.cond(
            tf.equal(weight, 1.0),
            lambda: [tf.identity(v) for v in values],
            lambda: [_scaled(v, weight) for v in values],
        )
        return [
            tf.IndexedSlices(v, g.indices, g.dense_shape) if isinstance(g, tf.IndexedSlices) else v
            for g, v in zip(gradients, weighted, strict=True)
        ]

    def is_zero(self) -> Tensor:
        """Return a boolean scalar."""
        return tf.equal(self._variable.read_value(), 0.0)


def _scaled(value: Tensor, weight: Tensor) -> Tensor:
    weight = tf.cast(weight, value.dtype)
    return tf.where(tf.equal(weight, 0), tf.zeros_like(value), value * weight)


def refuse_compiler() -> None:
    """Raise where XLA compiles: it knows none of Horovod's operations.

    Raises:
        RuntimeError: the step is being compiled by XLA.
    """
    from tensorflow.python.ops import control_flow_util

    if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise RuntimeError(
            "Horovod's operations do not compile under XLA, and this step is traced with jit_compile=True. "
            "Pass jit_compile=False to your tf.function."
        )


def on_update_step(optimizer: Any, function: Callable[[list[Tensor]], list[Tensor]], gradients: list[Tensor]) -> Any:
    """Return `function(gradients)`: Keras comes here in the branch that updates weights, and in no other."""
    return function(gradients)


def not_finite_now(gradients: Sequence[Tensor]) -> Callable[[], Tensor]:
    """Return what returns a flag a gradient: whether something in it is not finite."""
    values = [_values(g) for g in gradients]
    return lambda: tf.stack([tf.logical_not(_finite(v)) for v in values])


def may_update(optimizer: Any, gradients: Sequence[Tensor]) -> Tensor:
    """Return a boolean scalar: whether all gradients are finite.

    A sum over a tensor holds whatever in it is not finite, and costs less than looking at each element. Where it
    overflowed without that, each element is looked at.
    """
    values = [_values(g) for g in gradients]
    sums = tf.stack([tf.cast(tf.reduce_sum(v), tf.float32) for v in values])
    return tf.cond(_finite(sums), lambda: tf.constant(True), lambda: tf.reduce_all([_finite(v) for v in values]))


def tell_unless(finite: Tensor, function: Callable[..., None], *flags: Callable[[], Tensor]) -> None:
    """Call `function` with the values of `flags` on the host, unless `finite`."""

    def tell() -> None:
        tf.numpy_function(function, [each() for each in flags], [])

    tf.cond(finite, lambda: None, tell)


def take_if(finite: Tensor, take: Callable[[], None], leave: Callable[[], None]) -> None:
    """Run `take` if `finite`, else `leave`."""
    tf.cond(finite, take, leave)


def wait_until_told() -> None:
    """Return: a step ends after its calls to the host."""


def _values(gradient: Tensor) -> Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _finite(tensor: Tensor) -> Tensor:
    return tf.reduce_all(tf.math.is_finite(tensor))


def everywhere(flag: Tensor, name: str, how: Reduction) -> Tensor:
    """Return a boolean scalar: whether `flag` holds on all ranks."""
    refuse_compiler()
    return tf.cast(_allreduce(tf.cast(flag, tf.int32), name, how, op=basics.Min), tf.bool)


def reduce_gradients(
    gradients: Sequence[Tensor], names: Sequence[str], variables: Sequence[Any], how: Reduction
) -> Any:
    """Return `gradients` reduced over ranks: tensors as tensors, IndexedSlices as IndexedSlices.

    Args:
        gradients: one tensor or IndexedSlices a variable.
        names: one name a gradient, equal on all ranks and across retraces.
        variables: what the gradients belong to.
        how: the options.
    """
    refuse_compiler()
    mark = tensorflow_marks.begin(gradients, names)
    reduced = [g if not how.sparse_as_dense or isinstance(g, tf.Tensor) else tf.convert_to_tensor(g) for g in gradients]
    dense = [i for i, g in enumerate(reduced) if not isinstance(g, tf.IndexedSlices)]
    for i, gradient in enumerate(reduced):
        if isinstance(gradient, tf.IndexedSlices):
            reduced[i] = _reduce_sparse(gradient, names[i], how)
    if not dense:
        tensorflow_marks.end(reduced, mark)
        return reduced
    tensors = [reduced[i] for i in dense]
    with tf.device(how.device_dense or None):
        if how.compression.wire == "bfloat16":
            outputs = _reduce_bf16(tensors, names[dense[0]], how)
        else:
            outputs = _reduce_dense(tensors, [names[i] for i in dense], how.buckets([variables[i] for i in dense]), how)
    for i, output in zip(dense, outputs, strict=True):
        reduced[i] = output
    tensorflow_marks.end(reduced, mark)
    return reduced


def _reduce_dense(tensors: list[Tensor], names: list[str], buckets: list[list[int]] | None, how: Reduction) -> Any:
    wires = [_to_wire(t, how) for t in tensors]
    grouped = buckets is not None or tf.executing_eagerly()  # eagerly each call would wait for its answer alone
    if buckets is None:
        buckets = [list(range(len(wires)))] if grouped else small_together([_nbytes(w) for w in wires])
    outputs: list[Tensor] = [None] * len(wires)
    for bucket in buckets:
        for dtype in sorted({wires[i].dtype.name for i in bucket}):
            alike = [i for i in bucket if wires[i].dtype.name == dtype]
            if len(alike) == 1:
                results = [_allreduce(wires[alike[0]], names[alike[0]], how)]
            elif grouped:
                results = _grouped_allreduce([wires[i] for i in alike], f"{names[alike[0]]}.{dtype}", how)
            else:
                results = _flat_allreduce([wires[i] for i in alike], f"{names[alike[0]]}.{dtype}", how)
            for i, result in zip(alike, results, strict=True):
                outputs[i] = tf.cast(result, tensors[i].dtype)
    return outputs


def _to_wire(tensor: Tensor, how: Reduction) -> Tensor:
    if how.compression.wire == "float16" and tensor.dtype.is_floating:
        return tf.cast(tensor, tf.float16)
    return tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor


def _process_set(how: Reduction) -> Any:
    from horovod.common.process_sets import global_process_set

    return how.process_set or global_process_set


def _graph_name(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def _allreduce(tensor: Tensor, name: str, how: Reduction, op: int | None = None) -> Tensor:
    from horovod.tensorflow import mpi_ops

    scales = how.scales if op is None else {}
    return mpi_ops._allreduce(
        tensor,
        name=_graph_name(name),
        op=how.op if op is None else op,
        ignore_name_scope=True,  # scopes differ between a branch and its inlined copy
        process_set=_process_set(how),
        **scales,
    )


def _grouped_allreduce(tensors: list[Tensor], name: str, how: Reduction) -> Any:
    from horovod.tensorflow import mpi_ops

    return mpi_ops._grouped_allreduce(
        tensors, name=_graph_name(name), op=how.op, ignore_name_scope=True, process_set=_process_set(how), **how.scales
    )


def _flat_allreduce(tensors: list[Tensor], name: str, how: Reduction) -> list[Tensor]:
    """Reduce `tensors` as one: a copy each, and one round of messages instead of one each."""
    flat = _allreduce(tf.concat([tf.reshape(t, [-1]) for t in tensors], axis=0), f"{name}.and_{len(tensors) - 1}", how)
    parts = tf.split(flat, [t.shape.num_elements() for t in tensors])
    return [tf.reshape(part, t.shape) for part, t in zip(parts, tensors, strict=True)]


def _nbytes(tensor: Tensor) -> int:
    """Return the size in bytes; that of a large tensor where it is not known while tracing."""
    count = tensor.shape.num_elements()
    return 2**62 if count is None else int(count * tensor.dtype.size)


def _reduce_sparse(gradient: Tensor, name: str, how: Reduction) -> Tensor:
    """Return every rank's rows: their sum, scattered, is the sum over ranks."""
    from horovod.tensorflow import mpi_ops

    common = {"ignore_name_scope": True, "process_set": _process_set(how)}
    with tf.device(how.device_sparse or None):
        values = tf.cast(gradient.values, tf.float32) if gradient.values.dtype == tf.bfloat16 else gradient.values
        values = mpi_ops.allgather(values, name=_graph_name(f"{name}.values"), **common)
        indices = mpi_ops.allgather(gradient.indices, name=_graph_name(f"{name}.indices"), **common)
        values = values * tf.cast(how.factor / (_size(how) if how.average else 1.0), values.dtype)
    return tf.IndexedSlices(tf.cast(values, gradient.values.dtype), indices, gradient.dense_shape)


def _size(how: Reduction) -> Tensor:
    """Return the number of ranks, asked on every step: an elastic run may grow or shrink under a traced graph."""
    from horovod.tensorflow import mpi_ops

    return tf.cast(mpi_ops.size_op(process_set_id=_process_set(how).process_set_id), tf.float32)


def _reduce_bf16(tensors: list[Tensor], name: str, how: Reduction) -> list[Tensor]:
    """Return `tensors` reduced with bfloat16 on the wire and float32 in the sum.

    Horovod knows no bfloat16, but moves bytes. Each rank receives its shard of everybody's bits, sums it in float32,
    and sends the rounded sum to all: twice 2 bytes a number, and bitwise equal results by construction.
    """
    from horovod.tensorflow import mpi_ops

    common = {"ignore_name_scope": True, "process_set": _process_set(how)}
    size = how.size()
    flat = tf.concat([tf.reshape(tf.cast(t, tf.float32), [-1]) for t in tensors], axis=0)
    total = tf.shape(flat)[0]
    flat = tf.pad(flat, [[0, -total % size]])
    received = mpi_ops.alltoall(_bits(flat), name=_graph_name(f"{name}.bf16_shards"), **common)
    shards = tf.reshape(_floats(received), [size, -1])  # (ranks, shard)
    shard = tf.reduce_sum(shards, axis=0) * (how.factor / (size if how.average else 1))
    gathered = _floats(mpi_ops.allgather(_bits(shard), name=_graph_name(f"{name}.bf16_sums"), **common))[:total]
    parts = tf.split(gathered, [tf.size(t) for t in tensors])
    return [tf.cast(tf.reshape(p, tf.shape(t)), t.dtype) for p, t in zip(parts, tensors, strict=True)]


def _bits(floats: Tensor) -> Tensor:
    return tf.reshape(tf.bitcast(tf.cast(floats, tf.bfloat16), tf.uint8), [-1])


def _floats(bits: Tensor) -> Tensor:
    return tf.cast(tf.bitcast(tf.reshape(bits, [-1, 2]), tf.bfloat16), tf.float32)
