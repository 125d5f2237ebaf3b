"""Loggers on several ranks: the same for torch and every Keras backend."""

from __future__ import annotations

import csv
import importlib.util
import sys

import numpy as np
import pytest

from hvdtrain.callbacks import CSVLogger, Logger, MLflowLogger, TensorBoardLogger, WandbLogger

PACKAGES = ("tensorboard", "mlflow", "wandb")


class Listen:
    def __init__(self):
        self.heard = []

    def open(self, run):
        self.heard.append(run.environment["ranks"])

    def write(self, record):
        self.heard.append(record.kind)

    def close(self, *, finished):
        self.heard.append(finished)


def fit(trainer, *callbacks, epochs, **options):
    generator = np.random.default_rng(1)
    data = generator.normal(size=(44, 6)).astype(np.float32), generator.integers(0, 3, 44)
    return trainer.fit(
        data, validation=data, epochs=epochs, batch_size=4, callbacks=callbacks, progress=False, **options
    )


@pytest.mark.world_size(2)
def test_rank_0_logs_and_the_others_neither_write_nor_import(kit, world, shared_tmp_path):
    path, sink = shared_tmp_path / "log.csv", Listen()
    loggers = [CSVLogger(path), Logger(sink)]
    places = {"tensorboard": TensorBoardLogger, "mlflow": MLflowLogger, "wandb": WandbLogger}
    here = [package for package in PACKAGES if importlib.util.find_spec(package) is not None]
    for package in here:
        place = shared_tmp_path / package
        loggers.append(WandbLogger(folder=place) if package == "wandb" else places[package](place))
    before = set(sys.modules)
    history = fit(kit.trainer(kit.model()), *loggers, epochs=2)
    imported = [package for package in here if package in set(sys.modules) - before]
    assert imported == (here if world.is_root else [])
    heard = [each for each in sink.heard if each != "interval"]  # as many as there are seconds
    assert heard == ([2, "epoch", "epoch", True] if world.is_root else [])
    assert sorted(each.name for each in shared_tmp_path.iterdir()) == sorted(["log.csv", *here])
    with path.open(newline="") as file:
        epochs = [row for row in csv.DictReader(file) if row["kind"] == "epoch"]
    for name in ("loss", "val_accuracy", "samples_per_s"):
        assert [float(row[name]) for row in epochs] == history[name]


@pytest.mark.world_size(2)
def test_a_run_that_goes_on_from_a_checkpoint_goes_on_in_its_log(kit, world, shared_tmp_path):
    kept, path = str(shared_tmp_path / "kept"), shared_tmp_path / "log.csv"
    ids = set()

    class Remember(Listen):
        def open(self, run):
            ids.add(run.id)

    for epochs in (1, 2):
        trainer = kit.trainer(kit.model())
        fit(trainer, CSVLogger(path), Logger(Remember()), epochs=epochs, checkpoint_dir=kept)
        # Any of them may be the root when another one dies.
        assert len({each for rank in world.allgather_object([trainer.run.id, *ids]) for each in rank}) == 1
    assert len(ids) == (1 if world.is_root else 0)
    with path.open(newline="") as file:
        assert [row["epoch"] for row in csv.DictReader(file) if row["kind"] == "epoch"] == ["0", "1"]
