"""Records of loggers and their moments; a sink's errors do not reach the training."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import threading
import time

import numpy as np
import pytest

from hvdtrain.callbacks import Callback, CSVLogger, Logger, MLflowLogger, TensorBoardLogger, WandbLogger
from hvdtrain.callbacks.loggers import logger
from hvdtrain.errors import PackageMissingError
from hvdtrain.system import settings
from hvdtrain.training import progress


class Listen:
    """A sink that remembers, and raises or waits where it is told to."""

    def __init__(self, *, fail_at=math.inf, wait=None):
        self.runs, self.records, self.closed = [], [], []
        self.fail_at, self.wait = fail_at, wait

    def open(self, run):
        self.runs.append(run)

    def write(self, record):
        if self.wait is not None:
            self.wait.wait(30)
        if record.global_step >= self.fail_at:
            raise OSError(28, "No space left on device")
        self.records.append(record)

    def close(self, *, finished):
        self.closed.append(finished)


def test_what_is_logged_has_the_names_steps_and_values_of_metrics_jsonl(fit, tmp_path):
    from hvdtrain.callbacks import RunFolder

    sink = Listen()
    fit(Logger(sink, every_s=0), RunFolder(tmp_path, every_s=0))
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record.kind for record in sink.records] == ["interval"] * 3 + ["epoch"] + ["interval"] * 3 + ["epoch"]
    for record, line in zip(sink.records, kept, strict=True):
        assert [getattr(record, name) for name in ("kind", "epoch", "step", "global_step")] == [
            line.get(name) for name in ("kind", "epoch", "step", "global_step")
        ]
        assert abs(record.time - line["time"]) < 60
        for name, value in line["metrics"].items():
            assert record.values[name] == record.named[f"{line['kind']}/{name}"] == value
        for name in ("samples_per_s", "learning_rate"):
            assert name not in line or record.values[name] == line[name]
        for part, seconds in line.get("rank_s", {}).items():
            assert record.values[f"rank_s_max/{part}"] == max(seconds)
    assert {"loss", "val_loss", "learning_rate", "samples_per_s", "seconds"} == sink.records[-1].values.keys()


def test_numbers_of_any_kind_are_logged_and_nothing_else(fit):
    class Odd(Callback):
        def on_epoch_end(self, trainer, epoch, logs):
            logs |= {
                "bad": float("nan"),
                "rate": np.float32(0.5),
                "each": np.ones(2),
                "what": "x",
                "yes": True,
                "z": 1j,
            }

    sink = Listen()
    fit(Odd(), Logger(sink), epochs=1)
    values = sink.records[-1].values
    assert math.isnan(values["bad"])
    assert values["rate"] == 0.5
    assert not {"each", "what", "yes", "z"} & values.keys()


def test_a_sink_is_told_what_the_run_is_and_no_secrets(fit, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_API_KEY", "hunter2")
    monkeypatch.setenv("HVDTRAIN_RUN_NAME", "mine")
    monkeypatch.setattr("sys.argv", ["train.py", "--token", "hunter2"])
    sink = Listen()
    fit(Logger(sink, options={"width": 3, "deep": {"er": [1, 2]}}), epochs=1)
    run = sink.runs[0]
    assert (run.name, run.goes_on, run.global_step) == ("mine", False, 0)
    assert run.config["epochs"] == 1
    assert run.config["data.number of samples"] == 12
    assert (run.config["options.width"], run.config["options.deep.er"]) == (3, "[1, 2]")
    assert run.environment["ranks"] == 1
    assert "hunter2" not in str(run)
    assert "(hidden)" in run.environment["command"]


def test_the_sink_is_closed_however_training_ends(fit, fit_until):
    sink = Listen()
    fit(Logger(sink), epochs=1)
    fit_until(2, Logger(sink))
    with pytest.raises(ValueError, match="resume"):
        fit(Logger(sink), resume="sometimes")
    assert sink.closed == [True, False]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hvdtrain-Logger")]


def test_a_run_that_goes_on_keeps_its_id_and_another_run_has_another(fit, killed_and_gone_on):
    sink = Listen()
    killed_and_gone_on(lambda: Logger(sink, every_s=0))
    fit(Logger(sink), epochs=1)
    first, second, other = sink.runs
    assert first.id == second.id != other.id
    assert [run.goes_on for run in sink.runs] == [False, True, False]
    assert [run.global_step for run in sink.runs] == [0, 4, 0]
    assert second.name == first.name


def test_starts_of_one_job_are_one_run_without_a_checkpoint_too(fit, monkeypatch):
    sink = Listen()
    monkeypatch.setenv(settings.RUN_ID, "job")  # as `hvdtrain run` does
    for _ in ("killed", "started anew"):
        monkeypatch.setattr(progress, "_runs_here", itertools.count(1))
        fit(Logger(sink), epochs=1)
        fit(Logger(sink), epochs=1)  # the script's second run
    ids = [run.id for run in sink.runs]
    assert ids[0] == ids[2] != ids[1] == ids[3]
    assert all(run.goes_on for run in sink.runs)


@pytest.mark.parametrize("at", [0, 4])
def test_a_sink_that_fails_is_told_once_and_training_goes_on(fit, caplog, at):
    sink = Listen(fail_at=at)
    with caplog.at_level(logging.WARNING, "hvdtrain"):
        history = fit(Logger(sink, every_s=0))
    assert len(history["loss"]) == 2
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("Logger logs nothing more, and training continues without it: OSError: [Errno 28] No space")
    assert [record.global_step for record in sink.records] == [step for step in (1, 2, 3, 3) if step < at]
    assert sink.closed == [False]


def test_a_full_disk_costs_the_log_and_no_more(fit, caplog):
    history = fit(CSVLogger("/dev/full"))
    assert len(history["loss"]) == 2
    assert caplog.text.count("CSVLogger logs nothing more") == 1
    assert "No space left on device" in caplog.text


def test_a_folder_that_cannot_be_made_costs_the_log_and_no_more(fit, caplog, tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    history = fit(TensorBoardLogger(tmp_path / "file" / "run"))
    assert len(history["loss"]) == 2
    assert caplog.text.count("TensorBoardLogger logs nothing more") == 1


def test_a_working_folder_that_is_gone_costs_the_log_and_no_more(fit, caplog, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    sink = Listen()
    history = fit(Logger(sink))
    assert len(history["loss"]) == 2
    assert caplog.text.count("Logger logs nothing more") == 1
    assert sink.runs == []


def test_a_sink_that_takes_nothing_neither_stops_training_nor_its_end(fit, caplog, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(logger, "CLOSE_LIMIT_S", 0.2)
    began = time.monotonic()
    history = fit(Logger(Listen(wait=answer), every_s=0))
    assert time.monotonic() - began < 20  # it would wait 30 s for the first record alone
    assert len(history["loss"]) == 2
    assert caplog.text.count("did not end within 0.2 s") == 1
    caplog.clear()
    monkeypatch.setattr(logger, "_MOST_WAITING", 3)
    fit(Logger(Listen(wait=answer), every_s=0))
    answer.set()
    assert caplog.text.count("3 records wait for it") == 1
    assert len(caplog.records) == 1


def test_a_missing_package_is_named_at_construction_with_what_to_type(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    find_spec = logger.importlib.util.find_spec
    missing = ("tensorboard", "mlflow", "wandb")
    monkeypatch.setattr(logger.importlib.util, "find_spec", lambda name: None if name in missing else find_spec(name))
    for make_logger, package in (
        (lambda: TensorBoardLogger("x"), "tensorboard"), (MLflowLogger, "mlflow-skinny"), (WandbLogger, "wandb")
    ):  # fmt: skip
        with pytest.raises(PackageMissingError, match=f"Type: pip install {package}"):
            make_logger()
    CSVLogger("x.csv")
    assert os.listdir() == []


def test_a_folder_of_a_packages_name_is_no_package(monkeypatch, tmp_path):
    (tmp_path / "surely_no_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PackageMissingError):
        logger.Package("surely-no-package", "surely_no_package").require("Logger")


def test_a_package_that_does_not_import_costs_the_log_and_no_more(fit, caplog, tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("raise OSError('libbroken.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    sink = Listen()
    history = fit(Logger(sink, package=logger.Package("broken", "broken_package")))
    assert len(history["loss"]) == 2
    assert caplog.text.count("Logger logs nothing more") == 1
    assert "libbroken.so" in caplog.text
    assert (sink.runs, sink.records) == ([], [])


def test_importing_hvdtrains_callbacks_imports_no_logging_package():
    import subprocess
    import sys

    code = "import sys, hvdtrain.callbacks; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "hvdtrain.callbacks.loggers" in modules
    assert not {"tensorboard", "mlflow", "wandb", "torch", "tensorflow", "keras"} & set(modules)


def test_what_is_no_option_is_refused_before_training():
    with pytest.raises(TypeError):
        Logger(Listen(), options={"model": object()})
    with pytest.raises(ValueError, match="every_s must be >= 0"):
        Logger(Listen(), every_s=-1)
