"""torchmetrics' objects in the Trainer equal one process's.

Three ranks alone, since torchmetrics takes seconds to import. tests/unit/torch/test_metrics.py has every kind of state
and other numbers of ranks.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from stopping import StopAt, StoppedError

import hvdtrain
from hvdtrain.callbacks import Checkpoint

pytestmark = [pytest.mark.usefixtures("hvd"), pytest.mark.world_size(3)]
CLASSES, BATCH = 3, 4
NAMES = ("MulticlassAUROC", "f1")


def data(num_samples, seed=0):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(num_samples, 6)).astype(np.float32), generator.integers(0, CLASSES, num_samples)


def metrics():
    import torchmetrics

    f1 = torchmetrics.F1Score("multiclass", num_classes=CLASSES, average="macro")
    return [torchmetrics.AUROC("multiclass", num_classes=CLASSES), torchmetrics.MetricCollection({"f1": f1})]


def trainer(lr=0.1):
    torch.manual_seed(0)
    net = torch.nn.Linear(6, CLASSES)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    return hvdtrain.Trainer(net, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss(), metrics=metrics())


def expected(run, x, y):
    """The metrics of one process that sees everything."""
    with torch.no_grad():
        outputs, targets = run.model(torch.from_numpy(x)), torch.from_numpy(y)
    auroc, collection = metrics()
    return [float(auroc(outputs, targets)), float(collection(outputs, targets)["f1"])]


@pytest.mark.parametrize("num_samples", [2, 53])
@pytest.mark.filterwarnings("ignore::UserWarning:torchmetrics")
def test_metrics_with_state_equal_one_processs_in_fit_and_evaluate(num_samples):
    (x, y), held_out = data(num_samples), data(7, seed=1)
    run = trainer(lr=0.0)  # so that every step of an epoch sees the same weights
    result = run.evaluate((x, y), batch_size=BATCH)
    assert [result[name] for name in NAMES] == pytest.approx(expected(run, x, y), abs=1e-6)
    history = run.fit((x, y), validation=held_out, epochs=2, batch_size=BATCH, progress=False)
    for prefix, samples in (("", (x, y)), ("val_", held_out)):
        for epoch in range(2):
            found = [history[prefix + name][epoch] for name in NAMES]
            assert found == pytest.approx(expected(run, *samples), abs=1e-6)
    assert not torch.distributed.is_initialized()


def test_metrics_with_state_go_on_where_a_run_was_stopped(shared_tmp_path):
    def fit(*callbacks):
        options = {"validation": data(7, seed=1), "epochs": 2, "batch_size": BATCH, "progress": False}
        history = trainer().fit(data(53), callbacks=list(callbacks), **options)
        return {name: history[name] for name in (*NAMES, *(f"val_{name}" for name in NAMES))}

    straight = fit()
    with pytest.raises(StoppedError):
        fit(Checkpoint(shared_tmp_path, every_steps=1), StopAt(7))  # in the second epoch
    assert fit(Checkpoint(shared_tmp_path, every_steps=1)) == straight
