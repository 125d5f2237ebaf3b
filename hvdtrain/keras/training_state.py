"""The state of a Keras run as plain arrays, and back: what is equal on all ranks, and what each rank has alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from hvdtrain.adapter import Fault, HostArrays, Options, ShardedArray, State, host_arrays
from hvdtrain.checkpoint import Kind
from hvdtrain.keras import trained
from hvdtrain.keras.backends import backend_module, number, room_for
from hvdtrain.keras.model_optimizers import other_optimizers
from hvdtrain.keras.optimizer import distributed_part
from hvdtrain.keras.shards import Slot, whole_shape
from hvdtrain.keras.variables import path, without_counters

Arrays = dict[str, NDArray[Any]]

# Optimizer variables carry their model variable's path with "_" for "/": "sgd/sequential_1_dense_2_kernel_momentum".
_COUNTER = re.compile(r"_\d+(?=[_/.]|$)")
_PIECE_NUMBERS = 2**18  # that are read at once
_NUMBER = re.compile(r"\.\d{5}\.")  # of `_variables`
_TRAINABLE = "trainable"  # in State.meta
_METRIC = re.compile(r"(sum|mean)\.metric\.\d")


@dataclass
class Restored:
    """The changes of `restore` besides values."""

    changed: list[str]  # the layers and weights that are trainable now and were not, or the other way round
    is_built_again: bool = False  # the optimizer, over the weights that are trained now


def copies(variables: Sequence[Any]) -> list[NDArray[Any]]:
    """Return the values of `variables` on the host."""
    return [np.array(backend_module().on_host(v)) for v in variables]


def assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Assign a value to each variable."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def capture(model: keras.Model) -> State:
    """Return the model's weights and its optimizer's variables; each is copied when it is read."""
    # Variables made not to be trained, such as running statistics. A frozen layer's weights are not among them: nothing
    # changes them, and a difference between ranks must be found before `average_buffers` removes it.
    weights = {id(v) for layer in model._flatten_layers() for v in layer._trainable_variables}
    own = {id(v) for v in model.non_trainable_weights} - weights
    has_gradient = {id(v) for v in model.trainable_weights}
    variables = _variables(model)
    tensors = {name: v for name, v in variables.items() if not isinstance(v, Slot)}
    return State(
        HostArrays(tensors, backend_module().on_host, _kind),
        {_TRAINABLE: trained.flags_of(model)},
        per_rank=frozenset(name for name, v in variables.items() if id(v) in own),
        trained=frozenset(name for name, v in variables.items() if id(v) in has_gradient),
        frozen=frozenset(name for name, v in variables.items() if id(v) in weights - has_gradient),
        sharded={name: _sharded(v) for name, v in variables.items() if isinstance(v, Slot)},
    )


def _sharded(slot: Slot) -> ShardedArray:
    def gather(everywhere: bool) -> NDArray[Any] | None:
        return slot.shards.whole(slot, to=None if everywhere else 0)

    return ShardedArray(_kind(slot), gather)


def _kind(variable: Any) -> Kind:
    dtype = keras.ops.convert_to_numpy(keras.ops.zeros((), variable.dtype)).dtype
    return Kind(whole_shape(variable), dtype)


def restore(state: State, model: keras.Model) -> Restored:
    """Load what `capture` returned; ValueError if a tensor is missing, left over or misshaped, and no weight changes.

    Layers become trainable or frozen as they were. If that needs an optimizer over other weights, it is built again.
    """
    if not model.built:
        raise ValueError(f"{model.name} is not built: call it on a batch, or give it an Input, before loading weights")
    build_optimizer(model)
    saved = host_arrays(state.arrays).only(lambda name: not name.startswith("sync."))  # a strategy's own
    before = trained.flags_of(model)
    _check({name: v for name, v in _variables(model).items() if _is_weight(name)}, saved.only(_is_weight))
    restored = Restored(trained.set_flags(model, state.meta.get(_TRAINABLE, before)))
    try:
        fits = _variables(model).keys() == {*saved, *state.elsewhere} and trained.optimizer_fits(model)
        if not fits and state.elsewhere:
            raise ValueError(
                "The optimizer's state is in shards, and is of other weights in the last commit. Freeze and unfreeze "
                "layers before fit, or use no shards in an elastic job"
            )
        if not fits and _TRAINABLE in state.meta:
            saved, restored.is_built_again = _build_again(model, saved, changed=bool(restored.changed))
        _check({name: v for name, v in _variables(model).items() if name not in state.elsewhere}, saved)
    except ValueError:
        trained.set_flags(model, before)
        raise
    _load(_variables(model), saved)
    return restored


def _build_again(model: keras.Model, saved: HostArrays, *, changed: bool) -> tuple[HostArrays, bool]:
    """Build the optimizer for a state whose optimizer a callback has built again; return the state by names of now.

    Without `changed` trainable weights, nothing is done for the state of another optimizer.
    """
    known = _variables(model)
    if not changed and {*map(_without_number, known)} != {*map(_without_number, saved)}:
        return saved, False
    before = {id(v) for v in model.optimizer.variables}
    trained.build_again(model)
    now = {name: v for name, v in _variables(model).items() if not _is_weight(name)}
    built = {name for name, v in now.items() if id(v) not in before}
    pairs = trained.latest(now, [name for name in saved if not _is_weight(name)], built, _without_number)
    if pairs is None:
        raise ValueError(
            "the optimizer in the checkpoint has state of other weights, because a callback has frozen or unfrozen "
            "layers. Freeze or unfreeze the same ones before fit, in the same order"
        )
    unused = {
        name: np.zeros(v.whole_shape) if isinstance(v, Slot) else array
        for (name, v), array in zip(now.items(), copies(list(now.values())), strict=True)
    }
    return saved.only(_is_weight) | unused | saved.renamed(pairs), True


def _without_number(name: str) -> str:
    return _NUMBER.sub(".", name, count=1)


def _is_weight(name: str) -> bool:
    return name.startswith("model.")


def _check(current: dict[str, Any], saved: HostArrays) -> None:
    """Raise ValueError unless both have the same names and shapes."""
    for name in [*current, *saved]:
        here = whole_shape(current[name]) if name in current else "missing"
        there = saved.kind(name).shape if name in saved else "missing"
        if here != there:
            raise ValueError(f"tensor {name} is {there} in the checkpoint and {here} in the model")


def build_optimizer(model: keras.Model, optimizer: Any = None) -> None:
    """Build `optimizer`, by default the model's own, if there is one and it is not built yet."""
    optimizer = model.optimizer if optimizer is None else optimizer
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)


def _variables(model: keras.Model) -> dict[str, Any]:
    """Return every variable under a name that does not depend on how many layers this process has made before.

    Sorted names are in the order of `model.weights`, so that plain Keras loads them by `model.set_weights`. Gradient
    accumulators are left out: they hold this rank's gradients, and between steps nothing but zeros.
    """
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    local = {id(v) for v in getattr(inner, "_accumulated_gradients", None) or ()}
    groups = {"model": model.weights, "optimizer": model.optimizer.variables}
    groups |= {f"optimizer.{name}": each.variables for name, each in other_optimizers(model).items()}
    return {
        f"{group}.{index:05d}.{_COUNTER.sub('', path(variable))}": variable
        for group, variables in groups.items()
        for index, variable in enumerate(v for v in variables if id(v) not in local)
    }


def weights_by_name(model: keras.Model) -> dict[str, Any]:
    """Return the model's weights, by the names of `State.arrays` without "model."."""
    found = ((name.removeprefix("model."), v) for name, v in _variables(model).items() if _is_weight(name))
    return dict(found)


def rank_state(model: keras.Model, *, metrics: bool) -> Arrays:
    """Return what only this rank holds, named as in `distributed.rank_state`; with `metrics`, the running ones too."""
    variables = {**_seeds_and_statistics(model), **(_metrics(model) if metrics else {})}
    held = dict(zip(variables, copies(list(variables.values())), strict=True))
    for name, value in held.items():
        if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:  # bfloat16
            held[name] = value.astype(np.float32)
    return held | _random_states_of_backend()


def random_states(model: keras.Model) -> Arrays:
    """Return the states of the model's generators, Keras's global one and the backend's, as `rank_state` names them."""
    seeds = _seeds(model)
    return dict(zip(seeds, copies(list(seeds.values())), strict=True)) | _random_states_of_backend()


def _random_states_of_backend() -> Arrays:
    if keras.backend.backend() != "torch":
        return {}
    from hvdtrain.torch.steps import training_state  # a Dropout without a seed draws from torch's generator

    return training_state.random_states()


def reseed(seeds: Mapping[str, int], model: keras.Model) -> None:
    """Seed those generators of the model, of Keras and of the backend that are in `seeds`, by their names."""
    for name, state in _seeds(model).items():
        if name in seeds:
            _, *count = now = keras.ops.convert_to_numpy(state)  # a seed, and how often it was drawn from
            state.assign(np.array([seeds[name] % 2**31, *count], now.dtype))
    if keras.backend.backend() == "torch":
        from hvdtrain.torch.steps import training_state

        training_state.reseed(seeds)


def set_rank_state(held: Arrays, model: keras.Model) -> None:
    """Load the entries that `rank_state` returned, except for metrics. Missing entries are ignored."""
    _load(_seeds_and_statistics(model), held)
    if keras.backend.backend() == "torch":
        from hvdtrain.torch.steps import training_state

        training_state.set_random_states(held)


def set_metrics(held: Arrays, model: keras.Model) -> None:
    """Load the running metrics from `rank_state`; they exist once the model has seen a batch.

    Raises:
        ValueError: they are of other metrics.
    """
    saved = {name: array for name, array in held.items() if _METRIC.match(name)}
    now = _metrics(model)
    if saved and saved.keys() != now.keys():
        raise ValueError(
            f"The checkpoint was saved within an epoch that counted {_metrics_of(saved)}. Received: "
            f"{_metrics_of(now)}. Resume with the same metrics, or from a checkpoint of an epoch's end."
        )
    _load(now, saved)


def metric_variables(model: keras.Model) -> list[Any]:
    """Return the variables of all metrics that a model has by now."""
    return [v for metric in model.metrics for v in metric.variables]


def seed_states(model: keras.Model) -> list[Any]:
    """Return the states of the model's random generators, and of Keras's global one if there is one."""
    from keras.src.backend.common import global_state

    shared = global_state.get_global_attribute("global_seed_generator")
    generators = [g for layer in model._flatten_layers() for g in getattr(layer, "_seed_generators", ())]
    return list({id(g.state): g.state for g in [*generators, *([shared] if shared is not None else [])]}.values())


def _seeds(model: keras.Model) -> dict[str, Any]:
    return {f"random.seed.{index}": state for index, state in enumerate(seed_states(model))}


def _seeds_and_statistics(model: keras.Model) -> dict[str, Any]:
    kinds = [(v, "mean" if "float" in str(v.dtype) else "max") for v in model.non_trainable_weights]
    return _seeds(model) | {f"{kind}.weight.{index}": v for index, (v, kind) in enumerate(kinds)}


def _metrics(model: keras.Model) -> dict[str, Any]:
    variables = enumerate(metric_variables(model))
    return {
        f"{'sum' if v.aggregation == 'sum' else 'mean'}.metric.{index:03d}.{without_counters(path(v))}": v
        for index, v in variables
    }


def _metrics_of(names: Iterable[str]) -> str:
    """Return the metrics that `_metrics` names; an older checkpoint has numbers alone."""
    paths = (name.split(".", 3)[-1] for name in sorted(names, key=lambda name: name.split(".")[2]))
    return ", ".join(dict.fromkeys(path.rpartition("/")[0] or "metrics of an older version" for path in paths))


def _load(variables: dict[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
    held = host_arrays(arrays)
    for name, variable in variables.items():  # an optimizer's counter of steps before its slots: see `Shards.divide`
        if name not in held:
            continue
        if not held.is_stored(name):
            variable.assign(held[name])
        elif isinstance(variable, Slot):  # on the root, which has no room
            variable.shards.divide_later(variable, partial(held.piece, name))
        else:
            _read(variable, held, name)


def _read(variable: Any, held: HostArrays, name: str) -> None:
    """Read a variable's value from a file, into the variable's memory if it may be changed there."""
    room = room_for(variable)
    numbers = room.reshape(-1)
    for first in range(0, numbers.size, _PIECE_NUMBERS):
        last = min(first + _PIECE_NUMBERS, numbers.size)
        numbers[first:last] = held.piece(name, first, last)
    backend_module().give(variable, room)


class StepSnapshot:
    """Variables that a step changes before its gradient is known: running statistics, seeds, metrics, the loss scale.

    The model's optimizer skips updates that are not finite. Such a step leaves nothing behind, unless the policy is
    "raise": then only its loss is reported.
    """

    def __init__(self, model: keras.Model, options: Options) -> None:
        self._model, self._everything = model, options.nan_policy != "raise"
        self._before: list[tuple[Any, Any]] = []
        self._skipped: tuple[str, str | None, bool] | None = None  # first bad path: reduced, own; by loss scaling
        part: Any = distributed_part(model.optimizer)
        received = f"leave one out. Received: {options} with {type(part).__name__}"
        if part.use_ema:
            raise ValueError(f"nan_policy and an optimizer's moving averages do not go together: {received}")
        if part is not model.optimizer and options.accumulate > 1:  # precision="bf16" needs no loss scaling
            raise ValueError(f"nan_policy, loss scaling and accumulate do not go together: {received}")
        part.skip_non_finite(self._note)

    def _note(self, paths: Sequence[str], own: Any, reduced: Any = None) -> None:
        """Note a skipped update; see `DistributedMixin.skip_non_finite`."""

        def first(flags: Any) -> str | None:
            return next((path for path, flag in zip(paths, np.asarray(flags), strict=True) if flag), None)

        by_scaling = reduced is None
        self._skipped = (first(own if by_scaling else reduced) or "none", first(own), by_scaling)

    def save(self) -> None:
        """Copy the values from before the step."""
        model, optimizer = self._model, self._model.optimizer
        saved = list(model._loss_tracker.variables)
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            saved += [optimizer.step_counter, optimizer.dynamic_scale]
        if self._everything:
            saved += [*metric_variables(model), *model.non_trainable_variables]
        # On their device, and in arrays of their own: JAX's steps reuse those of the variables.
        self._before = [(v, keras.ops.copy(v)) for v in {id(v): v for v in saved}.values()]

    def fault(self, *, counted: bool) -> Fault | None:
        """Return why the step was skipped, and restore the values before it; None if not. `counted`: it had samples."""
        backend_module().wait_for_reports()
        skipped, self._skipped = self._skipped, None
        if skipped is None:
            return None
        reduced, own, by_scaling = skipped
        before = {id(v): value for v, value in self._before}
        # Loss scaling lowers its scale after such a step, which cannot help once the scale is 1.
        if by_scaling and number(before[id(self._model.optimizer.dynamic_scale)]) > 1.0:
            return None
        tracker = self._model._loss_tracker  # counts the epoch; the difference to before is the step's
        total, count = (number(v) - number(before[id(v)]) for v in (tracker.total, tracker.count))
        for variable, value in self._before:
            variable.assign(value)
        return Fault(reduced, own if counted else None, total / count if count else float("nan"))
