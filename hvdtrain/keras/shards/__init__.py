"""Optimizer state in shards: each rank holds 1/N of the slot variables, and updates 1/N of every weight.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stage 1. Keras's
own update runs on this rank's part of each weight, then all ranks gather the weights. Gradients are reduced as without
shards, or, where nothing needs whole ones, each rank gets its part of them (`Shards.reduces_parts`).

Each of Keras's backends has a module here with the functions

    part(gradient, begin, end)                              these numbers of a gradient, in one dimension
    reduce(shards, gradients, names, variables, how)        this rank's parts of reduced gradients; not on torch, where
                                                            a step with whole ones takes no longer. A collective
    step(shards, optimizer, update, gradients, variables)   lets `update(gradients, parts)` change this rank's parts of
                                                            the variables; gives all ranks all parts. A collective
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from hvdtrain.distributed import agreement
from hvdtrain.distributed.division import Division
from hvdtrain.distributed.launch_environment import count_ranks
from hvdtrain.errors import HvdTrainError
from hvdtrain.keras import basics, ops
from hvdtrain.keras.backends import backend_module, number, room_for
from hvdtrain.keras.reduction import GradientReduction
from hvdtrain.system import large_arrays

Array = NDArray[Any]

_OPTIMIZERS = keras.optimizers
# Their update of a number depends on no other number of the weight, nor on other weights.
_ELEMENT_WISE = (
    _OPTIMIZERS.SGD, _OPTIMIZERS.Adam, _OPTIMIZERS.AdamW, _OPTIMIZERS.Nadam, _OPTIMIZERS.Adamax, _OPTIMIZERS.Adadelta,
    _OPTIMIZERS.Adagrad, _OPTIMIZERS.RMSprop, _OPTIMIZERS.Ftrl, _OPTIMIZERS.Lion,
)  # fmt: skip

_STALE = (
    "The optimizer's state is in shards, and this rank holds a part of earlier ranks: an elastic job has others now. "
    "Give the model to hvd.elastic.KerasState, whose sync() divides the last commit among ranks. Received: {ranks}, on "
    "rank {rank}."
)

_PIECE_BYTES = 2**21  # of a value that is divided or gathered


class Slot(keras.Variable):
    """This rank's part of a slot variable, such as a momentum, in one dimension.

    What is saved and loaded is whole: a whole value that is assigned is divided, and `numpy` returns the whole value.

    Attributes:
        whole_shape: the shape of the weight.
        initial: returns initial values.
    """

    shards: Shards
    whole_shape: tuple[int, ...]
    initial: Any

    def renew(self) -> None:
        """Become this rank's part of the present ranks, with initial values."""
        begin, end = self.shards.bounds(math.prod(self.whole_shape))
        self._shape = (end - begin,)
        self._initialize(self.initial(self._shape, dtype=self.dtype))

    def assign(self, value: Any) -> Any:
        """Assign a value of this rank's part, or of the whole slot."""
        given = tuple(np.shape(value) if isinstance(value, list) else value.shape)
        if given == self.whole_shape and given != tuple(self.shape):
            value = self.shards.divide(self, np.asarray(keras.ops.convert_to_numpy(value)))
        return super().assign(value)

    def numpy(self) -> Array:
        """Return the whole value, where `Shards.gather` has gathered it; Keras saves it. RuntimeError elsewhere."""
        return self.shards.whole_of(self)


class Shards:
    """The slot variables of one optimizer over ranks, and the step that each rank takes with its shard.

    Attributes:
        division: says which part is which rank's.
        rank: this process's, in the process set.
        process_set: the ranks; None means all.
        held: what a backend's `step` keeps from step to step, by variable.
        is_stale: True if this rank's parts were those of an elastic job's earlier ranks.
        slots: the variables that are divided.

    Args:
        how: the optimizer's reduction.
        iterations: the optimizer's counter of steps. While it does not change, slots do not change.
    """

    def __init__(self, how: GradientReduction, iterations: Any) -> None:
        self.division, self.rank, self.process_set = Division(how.size()), how.rank(), how.process_set
        self.held: dict[Any, Any] = {}
        self.is_stale, self.slots = False, list[Slot]()
        self._how, self._iterations = how, iterations
        self._loaded, self._gathered = _Whole(), _Whole()

    def bounds(self, numel: int) -> tuple[int, int]:
        """Return where this rank's part of a weight begins and ends."""
        return self.division.bounds(numel, self.rank)

    def slot(self, weight: Any, name: str, initializer: Any) -> Slot:
        """Return a new slot for this rank's part of a weight."""
        begin, end = self.bounds(math.prod(weight.shape))
        dtype = keras.backend.standardize_dtype(weight.dtype)
        slot = Slot(initializer=initializer, shape=(end - begin,), dtype=dtype, trainable=False, name=name)
        slot.shards, slot.whole_shape = self, tuple(int(n) for n in weight.shape)
        slot.initial = keras.initializers.get(initializer)
        self.slots.append(slot)
        large_arrays.give_back_after((end - begin) * np.dtype(dtype).itemsize)  # TensorFlow copies initial values
        return slot

    def follow_ranks(self) -> None:
        """Divide by the present ranks from now on: an elastic job may have other ones than before.

        The state then has initial values, until another one is loaded or `put`. Compile steps again.
        """
        ranks = self._how.size(), self._how.rank()
        if ranks == (self.division.size, self.rank):
            return
        self.division, self.rank = Division(ranks[0]), ranks[1]
        self.is_stale |= number(self._iterations) > 0
        self.held.clear()
        self._loaded, self._gathered = _Whole(), _Whole()
        for slot in self.slots:
            slot.renew()

    def check_ranks(self) -> None:
        """Raise HvdTrainError if parts were those of an elastic job's earlier ranks."""
        if self.is_stale or (self._how.size(), self._how.rank()) != (self.division.size, self.rank):
            raise HvdTrainError(_STALE.format(rank=basics.rank(), ranks=count_ranks(self._how.size())))

    def put(self, parts: Mapping[int, NDArray[np.uint8]]) -> None:
        """Replace this rank's parts of slots, by their place, by copies of these bytes."""
        self._loaded, self._gathered, self.is_stale = _Whole(), _Whole(), False
        for place, part in parts.items():
            slot = self.slots[place]
            keras.Variable.assign(slot, part.view(np.dtype(slot.dtype)))

    def step(
        self, optimizer: Any, update: Callable[[list[Any], list[Any]], None], gradients: list[Any], variables: list[Any]
    ) -> None:
        """Update this rank's parts of variables, and give all ranks all parts. A collective; in a graph it is traced.

        Args:
            optimizer: the `DistributedMixin`.
            update: takes gradients and variables, as Keras's `_backend_update_step`.
            gradients: this rank's parts of reduced gradients.
            variables: the weights.
        """
        self.check_ranks()
        self._backend.step(self, optimizer, update, gradients, variables)

    def parts(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return this rank's parts of whole gradients."""
        bounds = (self.bounds(math.prod(variable.shape)) for variable in variables)
        return [self._backend.part(g, begin, end) for g, (begin, end) in zip(gradients, bounds, strict=True)]

    def reduces_parts(self, optimizer: Any) -> bool:
        """Say whether each rank gets its part alone of reduced gradients: an alltoall and a sum, not an allreduce.

        Over two ranks of a host, 36 MB took 7 ms instead of 11. Between hosts of R ranks, an alltoall sends up to R
        times the gradients from each host, an allreduce twice the gradients. Norms are of whole gradients, and so are
        reports of skipped updates. NumPy adds float16 numbers slowly.

        Args:
            optimizer: the `DistributedMixin`.
        """
        how, needs_whole = self._how, optimizer.clipnorm or optimizer.global_clipnorm or optimizer.reports_updates
        is_float16 = how.compression.wire == "float16"
        is_sent_whole = how.compression.scheme is not None or is_float16 or how.groups is not None or how.predivide != 1
        can = hasattr(self._backend, "reduce") and basics.has_small_hosts()
        return can and not needs_whole and not is_sent_whole

    def reduced_parts(self, gradients: list[Any], names: Sequence[str], variables: Sequence[Any]) -> list[Any]:
        """Return this rank's parts of gradients of variables, reduced over ranks; a collective."""
        return self._backend.reduce(self, gradients, names, variables, self._how)  # type: ignore[no-any-return]

    @property
    def _backend(self) -> Any:
        return importlib.import_module(f"hvdtrain.keras.shards.{keras.backend.backend()}")

    def divide(self, slot: Slot, whole: Array) -> Array:
        """Return this rank's part of a value that is loaded. `spread` knows it until the next step."""
        self._loaded.put(slot, whole, number(self._iterations))
        self._gathered = _Whole()
        begin, end = self.bounds(whole.size)
        return np.ascontiguousarray(whole.reshape(-1)[begin:end])

    def divide_later(self, slot: Slot, read: Callable[[int, int], Array]) -> None:
        """Take the numbers that `read(first, last)` returns of the whole value, when `spread` divides it."""
        self._loaded.put(slot, read, number(self._iterations))
        self._gathered = _Whole()

    def spread(self, root_rank: int) -> None:
        """Divide what the root has loaded since its last step among ranks. A collective.

        If it has loaded nothing, each rank keeps its parts.

        Args:
            root_rank: among all ranks.

        Raises:
            CheckpointError: on the root, if it cannot read what it has loaded; an OtherRankError on the other ranks.
        """
        self.follow_ranks()
        loaded, self._loaded, self._gathered = self._loaded, _Whole(), _Whole()
        values = loaded.values(number(self._iterations))
        is_root = basics.rank() == root_rank
        mine = [index for index, slot in enumerate(self.slots) if id(slot) in values] if is_root else None
        common: dict[str, Any] = {"name": "hvdtrain.shards.spread", "process_set": self.process_set}
        error: Exception | None = None

        def sent(slot: Slot, first: int, last: int) -> Array:
            nonlocal error
            if is_root and error is None:
                try:
                    value = values[id(slot)]
                    return value(first, last) if callable(value) else value.reshape(-1)[first:last]  # type: ignore[no-any-return]
                except Exception as caught:  # noqa: BLE001 - the other ranks wait
                    error = caught
            return np.zeros(last - first, slot.dtype)

        indices = ops.broadcast_object(mine, root_rank, **common)
        for slot in map(self.slots.__getitem__, indices):
            backend_module().give(slot, self._part_of(slot, partial(sent, slot), root_rank, common))
        if indices:
            self.is_stale = False
            agreement.raise_on_all(
                error, root_rank=root_rank, broadcast=lambda text: ops.broadcast_object(text, root_rank, **common)
            )

    def _part_of(self, slot: Slot, read: Callable[[int, int], Array], root_rank: int, common: dict[str, Any]) -> Array:
        """Return this rank's part of the value that the root reads and sends in pieces; a collective."""
        dtype, numel = np.dtype(slot.dtype), math.prod(slot.whole_shape)
        begin, end = self.bounds(numel)
        part, length = room_for(slot), _PIECE_BYTES // dtype.itemsize
        for first in range(0, numel, length):
            last = min(first + length, numel)
            piece = read(first, last).astype(dtype, copy=False)
            received = ops.call("broadcast", piece.view(np.uint8), root_rank, **common).view(dtype)
            low, high = max(begin, first), min(end, last)
            if low < high:
                part[low - begin : high - begin] = received[low - first : high - first]
        return part

    def whole(self, slot: Slot, to: int | None) -> Array | None:
        """Gather one slot on the host of a rank, in pieces; a collective.

        Args:
            slot: of this optimizer.
            to: the rank of the process set that gets it; None: all ranks.

        Returns:
            An array of the weight's shape; None on other ranks.
        """
        common: dict[str, Any] = {"name": "hvdtrain.shards.gather", "process_set": self.process_set}
        part, size, numel = backend_module().on_host(slot), self.division.size, math.prod(slot.whole_shape)
        # In a list, which is empty afterwards: TensorFlow's errors may keep this frame until garbage is collected.
        found = [large_arrays.empty((numel,), part.dtype)] if to in (None, self.rank) else []
        length, step = self.division.length(numel), max(1, _PIECE_BYTES // part.dtype.itemsize // size)
        for begin in range(0, length, step):
            sent = part[begin : begin + step].view(np.uint8)
            if to is None:
                received = ops.call("allgather", sent, **common)
            else:
                splits = np.zeros(size, np.int32)
                splits[to] = sent.size
                received, _ = ops.call("alltoall", sent, splits, **common)
            if not found:
                continue
            pieces, done = received.view(part.dtype), 0
            for first in range(begin, numel, length):  # of each rank, in their order
                last = min(first + step, first - begin + length, numel)
                found[0][first:last] = pieces[done : done + last - first]
                done += last - first
        return found.pop().reshape(slot.whole_shape) if found else None

    def gather(self, to: int | None) -> None:
        """Gather all slots, which `Slot.numpy` returns until the next step; a collective. See `whole`."""
        found = _Whole()
        for slot in self.slots:
            value = self.whole(slot, to)
            if value is not None:
                found.put(slot, value, number(self._iterations))
        self._gathered = found

    def whole_of(self, slot: Slot) -> Array:
        """Return the whole value of a slot that was gathered; RuntimeError if it was not, or a step was taken since."""
        values = self._gathered.values(number(self._iterations))
        if id(slot) not in values:
            raise RuntimeError(
                "The optimizer's state is in shards: each rank holds a part. On every rank, call "
                "optimizer.consolidate_state_dict(to=0) before rank 0 saves; the optimizer is model.optimizer, or with "
                "loss scaling model.optimizer.inner_optimizer. "
                f"Received: a read of {slot.path} on rank {basics.rank()}."
            )
        found: Array = values[id(slot)]
        return found


class _Whole:
    """Whole values of slots, of the time when an optimizer had taken so many steps."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}  # arrays, or functions that read them
        self._iterations = -1.0

    def put(self, slot: Slot, value: Array | Callable[[int, int], Array], iterations: float) -> None:
        """Add a value; forget those of another step."""
        if iterations != self._iterations:
            self._values, self._iterations = {}, iterations
        self._values[id(slot)] = value

    def values(self, iterations: float) -> dict[int, Any]:
        """Return the values by the `id` of the slot, if they are of this step; else none."""
        return self._values if iterations == self._iterations else {}


def check(optimizer: Any) -> None:
    """Raise ValueError unless the state of a plain optimizer, or of one with loss scaling, can be sharded."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    kind = type(optimizer)
    # On torch, Keras's classes have subclasses, with the same arithmetic on all weights together.
    is_known = kind in _ELEMENT_WISE or (
        kind.__module__.startswith("keras.src.") and kind.__bases__[-1] in _ELEMENT_WISE
    )
    if not is_known:
        names = ", ".join(each.__name__ for each in _ELEMENT_WISE)
        raise ValueError(
            "With a sharded state, each rank updates a part of each weight, so the update of a number must not depend "
            f"on others. Known to be so: keras.optimizers' {names}. Received: {kind.__module__}.{kind.__qualname__}. "
            "Use one of these, or no shards."
        )
    if optimizer.use_ema:
        raise ValueError(
            "With a sharded state, no rank has whole moving averages, by which Keras replaces the weights. Received: "
            f"{kind.__name__}(use_ema=True). Use no shards, or no averages."
        )


def whole_shape(variable: Any) -> tuple[int, ...]:
    """Return the shape in which a variable is saved."""
    return variable.whole_shape if isinstance(variable, Slot) else tuple(variable.shape)


def shards_of(variables: Sequence[Any]) -> list[Shards]:
    """Return the shards whose slots are among variables, in their order."""
    return list({id(v.shards): v.shards for v in variables if isinstance(v, Slot)}.values())
