"""The metrics of a Keras model over ranks, which add up their states: these must be sums over samples.

Keras declares every variable of a metric as a sum, unless its author says otherwise. Keras's own metrics hold sums. For
metrics of the user's own, the first batch shows it.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.adapter import Reduce
from hvdtrain.data.trees import part_of, tree_map
from hvdtrain.distributed.world import World

log = logging.getLogger("hvdtrain")

_TOLERANCE = 1e-3  # float16 and bfloat16 add up less exactly, but a mean or a maximum differs by far more


def check_sums(model: keras.Model, data: Any, count: int, world: World) -> bool:
    """Raise ValueError on every rank if a metric's state is known not to be a sum over samples; a collective.

    Args:
        model: a compiled model that is built.
        data: this rank's batch, (x, y, sample_weight).
        count: its samples.
        world: the ranks.

    Returns:
        False if no rank's batch was large enough to tell.
    """
    own = [metric for metric in _metrics(model.metrics) if _is_users_own(metric)]
    for metric in own:
        for variable in metric.variables:
            if variable.aggregation != "sum":
                raise ValueError(_refusal(metric.name, f"{variable.path} with aggregation={variable.aggregation!r}"))
    if not own:
        return True
    found = ""
    for metric, args, kwargs in _calls(model, data, own) if count > 1 else ():
        found = found or _difference(metric, args, kwargs, count)
    everyone = world.allgather_object([found, count > 1], name="metric_states")
    for rank, (difference, _) in enumerate(everyone):
        if difference:
            raise ValueError(_refusal(difference.partition(":")[0], f"{difference.partition(':')[2]}, on rank {rank}"))
    return any(each for _, each in everyone)


def reduced(variables: Sequence[Any], reduce: Reduce) -> list[Any]:
    """Return the values of `variables` as float64 arrays of their shapes, reduced over ranks in one call."""
    local = [np.asarray(keras.ops.convert_to_numpy(v), np.float64) for v in variables]
    flat = reduce(np.concatenate([np.zeros(0), *(value.reshape(-1) for value in local)]))
    parts = np.split(flat, np.cumsum([value.size for value in local])[:-1]) if local else []
    return [part.reshape(value.shape) for part, value in zip(parts, local, strict=True)]


def scalars(results: dict[str, Any]) -> dict[str, float]:
    """Return one float per name: a metric with a value per class, say, becomes "name/0", "name/1" and so on."""
    values = {name: np.asarray(keras.ops.convert_to_numpy(value), np.float64) for name, value in results.items()}
    return {
        name if value.ndim == 0 else f"{name}/{index}": float(each)
        for name, value in values.items()
        for index, each in enumerate(value.reshape(-1))
    }


def _metrics(metrics: Any) -> Iterator[keras.Metric]:
    for metric in metrics:
        inner = getattr(metric, "metrics", None) or ()
        if inner:
            yield from _metrics(inner)
        else:
            yield metric


def _is_users_own(metric: keras.Metric) -> bool:
    parts = (type(metric).update_state, getattr(metric, "_fn", None))
    return any(part is not None and not _home(part).startswith("keras.") for part in parts)


def _home(part: Any) -> str:
    return str(getattr(part, "__module__", None) or type(part).__module__)


def _calls(model: keras.Model, data: Any, own: list[keras.Metric]) -> list[tuple[keras.Metric, Any, Any]]:
    """Return how Keras calls these metrics on a batch; those that a train_step of the user's own calls are not here."""
    calls: list[tuple[keras.Metric, Any, Any]] = []
    compiled = model._compile_metrics
    seen = {id(metric) for metric in _metrics([compiled] if compiled is not None else [])}
    compiled_own = [metric for metric in own if id(metric) in seen]
    if not compiled_own:
        return calls
    for metric in compiled_own:
        vars(metric)["update_state"] = lambda *args, metric=metric, **kwargs: calls.append((metric, args, kwargs))
    try:
        x, y, sample_weight = tree_map(keras.ops.convert_to_tensor, data)
        compiled.update_state(y, model(x, training=False), sample_weight)
    except Exception as error:  # noqa: BLE001 - a step of the user's own may call the model in another way
        log.debug("metrics were not checked: %s", error)
    finally:
        model._clear_losses()
        for metric in compiled_own:
            del vars(metric)["update_state"]
    return calls


def _difference(metric: keras.Metric, args: Any, kwargs: Any, count: int) -> str:
    """Return "name:why" if the state after a batch is not the sum of the states after its parts; else ""."""
    attributes = _numbers_of(metric)
    changed: set[str] = set()

    def state(rows: slice) -> list[Any]:
        part = tree_map(lambda value: part_of(value, rows, count), (list(args), kwargs))
        updated = metric.stateless_update_state(metric.stateless_reset_state(), *part[0], **part[1])
        changed.update(name for name, value in _numbers_of(metric).items() if value != attributes.get(name))
        vars(metric).update(copy.deepcopy(attributes))
        return [np.asarray(keras.ops.convert_to_numpy(value), np.float64) for value in updated]

    whole, first, rest = state(slice(None)), state(slice(1)), state(slice(1, None))
    if changed:
        return f"{metric.name}:update_state counts in the Python attribute {min(changed)}"
    for variable, total, one, other in zip(metric.variables, whole, first, rest, strict=True):
        if not np.allclose(total, one + other, rtol=_TOLERANCE, atol=_TOLERANCE):
            return (
                f"{metric.name}:{variable.path} is {total.reshape(-1)[:3].tolist()} after a batch, and "
                f"{one.reshape(-1)[:3].tolist()} and {other.reshape(-1)[:3].tolist()} after its parts"
            )
    return ""


def _numbers_of(metric: keras.Metric) -> dict[str, Any]:
    """Return a copy of the numbers, and lists and dicts of them, that a metric keeps as Python attributes."""
    held = {name: value for name, value in vars(metric).items() if not name.startswith("_")}
    return {name: copy.deepcopy(value) for name, value in held.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return all(map(_is_number, value.values() if isinstance(value, dict) else value))
    return isinstance(value, int | float | np.number)


def _refusal(name: str, received: str) -> str:
    return (
        "On several ranks, a metric's state must be a sum over samples: ranks' states are added up. Received: metric "
        f"{name}, whose {received}. Return one value per sample from a function (y_true, y_pred), or keep sums in the "
        "state, as keras.metrics.Mean does with total and count, and compute the rest in result()."
    )


def weigh_losses_by_samples(model: keras.Model) -> None:
    """Let a batch weigh its samples in the losses of single outputs, also where a graph does not know their number.

    Keras reads the number from the static shape of the outputs. On TensorFlow that is None once a batch had another
    length, and then a batch would weigh 1.
    """
    compiled = model._compile_loss
    if compiled is None or keras.backend.backend() != "tensorflow":
        return
    original = compiled.call

    @functools.wraps(original)
    def call(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        count = keras.ops.shape(keras.tree.flatten(y_pred)[0])[0]  # a tensor, where it is not static
        means = [] if isinstance(count, int) else compiled.metrics
        for mean in means:
            mean.update_state = functools.partial(_update_weighted, type(mean).update_state, mean, count)
        try:
            return original(y_true, y_pred, sample_weight)
        finally:
            for mean in means:
                del mean.update_state

    compiled.call = call


def _update_weighted(update: Any, mean: Any, count: Any, value: Any, sample_weight: Any = None) -> Any:
    return update(mean, value, sample_weight=keras.ops.cast(count, mean.dtype))
