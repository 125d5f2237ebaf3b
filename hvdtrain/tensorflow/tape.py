"""DistributedGradientTape: a tf.GradientTape whose gradients are reduced over ranks."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import tensorflow as tf

from hvdtrain.keras.backends import tensorflow as backend
from hvdtrain.keras.basics import Average
from hvdtrain.keras.reduction import Compression, GradientReduction, identity, reduction_of, without_memory
from hvdtrain.keras.variables import path, without_counters
from hvdtrain.keras.wrapping import weights_of


class DistributedTape(tf.GradientTape):
    """The base class that `DistributedGradientTape` puts before the class of the user's tape."""

    __slots__ = ("_hvd_how",)  # not among the attributes, which are those of the user's tape
    _hvd_how: GradientReduction

    @backend.untraced
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        *,
        use_generic_names: bool = False,
    ) -> Any:
        """Return the gradients of `target`, reduced over ranks, in the structure of `sources`.

        The arguments are those of tf.GradientTape.gradient. `target` is local to this rank; `sources` are variables,
        equal on all ranks and in the same order. With `use_generic_names`, gradients are named by position alone, for
        ranks whose variables have different names.
        """
        gradients = super().gradient(target, sources, output_gradients, unconnected_gradients)
        if not self._hvd_how.active():
            return gradients
        reduced = self._reduce(tf.nest.flatten(gradients), tf.nest.flatten(sources), use_generic_names)
        return tf.nest.pack_sequence_as(gradients, reduced)

    def register_local_source(self, source: Any) -> None:
        """Do not reduce the gradient of `source`; scale it by 1 / size unless scale_local_gradients is False."""
        self._hvd_how.local_variables.append(source)

    @backend.untraced
    def get_local_and_global_gradients(self, target: Any, sources: Any, *args: Any, **options: Any) -> tuple[Any, Any]:
        """Return pairs of a source and its gradient: first for local sources, then for sources that were reduced."""
        pairs = list(zip(sources, self.gradient(target, sources, *args, **options), strict=True))
        local = self._local()
        return [p for p in pairs if identity(p[0]) in local], [p for p in pairs if identity(p[0]) not in local]

    def _local(self) -> set[int]:
        return {identity(v) for v in self._hvd_how.local_variables}

    def _reduce(self, gradients: list[Any], sources: list[Any], use_generic_names: bool) -> list[Any]:
        how, local = self._hvd_how, self._local()
        given = [i for i, g in enumerate(gradients) if g is not None]
        shared = [i for i in given if identity(sources[i]) not in local]
        if how.scale_local_gradients and len(shared) < len(given):
            for i in set(given) - set(shared):
                gradients[i] = _divided(gradients[i], backend.number_of_ranks(how))
        if shared:
            chosen = [sources[i] for i in shared]
            names = [f"{i}.{'grad' if use_generic_names else without_counters(path(sources[i]))}" for i in shared]
            # Names depend on the sources alone, so that they are equal on a rank that traces again, and on a new rank
            # of an elastic job.
            prefix = f"DistributedGradientTape.{zlib.crc32('|'.join(names).encode()):08x}"
            reduced = backend.reduce_gradients(
                [gradients[i] for i in shared], [f"{prefix}.{name}" for name in names], chosen, how
            )
            for i, gradient in zip(shared, reduced, strict=True):
                gradients[i] = gradient
        return gradients


def _divided(gradient: Any, by: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_divided(gradient.values, by), gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(by, gradient.dtype)


@backend.untraced
def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: Any | None = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape that continues `gradtape` and whose `gradient` reduces gradients over ranks.

    With op=Average every rank counts the same. If ranks have batches of different lengths, divide the sum of the losses
    by the number of samples on all ranks, and pass op=Sum: then every sample counts the same, as in one process.

    Args:
        gradtape: a tf.GradientTape, before or after it has recorded.
        device_dense: TensorFlow device of the reductions.
        device_sparse: likewise, for tf.IndexedSlices.
        compression: the type in which gradients are sent: Compression.none, .fp16 or .bf16.
        sparse_as_dense: reduce tf.IndexedSlices as dense tensors instead of gathering their rows.
        op: Average or Sum.
        gradient_predivide_factor: divide before the sum and multiply after it; with op=Average only.
        num_groups: Horovod's older name of `groups`, for a number.
        groups: number of groups, or lists of variables; each group is reduced in one operation.
        process_set: ranks that take part; None for all.
        scale_local_gradients: divide the gradients of local sources by the number of ranks.
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"gradtape must be a tf.GradientTape. Received: {gradtape!r}")
    if isinstance(gradtape, DistributedTape):
        raise ValueError("The tape is already distributed: its gradients would be reduced twice.")
    how = reduction_of(
        op=op,
        compression=without_memory(compression),
        gradient_predivide_factor=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        groups=groups,
        num_groups=num_groups,
        process_set=process_set,
        device_dense=device_dense,
        device_sparse=device_sparse,
        scale_local_gradients=scale_local_gradients,
    )
    cls: Any = type(gradtape)
    tape = object.__new__(_distributed_class(cls))
    tape.__dict__ = gradtape.__dict__  # one tape, whichever of the two the script enters, leaves or asks
    tape._hvd_how = how
    return tape


@functools.cache
def _distributed_class(cls: Any) -> Any:
    return DistributedTape if cls is tf.GradientTape else type(cls.__name__, (DistributedTape, cls), {})


@backend.untraced
def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[Any]] | None = None,
    process_set: Any | None = None,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a `DistributedGradientTape` that does not reduce the gradients of `local_layers`: a layer or several.

    Each rank trains the variables of these layers on its own. The other arguments are those of
    `DistributedGradientTape`.
    """
    local = weights_of(local_layers)
    how = (device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups, groups)
    tape = DistributedGradientTape(gradtape, *how, process_set, scale_local_gradients)
    for variable in local:
        tape.register_local_source(variable)
    return tape
