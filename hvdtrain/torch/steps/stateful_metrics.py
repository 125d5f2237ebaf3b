"""Metrics with a state of their own, exact over all ranks: torchmetrics' objects.

Each rank updates a copy of the user's object with its own samples. A result is computed from the states of all ranks:
sums are added, lists are concatenated, and other states are combined as the metric declares. Sums travel with the loss,
in a vector whose length is known beforehand. A sum that takes another shape in the first batch is gathered like lists.

torchmetrics' own `sync` with a `dist_sync_fn` is no way: it exchanges each element of a list, of which ranks have
different numbers, adds up in float32, and combines the states of ranks without samples too. `merge_state` is only for
metrics with full_state_update=False. So this file sets states, and torchmetrics' private count of updates.
"""

from __future__ import annotations

import copy
import itertools
import logging
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save

from hvdtrain.data.trees import num_rows, part_of, tree_map
from hvdtrain.distributed import agreement, launch_environment
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.world import World
from hvdtrain.torch.ops.dtypes import as_numbers
from hvdtrain.torch.steps.training_state import on_device

log = logging.getLogger("hvdtrain")

Part = dict[str, torch.Tensor]  # what one rank has counted: "<metric>.<module>.<state>", and for lists ".<index>" too

_TOLERANCE = 1e-4  # of a number that is computed in parts
_LARGEST_LIVE = 10_000  # numbers in the states of a metric that is reported during an epoch
# These depend on the order of batches, on the moments at which they are computed, or on random numbers.
_NOT_BY_RANK = ("Running", "MinMaxMetric", "MetricTracker", "BootStrapper")


def is_stateful(metric: Any) -> bool:
    """Return whether `metric` is an object with update, compute and reset."""
    return not isinstance(metric, type) and all(
        callable(getattr(metric, name, None)) for name in ("update", "compute", "reset")
    )


class StatefulMetrics:
    """The Trainer's metrics with state, by name."""

    def __init__(self, metrics: Mapping[str, Any], device: torch.device, world: World) -> None:
        self._ranks = ranks = DataRanks(world)
        self._metrics = [_Metric(str(i), name, each, device, ranks) for i, (name, each) in enumerate(metrics.items())]
        self._gathers = any(each.gathers for each in self._metrics)
        self._carried: list[Part] = []  # of ranks that a resumed run no longer has

    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch."""
        for each in self._metrics:
            each.update(outputs, targets)

    @property
    def numbers(self) -> NDArray[np.float64]:
        """Of each metric its updates, its sums of another shape, and its sums: to be added up over ranks."""
        held = [each.numbers(part) for part in self._parts(others=False) for each in self._metrics]
        parts = len(self._carried) + 1
        return np.asarray(np.concatenate([np.zeros(0), *held]).reshape(parts, -1).sum(0))

    def results(self, totals: NDArray[np.float64], *, taken: Container[str], live: bool) -> dict[str, float]:
        """Return the results over all ranks, given their sum of `numbers`; a collective. Names must not be `taken`.

        With `live`, an epoch is not over: only metrics that are cheap to reduce are returned, without a collective.
        """
        alone = self._ranks.size == 1 and not self._carried
        of_each = [
            (each, numbers, numbers[1] > 0) for each, numbers in zip(self._metrics, self._split(totals), strict=True)
        ]
        parts = []
        if not live and not alone and (self._gathers or any(has_grown for *_, has_grown in of_each)):
            with agreement.everywhere(world=self._ranks.world, name="metrics"):
                own = [each.states(sums=has_grown).items() for each, _, has_grown in of_each]
                mine = _pack([dict(itertools.chain(*own)), *self._carried])
            parts = [part for data in self._ranks.allgather_bytes(mine, name="metrics") for part in _unpack(data)]
        found: dict[str, float] = {}
        for each, numbers, has_grown in of_each:
            if live and (not each.is_live or (has_grown and not alone)):
                continue
            for name, value in each.results(numbers, None if alone else parts, live=live).items():
                if name in found or name in taken:
                    raise ValueError(f"Two metrics are named {name}. Give metrics as a dict, {{name: metric}}.")
                found[name] = value
        return found

    def clear(self) -> None:
        """Reset all."""
        self._carried = []
        for each in self._metrics:
            each.reset()

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return what this rank has counted, for its part of a checkpoint."""
        if not self._metrics:
            return {}
        return {"cat.metrics": np.frombuffer(_pack(self._parts()), np.uint8)}

    def load(self, held: Mapping[str, NDArray[Any]]) -> None:
        """Restore what `arrays` returned. On another number of ranks, one rank gets what several have counted."""
        if not self._metrics or "cat.metrics" not in held:
            return
        own, *self._carried = list(_unpack(held["cat.metrics"].tobytes())) or [{}]
        for each in self._metrics:
            each.load(own)

    def snapshot(self) -> Callable[[], None]:
        """Return a function that undoes the updates that follow."""
        undo = [each.snapshot() for each in self._metrics]

        def restore() -> None:
            for each in undo:
                each()

        return restore

    def _parts(self, *, others: bool = True) -> list[Part]:
        own = {name: value for each in self._metrics for name, value in each.states(others=others).items()}
        return [own, *self._carried]

    def _split(self, totals: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        lengths = np.cumsum([each.length for each in self._metrics])
        return np.split(totals, lengths[:-1]) if self._metrics else []


class _Metric:
    """A copy of one metric, and how its states are combined over ranks."""

    def __init__(self, key: str, name: str, metric: Any, device: torch.device, ranks: DataRanks) -> None:
        torchmetrics: Any = sys.modules.get("torchmetrics")  # never imported here: it is the user's
        known = torchmetrics is not None and isinstance(metric, torchmetrics.Metric | torchmetrics.MetricCollection)
        modules = [each for each in metric.modules() if isinstance(each, torchmetrics.Metric)] if known else []
        classes = {kind.__name__ for each in [metric, *modules] for kind in type(each).__mro__}
        several = ranks.size > 1 or launch_environment.is_elastic()
        by_rank = classes.isdisjoint(_NOT_BY_RANK)
        if several and not (known and by_rank):
            raise ValueError(_refusal(name, metric, known=known, size=ranks.size))
        self._key, self._name, self._device, self._ranks = key, name, device, ranks
        self._metric = copy.deepcopy(metric)  # the user's own stays as it is, on its device
        self._modules: list[Any] = []
        self._updates = 0
        self._is_checked = not several  # that the first batch gives the same number in parts, as ranks count them
        self._lost = False  # a resumed epoch's counts, of an object whose state is not known
        if known:
            self._prepare(torchmetrics.MetricCollection, torchmetrics.Metric, device)
        self.reset()
        # A wrapper may share the states of the metric in it.
        owners = {id(each._defaults): each for each in self._modules}
        self._states = [
            (f"{key}.{index}.{state}", owner, state, default)
            for index, owner in enumerate(owners.values())
            for state, default in owner._defaults.items()
        ]
        if several and known:
            self._refuse_unknown_reductions(torchmetrics.Metric, size=ranks.size)
        self._sums = {
            full: default
            for full, owner, state, default in self._states
            if isinstance(default, torch.Tensor) and _is(owner._reductions[state], "sum")
        }
        self.gathers = len(self._sums) < len(self._states)
        self.length = 2 + sum(default.numel() for default in self._sums.values())
        self.is_live = bool(self._states) and by_rank and not self.gathers and self.length <= _LARGEST_LIVE
        # Its list would hold arrays and output buffers that the next batch overwrites.
        self._keeps_batches = any(isinstance(default, list) for *_, default in self._states)

    def _prepare(self, collection: Any, single: Any, device: torch.device) -> None:
        """Let the copy be updated here alone, on `device`, and computed from any states."""
        self._metric.to(device)
        for each in self._metric.modules():
            if isinstance(each, single):
                each.distributed_available_fn = _never  # torch.distributed may be in use for something else
                each.compute_with_cache = False
                self._modules.append(each)
            elif isinstance(each, collection) and each._enable_compute_groups is True:
                # Which metrics share a state is guessed from the first batch, and that is another one on each rank.
                each._enable_compute_groups, each._groups_checked, each._groups = False, False, {}

    def _refuse_unknown_reductions(self, base: Any, *, size: int) -> None:
        """Raise ValueError if a tensor state of the user's own metric says nothing of how ranks' values are combined.

        torchmetrics would stack the values. Its own metrics combine these in `compute`; the user's would take them for
        the values of one process.
        """
        for _, owner, state, default in self._states:
            kinds = [kind for kind in type(owner).__mro__ if kind.__module__.startswith("torchmetrics.")]
            if isinstance(default, torch.Tensor) and owner._reductions[state] is None and kinds == [base]:
                raise ValueError(
                    "A metric must say how the states of ranks are combined. Received: no dist_reduce_fx for "
                    f'{state} of {type(owner).__name__}, on {size} rank(s). Use add_state(..., dist_reduce_fx="sum"), '
                    "or a function of the ranks' stacked values."
                )

    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch. Not in inference mode, whose tensors cannot be changed outside it."""
        with torch.inference_mode(mode=False), torch.no_grad():
            if self._keeps_batches:
                outputs, targets = tree_map(_copied, (outputs, targets))
            if self._modules:  # a spread model's outputs are on another device than its inputs
                outputs, targets = on_device((outputs, targets), self._device)
            if not self._is_checked and num_rows(outputs) > 1:
                self._is_checked = True
                self._check(outputs, targets)
            self._metric.update(outputs, targets)
        self._updates += 1

    def _check(self, outputs: Any, targets: Any) -> None:
        """Raise ValueError if a batch gives another number than its two parts, counted by two ranks.

        So does a metric that computes one number a batch, such as structural similarity by the range of the batch, or
        that counts in attributes which are no states.
        """
        whole, *halves = (_Metric(self._key, self._name, self._metric, self._device, self._ranks) for _ in range(3))
        rows = num_rows(outputs)
        try:
            for each, part in zip(
                (whole, *halves), (slice(None), slice(rows // 2), slice(rows // 2, None)), strict=True
            ):
                each._is_checked = True
                each.update(*tree_map(partial(part_of, rows=part, count=rows), (outputs, targets)))
            expected = whole.results(whole.numbers(whole.states()), None, live=False)
            parts = [each.states() for each in halves]
            first, rest = halves
            found = first.results(first.numbers(parts[0]) + rest.numbers(parts[1]), parts, live=False)
        except Exception as error:  # noqa: BLE001 - such as too few samples; if the metric is at fault, `update` raises too
            log.debug("%s was not checked on parts of a batch: %r", self._name, error)
            return
        if found.keys() != expected.keys() or not np.allclose(
            [*found.values()], [*expected.values()], rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True
        ):
            raise ValueError(
                "A metric must give one process's number on any number of ranks. Received: "
                f"{self._name}, which gives {expected} for a batch of {rows}, and {found} if two ranks count its "
                f"halves, on rank {self._ranks.world.rank}. It makes one number of a batch, or has attributes that are "
                "no states. Count in states (add_state), and compute from them; give image metrics a data_range."
            )

    def states(self, *, sums: bool = True, others: bool = True) -> Part:
        """Return the states on the host: those that are sums, and the others."""
        found: Part = {self._key: torch.tensor(self._updates, dtype=torch.int64, device="cpu")}
        for full, owner, state, default in self._states:
            value = getattr(owner, state)
            if not (sums if full in self._sums else others):
                continue
            if not isinstance(default, list):
                found[full] = _on_host(value)
                continue
            for index, element in enumerate(value):
                if not isinstance(element, torch.Tensor):
                    raise TypeError(
                        f"The state of a metric must be tensors or lists of tensors. Received: {type(element)} "
                        f"in {state} of {self._name}"
                    )
                found[f"{full}.{index}"] = _on_host(element)
        return found

    def numbers(self, part: Part) -> NDArray[np.float64]:
        """Return the updates of a part, how many of its sums have another shape than their default, and the others.

        One process would begin at the default, so not every rank may.
        """
        sums, grown = [part[self._key].double().reshape(1), torch.zeros(1, dtype=torch.float64, device="cpu")], 0
        for full, default in self._sums.items():
            has_grown = part[full].shape != default.shape
            grown += has_grown
            begin = default.double().cpu()
            sums.append((begin * 0 if has_grown else part[full].double() - begin).reshape(-1))
        sums[1] += grown
        return torch.cat(sums).numpy()

    def results(self, numbers: NDArray[np.float64], parts: Sequence[Part] | None, *, live: bool) -> dict[str, float]:
        """Compute from all ranks' sums and parts; None: from this process's own states.

        With `live`, more samples follow: what cannot be computed of so few is NaN, such as R2Score of one.
        """
        if self._lost or not numbers[0]:
            return self._unknown()
        try:
            return self._computed(numbers, parts)
        except Exception:  # whatever the user's metric raises
            if not live:
                raise
            return self._unknown()

    def _unknown(self) -> dict[str, float]:
        names = self._metric.keys() if hasattr(self._metric, "keys") else [self._name]
        return {str(name): float("nan") for name in names}

    def _computed(self, numbers: NDArray[np.float64], parts: Sequence[Part] | None) -> dict[str, float]:
        if parts is None:
            return _named(self._name, self._metric.compute())
        before = [(owner, state, getattr(owner, state)) for _, owner, state, _ in self._states]
        before += [(each, "_update_count", each._update_count) for each in self._modules]
        try:
            for each in self._modules:
                each._update_count = int(numbers[0])
            sums = None if numbers[1] else numbers[2:]
            for owner, state, value in self._combined(sums, [part for part in parts if part[self._key]]):
                setattr(owner, state, value)
            with torch.no_grad():
                return _named(self._name, self._metric.compute())
        finally:
            for owner, state, value in before:
                setattr(owner, state, value)

    def _combined(self, sums: NDArray[np.float64] | None, parts: Sequence[Part]) -> Iterator[tuple[Any, str, Any]]:
        """Yield (module, state, value over all ranks). Ranks without samples are not among `parts`.

        `sums` is None where `parts` have the sums, because one of them has grown.
        """
        for full, owner, state, default in self._states:
            if full in self._sums:
                begin = default.double().cpu()
                if sums is None:
                    value: Any = begin + sum(part[full].double() - begin for part in parts)
                else:
                    own, sums = sums[: default.numel()], sums[default.numel() :]
                    value = begin + torch.from_numpy(own.copy()).reshape(default.shape)
                whole = default.is_floating_point() or bool((value == value.round()).all())
                value = value.to(
                    default.dtype if whole else torch.promote_types(torch.float32, torch.get_default_dtype())
                )
            elif isinstance(default, list):
                value = _combine([_elements(part, full) for part in parts], owner, state)
            else:
                value = _combine([part[full] for part in parts], owner, state)
            yield owner, state, on_device(value, owner.device)

    def load(self, part: Part) -> None:
        """Restore what `states` returned; an empty part is that of a rank without samples."""
        self.reset()
        self._updates = int(part.get(self._key, 0))
        self._lost = not self._states
        if self._lost:
            log.warning("%s cannot be restored within an epoch: it is NaN until the epoch ends.", self._name)
        for each in self._modules:
            each._update_count = self._updates
        for full, owner, state, default in self._states:
            if isinstance(default, list):
                setattr(owner, state, [each.to(owner.device) for each in _elements(part, full)])
            elif full in part:
                setattr(owner, state, part[full].to(owner.device))

    def reset(self) -> None:
        """Drop what was counted."""
        with torch.inference_mode(mode=False):
            self._metric.reset()
        self._updates, self._lost = 0, False

    def snapshot(self) -> Callable[[], None]:
        """Return a function that undoes the updates that follow."""
        updates = self._updates
        saved = [
            (owner, state, len(value) if isinstance(value, list) else value.clone())
            for _, owner, state, _ in self._states
            for value in [getattr(owner, state)]
        ]
        metric = None if self._states else copy.deepcopy(self._metric)

        def restore() -> None:
            self._updates = updates
            self._metric = metric or self._metric
            for owner, state, value in saved:
                if isinstance(value, int):
                    del getattr(owner, state)[value:]
                else:
                    setattr(owner, state, value)

        return restore


def _combine(values: list[Any], owner: Any, state: str) -> Any:
    """Return what one process would hold, from the values of a state on the ranks that had samples."""
    reduction = owner._reductions[state]
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], list):
        together = list(itertools.chain.from_iterable(values))
        return together if reduction is None or _is(reduction, "cat") else reduction(together)
    if _is(reduction, "mean"):
        if any(not torch.equal(value, values[0]) for value in values):
            raise ValueError(
                f"{type(owner).__name__} takes the mean of its state {state} over processes, whatever these have "
                f"counted. Received: values that differ, such as {values[0]} and {values[-1]}. Use a metric whose "
                'states are sums: add_state(..., dist_reduce_fx="sum").'
            )
        return values[0]
    if _is(reduction, "cat"):
        return torch.cat([torch.atleast_1d(value) for value in values])
    stacked = torch.stack(values)
    return stacked if reduction is None else reduction(stacked)


def _named(name: str, value: Any) -> dict[str, float]:
    """Return one float per name: "name/0" and so on for a tensor, and a dict's own names."""
    if isinstance(value, Mapping):
        return {key: each for inner in value for key, each in _named(str(inner), value[inner]).items()}
    if isinstance(value, tuple | list):
        raise TypeError(
            f"A metric must compute numbers. Received: a {type(value).__name__} of {len(value)} from {name}. Use a "
            "metric of one number, for example the area under a curve."
        )
    numbers = as_numbers(value).double().cpu()
    if numbers.dim() == 0:
        return {name: float(numbers)}
    return {f"{name}/{index}": each for index, each in enumerate(numbers.reshape(-1).tolist())}


def _refusal(name: str, metric: Any, *, known: bool, size: int) -> str:
    what = (
        "depends on the order of batches, the moment, or chance"
        if known
        else "has a state that hvdtrain cannot combine"
    )
    return (
        f"A metric must give one process's number on any number of ranks. Received: {name}, a {type(metric).__name__}, "
        f"which {what}, on {size} rank(s). Use a metric of torchmetrics (add_state names what combines a state), or a "
        "function (outputs, targets) -> one value per sample."
    )


def _is(reduction: Any, name: str) -> bool:
    """Return whether a reduction is torchmetrics' own of that name."""
    return reduction is not None and reduction is getattr(
        sys.modules.get("torchmetrics.utilities.data"), f"dim_zero_{name}", None
    )


def _elements(part: Part, full: str) -> list[torch.Tensor]:
    names = itertools.takewhile(part.__contains__, (f"{full}.{index}" for index in itertools.count()))
    return [part[name] for name in names]


def _pack(parts: Sequence[Part]) -> bytes:
    """Return parts as bytes; two results can be joined."""
    packed = [save(part) for part in parts]
    return b"".join(len(data).to_bytes(8, "little") + data for data in packed)


def _unpack(data: bytes) -> Iterator[Part]:
    while data:
        end = 8 + int.from_bytes(data[:8], "little")
        yield load(data[8:end])
        data = data[end:]


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _never() -> bool:
    return False
