"""Collectives under horovod.tensorflow's names: on tensors and variables, Keras's too, eagerly and in graphs.

They can be differentiated, as Horovod's can. In one process without Horovod they return what one rank would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.distributed import whole_factors
from hvdtrain.distributed.whole_factors import LARGEST
from hvdtrain.keras import basics, ops
from hvdtrain.keras.backends import tensorflow as backend
from hvdtrain.keras.ops import barrier
from hvdtrain.keras.reduction import Compression, by_dtype

Tensor = Any

__all__ = [
    "allgather", "allgather_object", "allreduce", "alltoall", "barrier", "broadcast", "broadcast_object",
    "broadcast_object_fn", "grouped_allgather", "grouped_allreduce", "grouped_reducescatter", "is_homogeneous", "join",
    "local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "reducescatter", "size_op",
]  # fmt: skip


@backend.untraced
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any | None = None,
    ignore_name_scope: bool = False,
) -> Tensor:
    """Return the mean of `tensor` over ranks, or another reduction of it.

    Args:
        tensor: a tensor or variable, shape and dtype equal on all ranks; of tf.IndexedSlices the rows are gathered.
        average: Horovod's older way to say op=Average (True) or op=Sum (False); with `op`, a ValueError.
        device_dense: TensorFlow device of the reduction.
        device_sparse: likewise, for tf.IndexedSlices.
        compression: the type in which floats are sent: Compression.none, .fp16 or .bf16.
        op: Average (default), Sum, Adasum, Min, Max or Product.
        prescale_factor: multiplies before the reduction.
        postscale_factor: multiplies after it.
        name: equal on all ranks; made from the tensor's if left out.
        process_set: ranks that take part; None means all.
        ignore_name_scope: leave TensorFlow's name scopes out of the name.
    """
    op = ops.operation(op, average)
    scales = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    options = {"op": op, "name": name, "ignore_name_scope": ignore_name_scope, **ops.in_set(process_set), **scales}
    value = _tensor(tensor)
    _check_reduction([value], **options)
    if isinstance(value, tf.IndexedSlices):
        return _run("allreduce", [value], device_sparse=device_sparse, **options)[0]
    (wire,), backs = _compressed([value], compression)
    return _restored([_run("allreduce", [wire], device_dense=device_dense, **options)[0]], backs)[0]


@backend.untraced
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any | None = None,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Tensor]:
    """Return the reduction of each tensor over ranks, all in one operation; see `allreduce`."""
    op = ops.operation(op, average)
    scales = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    options = {"op": op, "ignore_name_scope": ignore_name_scope, **ops.in_set(process_set), **scales}
    values = [_tensor(t) for t in tensors]
    _check_reduction(values, **options)
    dense = [i for i, value in enumerate(values) if not isinstance(value, tf.IndexedSlices)]
    wires, backs = _compressed([values[i] for i in dense], compression)
    if op == basics.Adasum:  # Horovod's grouped form raises UnboundLocalError; it would combine each tensor by itself
        names = [None if name is None else f"{name}_{i}" for i in dense]
        reduced = [
            _run("allreduce", [wire], name=each, device_dense=device_dense, **options)[0]
            for wire, each in zip(wires, names, strict=True)
        ]
    else:
        reduced = _in_groups("grouped_allreduce", wires, name=name, device_dense=device_dense, **options)
    results = dict(zip(dense, _restored(reduced, backs), strict=True))
    for i in sorted(set(range(len(values))) - set(dense)):
        results[i] = _run("allreduce", [values[i]], device_sparse=device_sparse, **options)[0]
    return [results[i] for i in range(len(values))]


@backend.untraced
def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: Any | None = None
) -> Tensor:
    """Return the ranks' tensors, concatenated on axis 0, on which alone their lengths may differ."""
    options = {"name": name, "ignore_name_scope": ignore_name_scope, **ops.in_set(process_set)}
    return _run("allgather", [_tensor(tensor)], **options)[0]


@backend.untraced
def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, ignore_name_scope: bool = False, process_set: Any | None = None
) -> list[Tensor]:
    """Return the ranks' tensors, each concatenated on axis 0, all in one operation."""
    options = {"ignore_name_scope": ignore_name_scope, **ops.in_set(process_set)}
    return _in_groups("grouped_allgather", [_tensor(t) for t in tensors], name=name, **options)


@backend.untraced
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any | None = None,
) -> Tensor:
    """Return the tensor of rank `root_rank`; shape and dtype equal on all ranks."""
    if not 0 <= root_rank < basics.size():
        raise ValueError(f"root_rank must be a rank in [0, {basics.size()}). Received: root_rank={root_rank}")
    options = {"name": name, "ignore_name_scope": ignore_name_scope, **ops.in_set(process_set)}
    return _run("broadcast", [_tensor(tensor)], root_rank, **options)[0]


@backend.untraced
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any | None = None,
) -> Any:
    """Send rows of `tensor` to every rank and return the rows received; with `splits`, also how many from each.

    Args:
        tensor: axis 0 is cut into one piece a rank: equal ones, or of the lengths in `splits`.
        splits: rows for each rank, or None.
        name: equal on all ranks; made from the tensor's if left out.
        ignore_name_scope: leave TensorFlow's name scopes out of the name.
        process_set: ranks that take part; None means all.
    """
    options = {"name": name, "ignore_name_scope": ignore_name_scope, **ops.in_set(process_set)}
    if splits is None:
        return _run("alltoall", [_tensor(tensor)], **options)[0]
    lengths = tf.cast(tf.convert_to_tensor(splits), tf.int32)
    received = _run("alltoall", [_tensor(tensor)], lengths, **options)
    return (received[0], lengths) if basics.running() is None else tuple(received)


@backend.untraced
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = basics.Average,
    name: str | None = None,
    process_set: Any | None = None,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's part, along axis 0, of the reduction of `tensor` over ranks; see `allreduce`."""
    options: dict[str, Any] = {"op": op, "name": name, "ignore_name_scope": ignore_name_scope}
    options |= {"device_dense": device_dense, "postscale_factor": postscale_factor, **ops.in_set(process_set)}
    (wire,), backs = _compressed([_tensor(tensor)], compression)
    return _restored(_run("reducescatter", [_scaled(wire, prescale_factor)], **options), backs)[0]


@backend.untraced
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = basics.Average,
    process_set: Any | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return this rank's part of the reduction of each tensor, all in one operation; see `reducescatter`."""
    options: dict[str, Any] = {"op": op, "device_dense": device_dense, "postscale_factor": postscale_factor}
    options |= ops.in_set(process_set)
    wires, backs = _compressed([_tensor(t) for t in tensors], compression)
    scaled = [_scaled(wire, prescale_factor) for wire in wires]
    return _restored(_in_groups("grouped_reducescatter", scaled, **options), backs)


@backend.untraced
def join() -> Tensor:
    """Wait until every rank has called it; meanwhile add zeros to the others' reductions. Returns the last rank."""
    module = basics.running()
    return tf.constant(0) if module is None else module.join()


def broadcast_object(
    obj: Any, root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any | None = None
) -> Any:
    """Return the root's `obj`, anything that can be pickled, on every rank.

    Args:
        obj: of the root's rank; those of the others are not used.
        root_rank: rank whose object all ranks get.
        session: the session that runs it in a graph of TensorFlow 1; None means the default session.
        name: equal on all ranks; made from the object's type if left out.
        process_set: ranks that take part; None means all.
    """
    if _has_session(session):
        module = basics.running()
        options = {"session": session, "name": name, **ops.in_set(process_set)}
        return obj if module is None else module.broadcast_object(obj, root_rank, **options)
    return ops.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any | None = None
) -> Callable[[Any], Any]:
    """Return `broadcast_object` of these arguments, as a function of the object."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: Any | None = None
) -> list[Any]:
    """Return every rank's `obj`, in rank order; see `broadcast_object`."""
    if _has_session(session):
        module = basics.running()
        options = {"session": session, "name": name, **ops.in_set(process_set)}
        return [obj] if module is None else list(module.allgather_object(obj, **options))
    return ops.allgather_object(obj, name, process_set)


def refuse_session(session: Any) -> None:
    """Raise ValueError for a session where there is no graph of TensorFlow 1."""
    if session is not None:
        raise ValueError(f"Sessions are TensorFlow 1's. Received: session={session!r}")


def _has_session(session: Any) -> bool:
    """Return whether a session, given or the default one, runs the graph of TensorFlow 1 that is being built."""
    if tf.executing_eagerly():
        refuse_session(session)
        return False
    return session is not None or tf.compat.v1.get_default_session() is not None


def _fact(function: str, alone: int) -> Callable[..., Tensor]:
    def ask(*args: Any, **options: Any) -> Tensor:
        module = basics.running()
        return tf.constant(alone) if module is None else getattr(module, function)(*args, **options)

    ask.__name__, ask.__doc__ = function, "An int32 scalar that a graph reads each time it runs."
    untraced: Callable[..., Tensor] = backend.untraced(ask)
    return untraced


size_op, local_size_op = _fact("size_op", 1), _fact("local_size_op", 1)
rank_op, local_rank_op = _fact("rank_op", 0), _fact("local_rank_op", 0)
process_set_included_op = _fact("process_set_included_op", 1)


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks."""
    engine = basics.running()
    return engine is None or bool(engine.is_homogeneous())


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value)


def _compressed(values: list[Tensor], compression: Any) -> tuple[list[Tensor], list[str | None]]:
    """Return `values` as they are sent, and the dtypes to cast the results to; None for their own."""
    pairs = [ops.compressed(value, compression) for value in values]
    return [wire for wire, _ in pairs], [back for _, back in pairs]


def _restored(values: list[Tensor], dtypes: list[str | None]) -> list[Tensor]:
    return [v if dtype is None else tf.cast(v, dtype) for v, dtype in zip(values, dtypes, strict=True)]


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    """Return `tensor` times `factor` in its own dtype, integers cut.

    Horovod multiplies before a reducescatter in its fusion buffer, and refuses tensors that are larger than it. On CPUs
    hvdtrain sets that buffer's size to 0.
    """
    if factor == 1.0:
        return tensor
    if tensor.dtype.is_integer:
        return tf.cast(_whole_scaled(tf.cast(tensor, tf.int64), factor), tensor.dtype)
    wide = tf.float32 if tensor.dtype in (tf.float16, tf.bfloat16, tf.float32) else tf.float64
    return tf.cast(tf.cast(tensor, wide) * tf.constant(factor, wide), tensor.dtype)


def _whole_scaled(numbers: Tensor, factor: float) -> Tensor:
    """Return int64 numbers times `factor`, cut; as Horovod, exact where the factor is whole or 1/n."""
    if divisor := whole_factors.divisor(factor):
        return tf.truncatediv(numbers, divisor)
    if (multiplier := whole_factors.multiplier(factor)) is not None:
        return numbers * multiplier
    is_lost = tf.reduce_any((numbers > LARGEST) | (numbers < -LARGEST))
    message = f"A factor for integers above 2^53 must be whole, or 1/n. Received: {factor}"
    with tf.control_dependencies([tf.debugging.assert_equal(is_lost, False, message)]):
        return tf.cast(tf.cast(numbers, tf.float64) * tf.constant(factor, tf.float64), tf.int64)


def _check_reduction(
    values: list[Tensor],
    *,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: Any | None = None,
    **_: Any,
) -> None:
    """Raise if Horovod has no such reduction, before anything is sent: some of Horovod's own errors come later."""
    if any(isinstance(v, tf.IndexedSlices) for v in values):
        if op not in (basics.Average, basics.Sum):
            raise NotImplementedError(f"tf.IndexedSlices can have op=Average or op=Sum. Received: op={op}")
        if (prescale_factor, postscale_factor) != (1.0, 1.0):
            received = f"prescale_factor={prescale_factor}, postscale_factor={postscale_factor}"
            raise NotImplementedError(f"tf.IndexedSlices cannot be scaled: scale their values. Received: {received}")
    module = basics.running()
    if op != basics.Adasum or module is None or module.size() == 1:
        return
    if process_set is not None and process_set.process_set_id != 0:
        raise NotImplementedError(f"Adasum runs over all ranks. Received: {process_set}")
    if not module.mpi_enabled():
        raise ValueError(
            f"Adasum needs MPI. Received: Gloo as data plane on rank {module.rank()}. Launch with `horovodrun --mpi`, "
            "or use op=Average."
        )
    if module.size() & (module.size() - 1):
        raise NotImplementedError(f"Adasum needs a power of 2 of ranks. Received: {module.size()} ranks")
    kinds = sorted({value.dtype.name for value in values if not value.dtype.is_floating})
    if kinds:
        raise TypeError(f"Adasum combines floats. Received: tensors of {', '.join(kinds)}")


def _in_groups(kind: str, values: list[Tensor], name: str | None = None, **options: Any) -> list[Tensor]:
    """Run a grouped collective of Horovod, which takes tensors of one dtype, once for each dtype."""
    results: list[Tensor] = [None] * len(values)
    for bucket in by_dtype([range(len(values))], [v.dtype.name for v in values]):
        group = [values[i] for i in bucket]
        named = {} if name is None else {"name": f"{name}_{group[0].dtype.name}"}
        for i, result in zip(bucket, _run(kind, group, **named, **options), strict=True):
            results[i] = result
    return results


def _run(kind: str, values: list[Tensor], *args: Any, **options: Any) -> list[Tensor]:
    """Return the results of Horovod's collective `kind`; in one process without Horovod, the results of one rank."""
    module = basics.running()
    if module is None:
        before, after = options.get("prescale_factor", 1.0), options.get("postscale_factor", 1.0)
        return [_scaled(_scaled(value, before), after) for value in values]

    def call() -> list[Tensor]:
        result = getattr(module, kind)(values if kind.startswith("grouped") else values[0], *args, **options)
        return list(result) if isinstance(result, list | tuple) else [result]

    return backend.watched(call, values, lambda: (f"{kind} of {options.get('name') or values[0].name}",))
