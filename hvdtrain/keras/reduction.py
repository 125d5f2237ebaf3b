"""The reduction of gradients, on every backend: compression, and the options of a DistributedOptimizer.

Each backend does the casts in its own graph; the compressors say which, and stand in for Horovod's of the same name.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras

from hvdtrain.distributed import compression as schemes
from hvdtrain.distributed import launch_environment
from hvdtrain.distributed.buckets import ON_HOST
from hvdtrain.distributed.compression import Int8, PowerSGD, Scheme, TopK
from hvdtrain.keras import basics


class Compressor:
    """The form in which gradients are sent; `wire` is the name of the sent dtype, None for their own."""

    name = "none"  # in `Trainer(compression=...)`
    wire: str | None = None
    # With which ranks remember what they have not sent; see `hvdtrain.keras.error_feedback`.
    scheme: Scheme | None = None

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, str | None]:
        """Return `tensor` as it is sent, and its dtype, to which `decompress` casts; None if nothing was cast."""
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        wire = cls.wire or ("float32" if dtype == "bfloat16" else None)  # Horovod cannot add bfloat16 up
        if wire is None or not dtype.startswith(("float", "bfloat")):
            return tensor, None
        return keras.ops.cast(tensor, wire), dtype

    @classmethod
    def decompress(cls, tensor: Any, ctx: str | None) -> Any:
        """Return `tensor` in the dtype that `compress` noted."""
        return tensor if ctx is None else keras.ops.cast(tensor, ctx)


class NoneCompressor(Compressor):
    """Gradients are sent as they are; bfloat16, which Horovod cannot add up, as float32."""


class FP16Compressor(Compressor):
    """Gradients are sent and summed as float16: half the bytes, a range of 6e-8 to 65504."""

    name, wire = "fp16", "float16"


class BF16Compressor(Compressor):
    """Gradients are sent as bfloat16 and summed in float32: half the bytes, float32's range, 8 bits of precision."""

    name, wire = "bf16", "bfloat16"


class SchemeCompressor(Compressor):
    """Gradients are sent in fewer bytes; each rank remembers what it has left out (`hvdtrain.distributed.compression`).

    Each optimizer has a memory of its own, which this class has not.
    """

    def __init__(self, scheme: Scheme) -> None:
        self.scheme, self.name = scheme, str(scheme)

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, str | None]:
        """Raise NotImplementedError: a tensor alone has no memory."""
        raise NotImplementedError("This compression is for the gradients of an optimizer only.")


class Compression:
    """The choices for `DistributedOptimizer(compression=...)`.

    `int8`, `topk(fraction)` and `powersgd(rank, after_steps)` are for the gradients of an optimizer: they remember what
    they have left out, and add it to the next gradient.
    """

    none = NoneCompressor  # classes, as Horovod's are
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = SchemeCompressor(Int8())

    @staticmethod
    def topk(fraction: float) -> Compressor:
        """Return what sends the largest numbers of each gradient; see `hvdtrain.TopK`."""
        return SchemeCompressor(TopK(fraction))

    @staticmethod
    def powersgd(rank: int = 4, after_steps: int = PowerSGD.after_steps) -> Compressor:
        """Return what sends matrices as products of narrow ones; see `hvdtrain.PowerSGD`."""
        return SchemeCompressor(PowerSGD(rank, after_steps))


_TYPES = {each.name: each for each in (NoneCompressor, FP16Compressor, BF16Compressor)}


def resolve(compression: Any) -> Compressor:
    """Return the compressor meant by `compression`.

    Args:
        compression: ours, or Horovod's or hvdtrain.torch's of the same name; a name or a scheme of
            `hvdtrain.distributed.compression`.

    Raises:
        ValueError: it is none of these, or an option is outside its range.
    """
    if isinstance(compression, str | Scheme):
        found = schemes.parse(compression)
        return _TYPES[found]() if isinstance(found, str) else SchemeCompressor(found)
    if isinstance(compression, Compressor):
        return compression
    if isinstance(compression, type) and issubclass(compression, Compressor):
        return compression()
    theirs = getattr(compression, "scheme", None)  # of a compressor of hvdtrain.torch
    if isinstance(theirs, Scheme):
        return SchemeCompressor(theirs)
    name = getattr(compression, "__name__", type(compression).__name__)
    for ours in _TYPES.values():
        if name == ours.__name__:
            return ours()
    if name == "Int8Compressor":
        return SchemeCompressor(Int8())
    raise ValueError(
        "compression must be Compression.none, .fp16, .bf16, .int8, .topk(0.01) or .powersgd(4), or a name or an "
        f"object of these as for the Trainer. Received: {compression!r}"
    )


def without_memory(compression: Any) -> Compressor:
    """Return the compressor for tensors that have no next step; ValueError for one that remembers gradients."""
    found = resolve(compression)
    if found.scheme is not None:
        raise ValueError(
            "This compression remembers what it has left out of each gradient, so it is for DistributedOptimizer and "
            f"the Trainer only. Received: {found.name}. Use none, fp16 or bf16 here."
        )
    return found


@dataclass(frozen=True)
class GradientReduction:
    """The options of a reduction of gradients over ranks, equal on all of them; see `DistributedOptimizer`."""

    op: int = basics.Average
    compression: Compressor = field(default_factory=NoneCompressor)
    factor: float = 1.0  # of the result: undoes Keras's division by the accumulation steps where sums are wanted
    predivide: float = 1.0  # divides before the sum and multiplies after it, to keep float16 sums in range
    sparse_as_dense: bool = False
    groups: int | list[list[Any]] | None = None  # each travels as one; None: Horovod fuses as it likes
    process_set: Any | None = None
    device_dense: str = ""
    device_sparse: str = ""
    scale_local_gradients: bool = True
    name: str = ""
    shard_state: bool = False  # each rank holds 1/N of the optimizer's slot variables
    local_variables: list[Any] = field(default_factory=list)

    def size(self) -> int:
        """Number of ranks that take part; 0 where this one does not."""
        return basics.members(self.process_set)

    def rank(self) -> int:
        """This process's number among them."""
        module = basics.running()
        return 0 if module is None else int((self.process_set or module).rank())

    def active(self) -> bool:
        """True if gradients are reduced: in an elastic job also on one rank, whose compiled step may get more."""
        size = self.size()
        return size > 1 or (size == 1 and launch_environment.reduces_alone() and basics.running() is not None)

    @property
    def sum_factor(self) -> float:
        """The factor that turns a sum over ranks into the result."""
        return self.factor / (self.size() if self.op == basics.Average else 1)

    @property
    def scales(self) -> dict[str, float]:
        """Horovod's `prescale_factor` and `postscale_factor`."""
        return {"prescale_factor": 1.0 / self.predivide, "postscale_factor": self.predivide * self.factor}

    def buckets(self, variables: Sequence[Any]) -> list[list[int]] | None:
        """Return groups of positions in `variables` to reduce together; None if Horovod may fuse as it likes."""
        count = len(variables)
        if self.groups is None:
            return None
        if isinstance(self.groups, int):
            number = min(self.groups, count)
            edges = [round(i * count / number) for i in range(number + 1)]
            return [list(range(*pair)) for pair in itertools.pairwise(edges)]
        home = {identity(v): number for number, group in enumerate(self.groups) for v in group}
        found: dict[int, list[int]] = {}
        for position, variable in enumerate(variables):
            found.setdefault(home.get(identity(variable), -1 - position), []).append(position)
        return list(found.values())


def reduction_of(
    *,
    op: int,
    compression: Any,
    gradient_predivide_factor: float,
    groups: int | list[list[Any]] | None,
    num_groups: int,
    device_dense: str,
    device_sparse: str,
    **settings: Any,
) -> GradientReduction:
    """Return the reduction of a user's arguments, under Horovod's names for them; ValueError if it cannot be done."""
    if op not in (basics.Average, basics.Sum):
        raise ValueError(f"op must be hvd.Average or hvd.Sum. Received: op={op!r}")
    if gradient_predivide_factor <= 0 or (gradient_predivide_factor != 1.0 and op != basics.Average):
        received = f"gradient_predivide_factor={gradient_predivide_factor}, op={op}"
        raise ValueError(f"gradient_predivide_factor must be positive and needs op=Average. Received: {received}")
    groups = groups if groups is not None else (num_groups or None)
    in_lists = isinstance(groups, list) and all(isinstance(group, list) for group in groups)
    if not (groups is None or in_lists or (isinstance(groups, int) and groups > 0)):
        raise ValueError(f"groups must be a positive integer or lists of variables. Received: {groups!r}")
    compressor = resolve(compression)
    if compressor.scheme is not None and groups is not None:
        raise ValueError(
            f"compression={compressor.name} sends all gradients together. Leave out groups. Received: groups={groups!r}"
        )
    devices = {"device_dense": device_dense, "device_sparse": device_sparse}
    if any(devices.values()) and keras.backend.backend() != "tensorflow":
        raise ValueError(f"Devices are TensorFlow's; Keras runs on {keras.backend.backend()}. Received: {devices}")
    return GradientReduction(
        op=op,
        compression=compressor,
        predivide=float(gradient_predivide_factor),
        groups=groups,
        device_dense=device_dense,
        device_sparse=device_sparse,
        **settings,
    )


def small_together(nbytes: Sequence[int], *, limit: int = ON_HOST.alone, room: int = 2**22) -> list[list[int]]:
    """Return positions of tensors that are sent together: each large tensor alone, small ones together.

    A small tensor, of fewer bytes than `limit`, costs a round of messages, whatever its size; a large one a copy in and
    out, if sent with others. At most `room` bytes are sent together.
    """
    buckets: list[list[int]] = []
    bucket: list[int] = []
    filled = room + 1
    for position in reversed(range(len(nbytes))):  # about the order in which backward makes gradients
        size = nbytes[position]
        if size >= limit:
            buckets.append([position])
            continue
        if filled + size > room:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(position)
        filled += size
    return buckets


def by_dtype(buckets: Sequence[Sequence[int]], dtypes: Sequence[str]) -> list[list[int]]:
    """Return `buckets` of positions, each cut into as many as it has dtypes."""
    return [
        [i for i in bucket if dtypes[i] == dtype] for bucket in buckets for dtype in sorted({dtypes[i] for i in bucket})
    ]


def identity(variable: Any) -> int:
    """Return the id of the backend's variable: Keras wraps those, and users may hold either."""
    if keras.backend.backend() == "jax":
        return id(variable)  # its value is another array after every step
    return id(getattr(variable, "_value", variable))
