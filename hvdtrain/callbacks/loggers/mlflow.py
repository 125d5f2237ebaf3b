"""Log to MLflow: a local folder or a server."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

from hvdtrain.callbacks.loggers.logger import Logger, Package, Record, Run
from hvdtrain.system import private_files

_RUN = "hvdtrain.run"  # the tag that holds a run's id
_MOST_AT_ONCE = 100  # parameters or tags that MLflow takes in a call
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
_FILE_STORE = "MLFLOW_ALLOW_FILE_STORE"
_PACKAGE = Package("mlflow-skinny", "mlflow.tracking", {"MLFLOW_DISABLE_TELEMETRY": "true"})


class MLflowLogger(Logger):
    """Log a run to MLflow: metrics by global step, the configuration as parameters, the environment as tags.

    Metrics are named "interval/loss", "epoch/val_loss" and so on. A run that resumes from a checkpoint continues
    the same MLflow run. Repeated steps are not logged again. MLflow opens a folder only if MLFLOW_ALLOW_FILE_STORE is
    true, because its new features need a database: set the variable to look at the folder. MLflow's usage statistics
    stay off unless MLFLOW_DISABLE_TELEMETRY is set.

    Args:
        tracking_uri: a folder, or the address of a server. None for MLFLOW_TRACKING_URI, or the folder mlruns.
        experiment: that the run belongs to; made if there is none.
        name: of the run; None for HVDTRAIN_RUN_NAME, or the script's and the time.
        every_s: seconds between two logged intervals; an epoch's last interval is always logged.
        options: the script's own options, as JSON; logged with the configuration.
    """

    def __init__(
        self,
        tracking_uri: str | os.PathLike[str] | None = None,
        *,
        experiment: str = "hvdtrain",
        name: str | None = None,
        every_s: float = 5.0,
        options: dict[str, Any] | None = None,
    ) -> None:
        sink = _Run(os.fspath(tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "mlruns"), experiment)
        super().__init__(sink, every_s=every_s, options=options, name=name, package=_PACKAGE)


class _Run:
    def __init__(self, place: str, experiment: str) -> None:
        self._folder = None if "://" in place or place.startswith("file:") else Path(place)
        self._uri = place if self._folder is None else self._folder.absolute().as_uri()
        self._experiment = experiment
        self._client: Any = None
        self._id = ""
        self._logged: dict[str, int] = {}  # metric -> the last step that an earlier start has logged

    def open(self, run: Run) -> None:
        self._id, self._logged = "", {}
        if self._folder is not None:
            private_files.make_folder(self._folder)  # MLflow's own files in it have the umask's mode
        allows = self._uri.startswith("file:") and _FILE_STORE not in os.environ
        if allows:
            os.environ[_FILE_STORE] = "true"  # else newer versions of MLflow refuse to write to a folder
        try:
            self._client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=self._uri)
        finally:
            if allows:
                del os.environ[_FILE_STORE]
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
        earlier: list[Any] = []
        if run.goes_on:
            its = f"tags.`{_RUN}` = '{run.id}'"
            earlier = self._client.search_runs([experiment], filter_string=its, max_results=1)
        known: dict[str, str] = {}
        if not earlier:
            self._id = self._client.create_run(experiment, run_name=run.name, tags={_RUN: run.id}).info.run_id
        else:
            self._id, known = earlier[0].info.run_id, earlier[0].data.params
            self._client.update_run(self._id, status="RUNNING")
            for name in earlier[0].data.metrics:
                self._logged[name] = max(each.step for each in self._client.get_metric_history(self._id, name))
        self._describe(run, known)

    def write(self, record: Record) -> None:
        entities: Any = importlib.import_module("mlflow.entities")
        metrics = [
            entities.Metric(name, value, round(1000 * record.time), record.global_step)
            for name, value in ((_NOT_IN_NAMES.sub("_", name), value) for name, value in record.named.items())
            if record.global_step > self._logged.get(name, -1)
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, *, finished: bool) -> None:
        if self._id:
            ended, self._id = self._id, ""
            self._client.set_terminated(ended, status="FINISHED" if finished else "FAILED")

    def _describe(self, run: Run, known: dict[str, str]) -> None:
        """Log parameters, which MLflow never changes: what another start was given differently becomes a tag."""
        entities: Any = importlib.import_module("mlflow.entities")
        config = {_NOT_IN_NAMES.sub("_", name): str(value) for name, value in run.config.items()}
        changed = {f"config.{name}": value for name, value in config.items() if known.get(name, value) != value}
        tags = {_NOT_IN_NAMES.sub("_", name): str(value) for name, value in run.environment.items()} | changed
        params = [entities.Param(name, value) for name, value in config.items() if name not in known]
        run_tags = [entities.RunTag(name, value) for name, value in tags.items()]
        for kind, items in (("params", params), ("tags", run_tags)):
            for begin in range(0, len(items), _MOST_AT_ONCE):
                self._client.log_batch(self._id, **{kind: items[begin : begin + _MOST_AT_ONCE]})
