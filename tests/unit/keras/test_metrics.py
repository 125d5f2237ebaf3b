"""Metrics of the user's own whose states are not sums over samples are refused on several ranks, on every rank."""

from __future__ import annotations

import pytest

keras = pytest.importorskip("keras")

import numpy as np  # noqa: E402

from hvdtrain.distributed.world import SoloWorld  # noqa: E402
from hvdtrain.keras.metrics import check_sums  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")  # Keras's AUC on JAX

ops = keras.ops
X = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
Y = np.eye(3, dtype=np.float32)[np.arange(5) % 3]


class Two(SoloWorld):
    """This rank and another one, which says `other`."""

    size = 2

    def __init__(self, other):
        super().__init__()
        self._other = other

    def allgather_object(self, obj, *, name="object"):
        return [obj, self._other]


class State(keras.metrics.Metric):
    def __init__(self, update, name="own", initial="zeros", aggregation="sum"):
        super().__init__(name=name)
        self._update = update
        self.value = self.add_variable((), initial, aggregation=aggregation, name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(self._update(self.value.value, y_true, y_pred))

    def result(self):
        return self.value.value


class Hits(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(ops.cast(ops.argmax(y_true, -1) == ops.argmax(y_pred, -1), "float32"))


def largest():
    return State(lambda value, y_true, y_pred: ops.maximum(value, ops.max(ops.abs(y_pred))))


def check(metrics, count=5, other=("", True), **compile_options):
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])
    net.compile(optimizer="sgd", loss="mse", metrics=metrics, **compile_options)
    data = X[:count], Y[:count], None
    net._symbolic_build(data_batch=data)
    return check_sums(net, data, count, Two(list(other)))


def per_sample(y_true, y_pred):
    return ops.max(y_pred, -1)


def per_batch(y_true, y_pred):
    return ops.max(y_pred)


@pytest.mark.parametrize(
    "metrics",
    [
        ["mae", keras.metrics.AUC(), keras.metrics.F1Score(), keras.metrics.OneHotMeanIoU(3)],
        [Hits()],
        [per_sample],
        [State(lambda value, y_true, y_pred: value + ops.sum(y_true * y_pred)), "mae"],
    ],
    ids=["keras", "mean", "function", "sum"],
)
def test_sums_are_accepted(metrics):
    assert check(metrics)
    assert check([], weighted_metrics=metrics)


@pytest.mark.parametrize(
    "metric",
    [
        largest(),
        State(lambda value, y_true, y_pred: ops.mean(y_pred)),
        State(lambda value, y_true, y_pred: value + ops.mean(y_pred)),
        State(lambda value, y_true, y_pred: value + 1.0),
        State(lambda value, y_true, y_pred: value + ops.sum(y_pred), aggregation="mean"),
        per_batch,
    ],
    ids=["maximum", "last", "sum of means", "batches", "declared", "function"],
)
def test_other_states_are_refused(metric):
    with pytest.raises(ValueError, match=r"must be a sum over samples.*Received: metric (own|per_batch)"):
        check([metric, "mae"])


def test_what_another_rank_finds_is_raised_here():
    with pytest.raises(ValueError, match="metric own, whose value is 3, on rank 1"):
        check([Hits()], other=("own:value is 3", True))


def test_batches_of_one_sample_tell_nothing():
    assert not check([largest()], count=1, other=("", False))
    assert check([largest()], count=1)


def test_the_check_leaves_the_model_as_it_was():
    metric = Hits()
    check([metric])
    assert "update_state" not in vars(metric)
    assert float(metric.count) == 0.0
