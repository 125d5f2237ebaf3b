"""Keras's metrics in the Trainer equal one process's on any backend; others are refused on every rank."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import hvdtrain
from hvdtrain.distributed import world

CLASSES = 3


class Largest(keras.metrics.Metric):
    """A running maximum, which nothing tells ranks to combine as one."""

    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value.value, keras.ops.max(keras.ops.abs(y_pred))))

    def result(self):
        return self.value.value


class CountsInAttributes(keras.metrics.Mean):
    def __init__(self):
        super().__init__(name="counts")
        self.seen = 0

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.seen += 1
        super().update_state(y_pred)


def model():
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(CLASSES, activation="softmax")])
    generator = np.random.default_rng(0)
    net.set_weights([generator.normal(size=w.shape).astype(np.float32) for w in net.get_weights()])
    return net


def metrics():
    m = keras.metrics
    return [m.AUC(name="auc"), m.F1Score(average="macro", name="f1"), m.OneHotMeanIoU(CLASSES, name="iou")]


def trainer(net, metrics):
    eagerly = keras.backend.backend() == "tensorflow"  # whose tracing takes most of a test's time
    net.compile(
        keras.optimizers.SGD(0.0),
        loss="categorical_crossentropy",
        metrics=metrics,
        run_eagerly=eagerly,
        jit_compile=False,
    )
    return hvdtrain.Trainer(net)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")  # Keras's MeanIoU on JAX
@pytest.mark.world_size(2, 3)
def test_metrics_with_state_equal_one_processs_and_a_running_maximum_is_refused():
    rows = 23 if world.current().size == 2 else 4  # in the second step one rank alone has a sample
    generator = np.random.default_rng(1)
    x = generator.normal(size=(rows, 4)).astype(np.float32)
    y = np.eye(CLASSES, dtype=np.float32)[generator.integers(0, CLASSES, rows)]
    net = model()
    expected = {}
    for metric in metrics():
        metric.update_state(y, net.predict_on_batch(x))
        expected[metric.name] = float(metric.result())
    run = trainer(net, metrics())
    results = [run.evaluate((x, y), batch_size=2)]
    history = run.fit((x, y), validation=(x, y), epochs=1, batch_size=2, progress=False)
    results += [{name: history[prefix + name][0] for name in expected} for prefix in ("", "val_")]
    for found in results:
        assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match=r"sum over samples.*metric largest.*keras\.metrics\.Mean"):
        trainer(model(), [Largest()]).evaluate((x, y), batch_size=2)
    with pytest.raises(ValueError, match=r"metric counts, whose update_state counts in the Python attribute seen"):
        trainer(model(), [CountsInAttributes()]).evaluate((x, y), batch_size=2)
