"""A local folder, read by MLflow's own client."""

from __future__ import annotations

import importlib.util
import itertools
import os
import socket

import pytest

from hvdtrain.callbacks import MLflowLogger
from hvdtrain.callbacks.loggers import logger
from hvdtrain.system import settings
from hvdtrain.training import progress

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="pip install 'hvdtrain[loggers]'"),
    # MLflow's own: it says once that folders get no new features.
    pytest.mark.filterwarnings("ignore:The filesystem tracking backend"),
]


@pytest.fixture
def client(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.tracking import MlflowClient

    def make(folder):
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        made = MlflowClient(tracking_uri=folder.as_uri())
        monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
        return made

    return make


def the_runs(client, experiment="hvdtrain"):
    return client.search_runs([client.get_experiment_by_name(experiment).experiment_id])


def history_of(client, run, name):
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]


def test_mlflows_client_reads_metrics_parameters_and_tags(fit, client, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--token", "hunter2"])
    history = fit(MLflowLogger(tmp_path / "ml", experiment="mine", name="first", every_s=0, options={"width": 3}))
    assert "MLFLOW_ALLOW_FILE_STORE" not in os.environ
    reader = client(tmp_path / "ml")
    (run,) = the_runs(reader, "mine")
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert history_of(reader, run, "epoch/val_loss") == list(zip((3, 6), history["val_loss"], strict=True))
    assert [step for step, _ in history_of(reader, run, "interval/loss")] == [1, 2, 3, 4, 5, 6]
    assert {"interval/learning_rate", "interval/rank_s_max/compute"} <= run.data.metrics.keys()
    assert (run.data.params["options.width"], run.data.params["data.number of samples"]) == ("3", "12")
    assert run.data.tags["command"] == '["train.py", "--token", "(hidden)"]'


def test_a_run_that_goes_on_is_one_run_with_each_step_once(killed_and_gone_on, client, tmp_path):
    widths = iter((3, 4))
    history = killed_and_gone_on(
        lambda: MLflowLogger(tmp_path / "ml", every_s=0, options={"width": next(widths), "depth": 2})
    )
    reader = client(tmp_path / "ml")
    (run,) = the_runs(reader)
    assert run.info.status == "FINISHED"
    assert [step for step, _ in history_of(reader, run, "interval/loss")] == list(range(1, 10))
    assert history_of(reader, run, "epoch/loss") == list(zip((3, 6, 9), history["loss"], strict=True))
    assert (run.data.params["options.width"], run.data.tags["config.options.width"]) == ("3", "4")
    assert "config.options.depth" not in run.data.tags


def test_runs_that_do_not_go_on_are_runs_of_their_own_and_one_that_raises_has_failed(fit, fit_until, client, tmp_path):
    fit(MLflowLogger(tmp_path / "ml"), epochs=1)
    fit_until(2, MLflowLogger(tmp_path / "ml"))
    assert sorted(run.info.status for run in the_runs(client(tmp_path / "ml"))) == ["FAILED", "FINISHED"]


def test_a_run_that_is_started_anew_before_its_first_checkpoint_is_one_run(
    fit, fit_until, client, tmp_path, monkeypatch
):
    monkeypatch.setenv(settings.RUN_ID, "job")
    fit_until(2, MLflowLogger(tmp_path / "ml", every_s=0))
    monkeypatch.setattr(progress, "_runs_here", itertools.count(1))
    fit(MLflowLogger(tmp_path / "ml", every_s=0), epochs=1)
    reader = client(tmp_path / "ml")
    (run,) = the_runs(reader)
    assert run.info.status == "FINISHED"
    assert [step for step, _ in history_of(reader, run, "interval/loss")] == [1, 2, 3]


def test_more_parameters_than_mlflow_takes_at_once_are_all_there(fit, client, tmp_path):
    options = {f"option {number}": number for number in range(250)} | {"odd*name": 1}
    fit(MLflowLogger(tmp_path / "ml", options=options), epochs=1)
    (run,) = the_runs(client(tmp_path / "ml"))
    assert run.data.params["options.option 249"] == "249"
    assert run.data.params["options.odd_name"] == "1"


def test_a_server_that_never_answers_costs_the_log_and_no_more(fit, caplog, monkeypatch):
    monkeypatch.setattr(logger, "CLOSE_LIMIT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        history = fit(MLflowLogger(f"http://127.0.0.1:{server.getsockname()[1]}"))
    assert len(history["loss"]) == 2
    assert caplog.text.count("MLflowLogger logs nothing more") == 1
