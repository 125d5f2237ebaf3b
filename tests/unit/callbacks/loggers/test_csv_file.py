"""The CSV file after one start, and after several."""

from __future__ import annotations

import csv

import pytest

from hvdtrain import callbacks
from hvdtrain.callbacks import Callback, CSVLogger
from hvdtrain.distributed.world import SoloWorld


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_an_interval_and_one_an_epoch(fit, tmp_path):
    path = tmp_path / "new" / "log.csv"
    history = fit(CSVLogger(path, every_s=0))
    kept = rows(path)
    assert [(row["kind"], row["global_step"]) for row in kept[:4]] == [
        ("interval", "1"), ("interval", "2"), ("interval", "3"), ("epoch", "3")
    ]  # fmt: skip
    epochs = [row for row in kept if row["kind"] == "epoch"]
    for name in ("loss", "val_loss", "seconds"):
        assert [float(row[name]) for row in epochs] == history[name]
    assert kept[0]["val_loss"] == ""
    assert float(kept[0]["learning_rate"]) == pytest.approx(0.1)
    assert not list(path.parent.glob(".*"))


def test_a_metric_that_comes_late_gets_a_column(fit, tmp_path):
    class Late(Callback):
        def on_epoch_end(self, trainer, epoch, logs):
            if epoch:
                logs['late, "really"'] = 7.0

    path = tmp_path / "log.csv"
    fit(Late(), CSVLogger(path))
    assert [row['late, "really"'] for row in rows(path) if row["kind"] == "epoch"] == ["", "7.0"]


def test_a_run_that_goes_on_has_each_step_once(killed_and_gone_on, tmp_path):
    path = tmp_path / "log.csv"
    history = killed_and_gone_on(lambda: CSVLogger(path, every_s=0))
    kept = rows(path)
    steps = {kind: [int(row["global_step"]) for row in kept if row["kind"] == kind] for kind in ("interval", "epoch")}
    assert steps == {"interval": list(range(1, 10)), "epoch": [3, 6, 9]}
    assert [float(row["loss"]) for row in kept if row["kind"] == "epoch"] == history["loss"]
    assert not list(tmp_path.glob("log-old*"))


def test_a_row_that_a_kill_cut_short_is_dropped(fit, tmp_path):
    path = tmp_path / "log.csv"
    fit(CSVLogger(path, every_s=0), epochs=1, checkpoint_dir=str(tmp_path / "kept"))
    whole = path.read_text()
    path.write_text(whole + "interval,1700000000.000,0,1,3")
    fit(CSVLogger(path, every_s=0), epochs=2, checkpoint_dir=str(tmp_path / "kept"))
    assert path.read_text().startswith(whole)
    assert [row["global_step"] for row in rows(path)] == ["1", "2", "3", "3", "4", "5", "6", "6"]


def test_a_run_that_was_killed_before_its_first_row_goes_on(fit, tmp_path):
    path = tmp_path / "log.csv"
    fit(epochs=1, checkpoint_dir=str(tmp_path / "kept"))
    path.touch()

    class Late(Callback):
        def on_epoch_end(self, trainer, epoch, logs):
            logs["late"] = 7.0

    fit(Late(), CSVLogger(path, every_s=0), epochs=2, checkpoint_dir=str(tmp_path / "kept"))
    assert [row["global_step"] for row in rows(path)] == ["4", "5", "6", "6"]


def test_another_run_begins_a_file_and_keeps_the_older_ones(fit, tmp_path):
    path = tmp_path / "log.csv"
    texts = []
    for _ in range(3):
        fit(CSVLogger(path), epochs=1)
        texts.append(path.read_text())
    assert [(tmp_path / f"log-old-{number}.csv").read_text() for number in (1, 2)] == texts[:2]
    assert [row["kind"] for row in rows(path)].count("epoch") == 1


def test_a_file_that_is_not_ours_is_left_alone(fit, tmp_path, caplog):
    path = tmp_path / "log.csv"
    fit(epochs=1, checkpoint_dir=str(tmp_path / "kept"))
    path.write_text("name,age\nme,7\n")
    history = fit(CSVLogger(path), epochs=2, checkpoint_dir=str(tmp_path / "kept"))
    assert len(history["loss"]) == 2
    assert path.read_text() == "name,age\nme,7\n"
    assert f"{path} is no file of CSVLogger" in caplog.text


def test_kerass_csvlogger_beside_ours_takes_nothing_from_it():
    from hvdtrain.callbacks import keras_style
    from hvdtrain.callbacks.base import CallbackList

    class CSVLogger:  # as Keras has it: known by its class
        set_model = on_train_batch_end = None

    ours = [callbacks.CSVLogger("a.csv"), callbacks.CSVLogger("b.csv")]
    ours[0].load_state({"run": "id", "name": "name"})
    states = CallbackList(ours[:1]).states()
    CallbackList([keras_style.KerasStyle(CSVLogger()), ours[1]]).load_states(states, world=SoloWorld())
    assert ours[1].state() == ours[0].state()
