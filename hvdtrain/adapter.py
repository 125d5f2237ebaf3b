"""The contract between the Trainer and a framework, on one screen.

The Trainer decides what happens and when. An adapter does it with one framework, whose folder has `make_adapter`. An
adapter reduces over ranks in its optimizer. It reads the world size from World, and uses its own rank in messages only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdtrain.checkpoint import Kind, StoredArray, StoredArrays, kind_of
from hvdtrain.data.prefetch import Prefetch
from hvdtrain.data.sources import Batch
from hvdtrain.distributed import checksums
from hvdtrain.distributed.shard_commits import ShardCommits
from hvdtrain.telemetry.memory import Held

Reduce = Callable[[NDArray[np.float64]], NDArray[np.float64]]
Ranks = Literal["all", "host", "none"]


# What a strategy may need of an adapter: to read and write weights before the first step, to step without other ranks
# (`reduce_over("none")`) or with those of its host, to average weights during steps, `delay`, or `open_step`.
Need = Literal["weights", "lone steps", "host steps", "weights in flight", "delay", "open steps"]


@dataclass(frozen=True)
class Refusal:
    """Something that an adapter cannot do for one of these needs, with the reason and an alternative."""

    needs: tuple[Need, ...]
    received: str
    reason: str


@dataclass(frozen=True)
class Needs:
    """The needs that an option of the Trainer has of an adapter."""

    option: str  # as messages name it
    reason: str
    needs: tuple[Need, ...]

    def check(self, refusals: Iterable[Refusal]) -> None:
        """Raise ValueError if one of an adapter's refusals is of what is needed."""
        for refusal in refusals:
            if set(refusal.needs) & set(self.needs):
                raise ValueError(f"With {self.option}, {self.reason}. Received: {refusal.received}: {refusal.reason}.")


@dataclass(frozen=True)
class Options:
    """The Trainer's options that concern a framework; `Trainer` explains each."""

    accumulate: int = 1
    clip_norm: float | None = None
    precision: str = "fp32"
    compression: str = "none"  # as `hvdtrain.distributed.compression.parse` takes it
    nan_policy: str | None = None
    micro_batch: int | str | None = None
    cutoff: bool = False  # steps are `OpenStep`s
    checkpoint_activations: Any = False
    shard: str | None = None  # each rank holds 1/N of the optimizer's state; with "gradients" also of these
    needs: Needs | None = None  # of a strategy or of cutoff, which exclude each other


def shard_refusals(options: Options) -> Iterator[Refusal]:
    """Yield what ranks that hold shards must do together in every step."""
    if options.shard is not None:
        reason = "ranks update parts of the weights, and gather them in every step"
        needs: tuple[Need, ...] = ("lone steps", "host steps", "weights in flight", "delay", "open steps")
        yield Refusal(needs, f"shard={options.shard!r}", reason)


@dataclass(frozen=True)
class Loss:
    """The loss of a batch: `step` returns it.

    Args:
        mean: the loss to minimize: a mean, as a tensor of one element.
        count: what the mean was divided by, such as the number of tokens; None for the number of samples. A number, or
            a tensor of one element; the host waits for a tensor on a GPU. With 0 the batch adds nothing to gradient and
            loss, and its mean may be NaN, except in a model with a SyncBatchNorm; metrics take its outputs and targets.
        outputs: what metrics take as outputs.
        targets: what metrics take as targets.
    """

    mean: Any
    count: Any = None
    outputs: Any = field(default=None, kw_only=True)
    targets: Any = field(default=None, kw_only=True)


class HostArrays(Mapping[str, NDArray[Any]]):
    """Tensors by name, as arrays on the host: one is copied there when it is read, and not kept.

    So a rank that reads one after the other never holds a second copy of everything, and one that reads none copies
    none.

    Args:
        tensors: the framework's, NumPy's arrays, or arrays in a file.
        read: returns a tensor of the framework as an array, of its memory where possible.
        kind: returns the shape and type of this array.
        digest: returns the digest of a tensor's bits; by default that of the array.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        read: Callable[[Any], NDArray[Any]] = np.asarray,
        kind: Callable[[Any], Kind] = kind_of,
        digest: Callable[[Any], bytes] | None = None,
    ) -> None:
        self._tensors, self._read, self._kind, self._digest = dict(tensors), read, kind, digest

    def __getitem__(self, name: str) -> NDArray[Any]:
        tensor = self._tensors[name]
        if isinstance(tensor, StoredArray):
            return tensor.read()
        return tensor if isinstance(tensor, np.ndarray) else self._read(tensor)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors  # Mapping's would read it

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __or__(self, others: Mapping[str, NDArray[Any]]) -> HostArrays:
        return self._of({**self._tensors, **host_arrays(others)._tensors})

    def only(self, keep: Callable[[str], bool]) -> HostArrays:
        """Return the arrays whose names are to be kept."""
        return self._of({name: tensor for name, tensor in self._tensors.items() if keep(name)})

    def renamed(self, names: Mapping[str, str]) -> HostArrays:
        """Return arrays by new names, each of which stands for the present one."""
        return self._of({new: self._tensors[name] for new, name in names.items()})

    def _of(self, tensors: Mapping[str, Any]) -> HostArrays:
        return HostArrays(tensors, self._read, self._kind, self._digest)

    def tensor(self, name: str) -> Any:
        """Return what an array is read from: a tensor of the framework's, or an array."""
        return self._tensors[name]

    def is_stored(self, name: str) -> bool:
        """Return whether an array is in a file."""
        return isinstance(self._tensors[name], StoredArray)

    def piece(self, name: str, first: int, last: int) -> NDArray[Any]:
        """Return the numbers `first` to `last` of an array in one dimension; of one in a file, no others are read."""
        tensor = self._tensors[name]
        if isinstance(tensor, StoredArray):
            return tensor.read_piece(first, last)
        return self[name].reshape(-1)[first:last]

    def take(self, name: str) -> NDArray[Any]:
        """Return an array in memory that is nobody else's."""
        return self[name] if self.is_stored(name) else np.array(self[name])

    def kind(self, name: str) -> Kind:
        """Return the shape and type of an array, which is not read."""
        tensor = self._tensors[name]
        if isinstance(tensor, StoredArray):
            return tensor.kind
        return kind_of(tensor) if isinstance(tensor, np.ndarray) else self._kind(tensor)

    def digest(self, name: str) -> bytes:
        """Return the digest of an array's bits, type and shape."""
        tensor = self._tensors[name]
        if self._digest is None or isinstance(tensor, (np.ndarray, StoredArray)):
            return checksums.of_array(self[name])
        return self._digest(tensor)


def host_arrays(arrays: Mapping[str, NDArray[Any]]) -> HostArrays:
    """Return arrays, perhaps those of a file, as `HostArrays`; none is read."""
    if isinstance(arrays, HostArrays):
        return arrays
    return HostArrays(arrays.stored if isinstance(arrays, StoredArrays) else arrays)


@dataclass(frozen=True)
class ShardedArray:
    """An array of which each rank holds a part.

    Attributes:
        kind: the shape and type of the whole array.
        gather: returns the whole array on the root, and None elsewhere; if its argument is True, the array on all
            ranks. A collective.
    """

    kind: Kind
    gather: Callable[[bool], NDArray[Any] | None]


@dataclass
class State:
    """The state that training changes in the same way on all ranks: arrays by name, and JSON values."""

    # Names begin with "model." or "optimizer.". An adapter's are `HostArrays`.
    arrays: dict[str, NDArray[Any]] | HostArrays = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)  # settings of the optimizer, state of the precision scaler
    per_rank: frozenset[str] = frozenset()  # arrays that each rank changes by itself until `Adapter.average_buffers`
    trained: frozenset[str] = frozenset()  # arrays that gradients change
    frozen: frozenset[str] = frozenset()  # weights that are not trained; statistics and other buffers are not weights
    pending: frozenset[str] = frozenset()  # arrays of an update that is still to be made
    # Arrays that are not in `arrays`. Their order is equal on all ranks, which gather them one after the other.
    sharded: dict[str, ShardedArray] = field(default_factory=dict)
    elsewhere: frozenset[str] = frozenset()  # arrays that `load_state` is not given: ranks keep their parts of them
    everywhere: bool = False  # True if each rank has all arrays, and loads them; else the root alone does
    # What this rank holds of arrays in `sharded`, and the ranks of `World.part_set` hold alike; for `SyncCheck`.
    part: Mapping[str, Any] = field(default_factory=dict)

    def kind(self, name: str) -> Kind:
        """Return the shape and type of one of `arrays`, which is not read."""
        return host_arrays(self.arrays).kind(name)

    def copied(self) -> State:
        """Return a copy, with the whole of arrays in parts, in this rank's memory; a collective."""
        whole = {name: np.asarray(each.gather(True)) for name, each in self.sharded.items()}
        arrays = {name: np.array(each) for name, each in self.arrays.items()} | whole
        return replace(self, arrays=arrays, sharded={}, part={}, everywhere=True)

    def digest(self, name: str) -> bytes:
        """Return the digest of the bits, type and shape of an array, or of one in `part`."""
        arrays = self.arrays if name in self.arrays else self.part
        return arrays.digest(name) if isinstance(arrays, HostArrays) else checksums.of_array(arrays[name])


@dataclass(frozen=True)
class Fault:
    """The reason why no rank took a step: a reduced gradient, equal on all ranks, is not finite."""

    reduced: str | None  # name of the first such parameter; None if only another rank knows it
    own: str | None  # the first parameter whose gradient is not finite on this rank, before the reduction
    loss: float  # this rank's mean over its batches
    batches: Sequence[Batch] | None = None  # of that step; None for the last one
    steps_ago: int = 0  # how many steps before all ranks learn of it; 0 unless ranks step alone or with a delay
    in_a_row: int | None = None  # steps that a rank did not take, up to now; None where every step reports a fault
    is_late: bool = False  # True if the step was already taken when ranks learn of the fault
    is_restored: bool = False  # True if the gradient comes from a checkpoint, which does not say what made it
    is_by_loss: bool = False  # True if, instead of `own`, the loss shows that this rank's samples are the cause


@dataclass
class OpenStep:
    """A step that may close before every rank is done (`Trainer(cutoff=...)`).

    A rank reads and computes its batches one by one. When the step closes, ranks average what they have contributed.
    """

    planned: NDArray[np.int64]  # batches by rank, at most, equal on all ranks: shape (size,)
    whole: NDArray[np.int64]  # what is planned unless a record is repeated; what is missing of it was cut
    samples: int  # over all ranks, in the batches of `whole`
    needed: int  # the step closes when so many of the ranks that have batches are done
    read: Callable[[], Batch]  # this rank's next batch, the same one until it is contributed
    advance: Callable[[], None]
    batches: list[Batch] = field(default_factory=list)  # what this rank has contributed
    counts: NDArray[np.int64] | None = None  # batches that each rank has contributed, known when the step is done

    def contribute(self) -> None:
        """Count the batch that was read."""
        self.batches.append(self.read())
        self.advance()


class WeightAccess(Protocol):
    """This rank's weights and optimizer state, for strategies in which ranks step alone and synchronize later.

    The arrays are flat copies, one for each dtype and device, of a type that has arithmetic in place; their order and
    sizes are equal on all ranks after `agree`.
    """

    def agree(self) -> None:
        """Give all ranks the same entries of optimizer state; counters and loss scales become equal. A collective."""

    def parts(self, number: int) -> list[WeightAccess]:
        """Return `number` objects of about equal size, each for a part of the weights; some may be empty."""

    def identities(self) -> list[int]:
        """Return the ids of the trained weights; they change when a weight is frozen or unfrozen."""

    def weights(self) -> list[Any]:
        """Return the trained weights."""

    def set_weights(self, arrays: Sequence[Any]) -> None:
        """Replace the trained weights."""

    def moments(self) -> list[Any]:
        """Return the optimizer's state that has a value for each weight, or for rows of them: momentum, Adam's."""

    def set_moments(self, arrays: Sequence[Any]) -> None:
        """Replace this state."""

    def mean(self, arrays: Sequence[Any], *, name: str, compression: str) -> Callable[[], list[Any]]:
        """Start to average `arrays` over ranks. Return a function that waits, and returns the means, bit for bit equal.

        It may overwrite `arrays`.

        Args:
            arrays: any values; changes of `weights()`, if the compression has a memory.
            name: of the operations.
            compression: as in `Options`. What it leaves out of changes is added to the next changes of these weights.
        """

    def to_host(self, array: Any) -> NDArray[Any]:
        """Return an array as NumPy's."""

    def from_host(self, array: NDArray[Any], like: Any) -> Any:
        """Return NumPy's array as one of the type of `like`, and on its device."""


class Adapter(Protocol):
    """The operations of a framework for the Trainer."""

    learning_rates: list[float]  # one per parameter group; assigning changes the optimizer's
    # What checkpoints restore of the optimizer's settings, as JSON, one dict a parameter group: lr, weight_decay, ...
    # Assigning changes those that are given. A rate that follows a schedule of the framework's own is left out.
    settings: list[dict[str, Any]]
    fault: Fault | None  # of the last train_step; needs options.nan_policy; set on all ranks or on none
    class_weight: dict[int, float] | None  # weight of training samples by class; ValueError where a loss has its own
    rank_state: dict[str, NDArray[Any]]  # state of this rank only, named as in `rank_state`; assigning restores it
    notes: list[str]  # log lines on what the adapter has changed or kept; after a step the loop logs and removes them

    shard_commits: ShardCommits | None  # None if no state is in shards
    couples_samples: bool  # True if outputs depend on the other samples of the rank's batch, as with BatchNorm
    prefetch: Prefetch | None  # gathers batches of arrays before their steps; None to gather them in their steps

    @property
    def step_taken(self) -> bool:
        """False if the last train_step changed no weight: nan_policy or loss scaling left it out; equal on all ranks.

        It may make a GPU wait.
        """

    def reseed(self, seeds: Mapping[str, int]) -> None:
        """Seed those of the framework's generators that are in `seeds`, by their names in `rank_state`."""

    def start(self) -> None:
        """Broadcast the root's weights and optimizer state. Change nothing else."""

    def train_step(self, batches: Sequence[Batch]) -> None:
        """Take one optimizer step over `batches` (several with accumulation), reduced over all ranks.

        The step equals the step of one process over the samples of all ranks: each sample has the same weight. A batch
        with local_count 0 adds nothing, but its rank takes part in the reduction.
        """

    def open_step(self, step: OpenStep) -> None:
        """Take a step that may close before every rank is done; needs `Options.cutoff`."""

    def reduce_over(self, ranks: Ranks) -> None:
        """Reduce the next steps' gradients over these ranks.

        With "none", a rank steps alone: its gradient is a mean over its own samples, times its share of the step's
        samples, times the number of ranks. So the mean over ranks of their steps' gradients is that of all samples.
        With "host", the ranks of a host step with the mean of these gradients over them.
        """

    def delay(self, between_exchanges: Callable[[], None]) -> None:
        """Apply each step's gradient in the step after it, so that it is reduced while that step computes.

        Called once, before `start`. `finish` applies the gradient of the last step.

        Args:
            between_exchanges: called in each step, on all ranks, where no gradient is in flight, for a collective that
                shall not wait for one. An adapter with nothing in flight between steps need not call it.
        """

    def weight_access(self) -> WeightAccess:
        """Return access to weights and optimizer state."""

    def eval_step(self, batch: Batch) -> None:
        """Add a batch to the metrics, without training; a batch with local_count 0 adds nothing."""

    def predict_step(self, inputs: Any) -> NDArray[Any]:
        """Return the model's outputs for a batch: (local_batch, ...)."""

    def metrics(self, reduce: Reduce, *, keep: bool = False) -> dict[str, float]:
        """Return the metrics since the last reset, exact over all ranks, and reset them.

        Args:
            reduce: sums a float64 vector over ranks; call it exactly once, with all sums that the metrics need.
            keep: do not reset them: the epoch is not over. Metrics that need more than sums may be left out.
        """

    def reset_metrics(self) -> None:
        """Drop what the metrics have counted, on this rank alone."""

    def local_metrics(self) -> dict[str, float]:
        """Return this rank's metrics since the last reset; no collective."""

    def average_buffers(self) -> None:
        """Average buffers that each rank changes by itself, such as running means; called after each epoch."""

    def abandon(self) -> None:
        """Stop what is in flight, because this rank's training has ended with an error. Not a collective."""

    def finish(self) -> Fault | None:
        """Change weights as the framework does when training ends; called after the last epoch and its checkpoint.

        Returns the fault of an update that was in flight and is not finite; None if all is well. Equal on all ranks.
        """

    def memory(self) -> Held:
        """Return what this rank holds between two steps; no collective."""

    def state(self) -> State:
        """Return weights, optimizer state and precision scaler. The next step may change the arrays.

        A collective call. Reading the arrays is none: the root alone reads what it writes.

        Raises:
            ValueError: on every rank, if a lazy module has no shapes yet.
        """

    def load_state(self, state: State) -> None:
        """Restore what `state` returned. Raises ValueError naming the first tensor that does not fit."""


def framework_of(model: Any) -> str:
    """Return "keras" or "torch" for a model, without importing either; TypeError for anything else.

    A dict of torch modules is a model, too.
    """
    if isinstance(model, dict) and model and all(framework_of(each) == "torch" for each in model.values()):
        return "torch"
    homes = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    # Keras first: with its torch backend a Keras model is a torch.nn.Module too.
    for framework in ("keras", "torch"):
        if framework in homes:
            return framework
    raise TypeError(f"model must be a torch.nn.Module or a keras.Model. Received: {type(model).__name__}")


def counted_by_class(modules: Mapping[str, Any]) -> str:
    """Return modules by name in words, such as "2 Block (encoder.0 to encoder.1), 1 Head (head)"."""
    kinds: dict[str, list[str]] = {}
    for name, module in modules.items():
        kinds.setdefault(type(module).__name__, []).append(name)
    ends = {kind: " to ".join(dict.fromkeys([names[0], names[-1]])) for kind, names in kinds.items()}
    return ", ".join(f"{len(names)} {kind} ({ends[kind]})" for kind, names in kinds.items())
