"""The losses of a Keras model over ranks: means over samples, which ranks weigh by their samples, or sums over samples.

What a loss declares is known at once. What a function, a layer's `add_loss` or a regularizer computes is not: the first
batch shows it, on parts of a few of its samples.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.trees import tree_map
from hvdtrain.distributed import rank_state
from hvdtrain.distributed.world import World
from hvdtrain.keras.overrides import overrides
from hvdtrain.keras.training_state import assign, copies, metric_variables, seed_states

log = logging.getLogger("hvdtrain")

_SAMPLES = 4  # of few samples, what is neither a mean nor a sum differs most
_DRAWS, _ERRORS = 16, 10.0  # of a loss that draws random numbers; standard errors by which its mean may differ
_TOLERANCE, _TOLERANCE_OF_HALF = 1e-4, 2e-2  # of what layers compute in float16 or bfloat16

_REFUSAL = (
    "When a step is split over ranks or batches, its losses must be means over samples, or all of them sums over "
    "samples. Received: {}. Return one value per sample from a loss (y_true, y_pred), where it has an axis "
    "without the first one, as Dice(axis=(1, 2, 3)); with add_loss, a mean over samples. A loss that needs all samples "
    "of a step at once trains on one rank without accumulate."
)

Terms = dict[str, float]


def are_sums(model: keras.Model, *, split: bool) -> bool:
    """Return whether a compiled model's loss, or losses, are declared as sums over samples (True) or means (False).

    A batch is weighed by its samples, which is right for these. Others have a divisor that Keras does not report: where
    a step's samples are `split` over ranks or batches, so that it matters, they are a ValueError.
    """
    leaves = [leaf for leaf in keras.tree.flatten(model.loss) if leaf is not None]
    sums = [getattr(leaf, "reduction", "mean") == "sum" for leaf in leaves]
    if not split:
        return bool(sums) and all(sums)
    for leaf in leaves:
        reduction, name = getattr(leaf, "reduction", "mean"), getattr(leaf, "name", leaf)
        if reduction != "sum" and getattr(leaf, "ignore_class", None) is not None:
            raise ValueError(
                "A loss with ignore_class divides by the number of targets that are left, which differs from rank to "
                f"rank. Received: ignore_class={leaf.ignore_class} in {name}. Leave it out and give those samples a "
                'sample_weight of 0, or use reduction="sum".'
            )
        if reduction not in ("sum_over_batch_size", "mean", "sum"):
            raise ValueError(
                'A loss must have reduction="sum_over_batch_size" or "sum" when a step is split over ranks or batches. '
                f"Received: reduction={reduction!r} in {name}"
            )
    if any(sums) and not all(sums):
        raise ValueError(f"Losses must be all means or all sums. Received: {sum(sums)} of {len(sums)} are sums")
    if any(sums) and any(getattr(v, "regularizer", None) is not None for v in model.trainable_variables):
        raise ValueError(
            'A loss with reduction="sum" adds up over ranks and batches, and a regularizer must not. Received: a model '
            'with regularizers. Use reduction="sum_over_batch_size", or the optimizer\'s weight_decay.'
        )
    return any(sums)


def check_losses(
    model: keras.Model, data: Any, count: int, world: World, *, sums: bool, training: bool = False
) -> bool:
    """Return whether the losses are sums over samples (True) or means (False); a collective.

    A few samples of the batch are computed whole and in parts. Random states, statistics and metrics stay as they were.
    Of a loss that draws random numbers, or that only training adds, means of several draws are compared.

    Args:
        model: a compiled model that is built.
        data: this rank's batch, (x, y, sample_weight).
        count: its samples; 0 if it is a filler.
        world: the ranks.
        sums: what the losses declare; it decides if the batch does not show it.
        training: True to look also for losses that layers add in training alone.

    Raises:
        ValueError: a loss is neither, or some are means and others sums; on every rank.
    """
    found: dict[str, list[str]] = {}
    problem = ""
    try:
        with _unchanged(model):
            found = _kinds(model, data, count, training=training) if count else {}
    except Exception as error:  # noqa: BLE001 - a step of the user's own may call the model in another way
        problem = f"{type(error).__name__}: {error}".partition("\n")[0]
    everyone = world.allgather_object([found, problem], name="loss_kinds")
    problems = [each for _, each in everyone if each]
    if problems:
        log.debug("losses of %s were not tested on parts of a batch: %s", model.name, problems[0])
    return _agreed([kinds for kinds, _ in everyone], sums=sums)


def _agreed(of_ranks: list[dict[str, list[str]]], *, sums: bool) -> bool:
    """Return whether all losses are sums on all ranks (True), or all means; ValueError if they are neither."""
    kinds: dict[str, set[str]] = {}
    for rank, found in enumerate(of_ranks):
        for name, (*fitting, values) in found.items():
            kinds[name] = kinds.get(name, {"mean", "sum"}) & set(fitting)
            if not kinds[name]:
                raise ValueError(_REFUSAL.format(f"{name}, which is neither: on rank {rank} it is {values}"))
    for kind in ("sum", "mean") if sums else ("mean", "sum"):
        if all(kind in fitting for fitting in kinds.values()):
            return kind == "sum"
    summed, others = (
        ", ".join(name for name, fitting in kinds.items() if kind not in fitting) for kind in ("mean", "sum")
    )
    raise ValueError(_REFUSAL.format(f"sums: {summed}; means, or the same for any samples: {others}"))


@contextmanager
def as_global_sums(model: keras.Model, ratio: float) -> Iterator[None]:
    """Let what the block adds to the model's means of losses weigh `ratio` times.

    The loss of one process is the sum over all samples of a step, weighed by their number. A rank's sum counts its own.
    """
    compiled = model._compile_loss
    means = [model._loss_tracker, *(compiled.metrics if compiled is not None else [])]
    totals = [mean.total for mean in means] if ratio != 1.0 else []
    before = [keras.ops.copy(total.value) for total in totals]  # JAX's steps reuse the variables' arrays
    for total in totals:
        total.assign(keras.ops.zeros_like(total.value))
    yield
    for total, value in zip(totals, before, strict=True):
        total.assign(value + total.value * ratio)


@contextmanager
def _unchanged(model: keras.Model) -> Iterator[None]:
    """Undo what the block does to random states, statistics and metrics."""
    statistics = [v for layer in model._flatten_layers() for v in layer._non_trainable_variables]
    variables = [*metric_variables(model), *statistics, *seed_states(model)]
    before = copies(variables)
    streams: AbstractContextManager[None] = nullcontext()
    if keras.backend.backend() == "torch":
        import torch

        streams = torch.random.fork_rng()
    try:
        with streams, rank_state.random_states_restored():
            yield
    finally:
        model._clear_losses()
        assign(variables, before)


def _kinds(model: keras.Model, data: Any, count: int, *, training: bool) -> dict[str, list[str]]:
    """Return for each loss the kinds that fit it, "mean" and "sum", and then its values in words."""
    rows = np.linspace(0, count - 1, min(count, _SAMPLES)).astype(np.int32) if count > 1 else np.zeros(2, np.int32)
    x, y, sample_weight = tree_map(lambda leaf: _take(leaf, rows, count), data)
    number = len(rows)
    compute = _own_loss if overrides(model, "compute_loss") else _losses

    y_pred = model(x, training=False)
    if count == 1:  # twice the same sample would not show what couples samples
        y_pred = tree_map(_scaled, y_pred)

    def terms(part: NDArray[np.int32], *, training: bool = False) -> Terms:
        chosen = tree_map(lambda leaf: _take(leaf, part, number), (x, y, y_pred, sample_weight))
        return compute(model, *chosen, training=training)

    everything = np.arange(number, dtype=np.int32)
    whole, again = terms(everything), terms(everything)
    changing = {name for name in whole if not np.isclose(whole[name], again[name], rtol=1e-6, equal_nan=True)}
    found = _compared(model, terms, number, whole.keys() - changing, draws=1)
    found |= _compared(model, terms, number, changing, draws=_DRAWS)
    if training:
        with _by_running_statistics(model):
            in_training = partial(terms, training=True)
            found |= _compared(model, in_training, number, in_training(everything).keys() - whole.keys(), draws=_DRAWS)
    return found


def _compared(
    model: keras.Model, terms: Callable[[NDArray[np.int32]], Terms], number: int, names: Set[str], *, draws: int
) -> dict[str, list[str]]:
    """Return the kinds that fit each of the losses `names`, and its values, on `number` samples and on their parts."""
    if not names:
        return {}
    found, words = {name: {"mean", "sum"} for name in names}, dict.fromkeys(names, "")
    everything = np.arange(number, dtype=np.int32)

    def drawn(part: NDArray[np.int32]) -> dict[str, list[float]]:
        each = [terms(part) for _ in range(draws)]
        return {name: [values[name] for values in each] for name in names}

    whole = drawn(everything)
    for first in sorted({1, number // 2}):
        one, rest = drawn(everything[:first]), drawn(everything[first:])
        for name in names:
            values = whole[name], one[name], rest[name]
            if not np.all(np.isfinite(values)):
                continue  # such values show nothing
            fitting = _fitting(values, first, number - first, _tolerance(model, name))
            if found[name] - fitting:
                of_all, of_one, of_rest = map(np.mean, values)
                words[name] = (
                    f"{of_all:.6g} for {number} samples, and {of_one:.6g} and {of_rest:.6g} for {first} and "
                    f"{number - first} of them"
                )
            found[name] &= fitting
    return {name: [*sorted(kinds), words[name]] for name, kinds in found.items()}


def _fitting(draws: Sequence[list[float]], first: int, rest: int, tolerance: float) -> set[str]:
    """Return which of "mean" and "sum" the means of draws fit, of all samples and of two parts."""
    values = whole, one, other = [float(np.mean(each)) for each in draws]
    errors = [_ERRORS * float(np.std(each, ddof=1)) / len(each) ** 0.5 if len(each) > 1 else 0.0 for each in draws]
    allowed, share = tolerance * max(map(abs, values)) + 1e-12, first / (first + rest)
    of_mean = allowed + float(np.hypot(errors[0], np.hypot(share * errors[1], (1 - share) * errors[2])))
    of_sum = allowed + float(np.linalg.norm(errors))
    is_mean = abs(whole - share * one - (1 - share) * other) <= of_mean
    is_sum = abs(whole - (one + other)) <= of_sum
    return {kind for kind, fits in (("mean", is_mean), ("sum", is_sum)) if fits}


@contextmanager
def _by_running_statistics(model: keras.Model) -> Iterator[None]:
    """Let each BatchNormalization normalize as in evaluation: in training its outputs depend on the part."""
    norms = [each for each in model._flatten_layers() if isinstance(each, keras.layers.BatchNormalization)]
    before = [norm._trainable for norm in norms]
    for norm in norms:
        norm._trainable = False  # not `trainable`, which would change the weights
    try:
        yield
    finally:
        for norm, trainable in zip(norms, before, strict=True):
            norm._trainable = trainable


def _tolerance(model: keras.Model, name: str) -> float:
    in_half = any("16" in str(layer.compute_dtype) for layer in model._flatten_layers())
    return _TOLERANCE_OF_HALF if in_half and not name.startswith("loss ") else _TOLERANCE


def _losses(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, *, training: bool) -> Terms:
    """Return the losses that Keras adds up: of outputs, of layers and of weights."""
    found: Terms = {}
    compiled = model._compile_loss
    if compiled is not None:
        original = compiled._flat_losses
        compiled._flat_losses = [
            each._replace(loss=_recorded(each.loss, f"loss {index} ({each.loss.name})", found))
            for index, each in enumerate(original)
        ]
        try:
            compiled(y, y_pred, sample_weight)
        finally:
            compiled._flat_losses = original
    if training or has_losses_of_layers(model):
        model(x, training=training)
    for layer in model._flatten_layers():
        for index, value in enumerate(layer._get_own_losses()):
            found[f"add_loss {index} or the activity_regularizer of layer {layer.name}"] = _value(value)
    for variable in model.trainable_weights:
        if variable.regularizer is not None:
            found[f"the regularizer of {variable.path}"] = _value(variable.regularizer(variable))
    return found


def has_losses_of_layers(model: keras.Model) -> bool:
    """Return whether a layer has added a loss in the model's last call."""
    return any(layer._get_own_losses() for layer in model._flatten_layers())


def _own_loss(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, *, training: bool) -> Terms:
    """Return what a compute_loss of the user's own returns."""
    y_pred = model(x, training=training)
    value = model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training)
    return {f"compute_loss of {type(model).__name__}": _value(value)}


def _recorded(loss: Callable[..., Any], name: str, found: Terms) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        value = loss(*args)
        found[name] = _value(value)
        return value

    return call


def _value(value: Any) -> float:
    return float(np.mean(np.asarray(keras.ops.convert_to_numpy(value), np.float64)))


def _take(leaf: Any, rows: NDArray[np.int32], count: int) -> Any:
    shape: Any = getattr(leaf, "shape", ())
    if not len(shape) or shape[0] != count:
        return leaf
    return keras.ops.take(keras.ops.convert_to_tensor(leaf), rows, axis=0)


def _scaled(leaf: Any) -> Any:
    """Return two equal rows of outputs with the second one made smaller."""
    if not keras.backend.is_float_dtype(keras.backend.standardize_dtype(leaf.dtype)):
        return leaf
    return leaf * keras.ops.cast(np.reshape([1.0, 0.75], [2] + [1] * (len(leaf.shape) - 1)), leaf.dtype)
