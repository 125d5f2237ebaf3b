"""Loggers to a CSV file, TensorBoard, MLflow and Weights & Biases. Each logger has its sink beside it."""

from __future__ import annotations

import csv
import importlib
import itertools
import logging
import os
import re
import socket
import time
from pathlib import Path
from typing import IO, Any

from hvdtrain.callbacks.loggers.logger import Logger, Package, Record, Run
from hvdtrain.callbacks.run_folder import Json
from hvdtrain.system import private_files
from hvdtrain.system.user_paths import expanded

log = logging.getLogger("hvdtrain")

_PLACE = ("kind", "time", "epoch", "step", "global_step")  # columns of a CSV file

_files_here = itertools.count()  # of TensorBoard and this process: names differ even within a second
# TensorBoard's own package: it imports neither torch nor TensorFlow.
_TENSORBOARD = Package("tensorboard", "tensorboard.summary.writer.record_writer")

_MLFLOW = Package("mlflow-skinny", "mlflow.tracking", {"MLFLOW_DISABLE_TELEMETRY": "true"})
_MLFLOW_ID = "hvdtrain.run"  # the tag that holds a run's id
_MLFLOW_MOST = 100  # parameters or tags that MLflow takes in a call
_MLFLOW_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
_MLFLOW_FILES = "MLFLOW_ALLOW_FILE_STORE"

_WANDB = Package("wandb", "wandb", {"WANDB_ERROR_REPORTING": "false"})  # which would want a network


class CSVLogger(Logger):
    """Log to a CSV file: one row per interval (`kind` is "interval") and per epoch ("epoch"), one column per metric.

    There are also rows for steps that change the learning rate ("step"), and for validations within epochs.

    A run that resumes from a checkpoint continues the file after the checkpoint's step; rows of later steps, which are
    repeated, are removed. Any other run begins a new file and renames an older one to log-old-1.csv.

    Args:
        path: the file.
        every_s: seconds between two logged intervals; an epoch's last interval is always logged.

    Raises:
        ValueError: every_s is below 0.
    """

    def __init__(self, path: str | os.PathLike[str], *, every_s: float = 5.0) -> None:
        super().__init__(_CSVFile(expanded(path)), every_s=every_s)


class _CSVFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: list[str] = []
        self._file: IO[str] | None = None

    def open(self, run: Run) -> None:
        private_files.make_folder(self._path.parent)
        self._columns = []
        if self._path.is_file():
            if run.global_step:
                rows = [row for row in self._read() if int(row["global_step"]) <= run.global_step]
                if self._columns:  # else it is empty: killed before its first line
                    self._rewrite(rows)
            else:
                names = (self._path.with_stem(f"{self._path.stem}-old-{number}") for number in itertools.count(1))
                aside = self._path.rename(next(name for name in names if not name.exists()))
                log.info("CSVLogger: moved the older %s to %s", self._path, aside)
        self._append()

    def write(self, record: Record) -> None:
        row: Json = {name: getattr(record, name) for name in _PLACE} | {"time": f"{record.time:.3f}"}
        row |= {name: repr(value) for name, value in record.values.items()}
        new = [name for name in row if name not in self._columns]
        if new:
            # Which metrics there are is known once they come: an epoch's, such as val_loss, after the first epoch.
            rows = self._read() if self._columns else None
            self._columns += new
            if rows is None:
                self._line(self._columns)
            else:
                self._rewrite(rows)
                self._append()
        self._line([row.get(name) for name in self._columns])

    def close(self, *, finished: bool) -> None:
        if self._file is not None:
            self._file.close()

    def _line(self, cells: list[Any]) -> None:
        assert self._file is not None
        csv.writer(self._file, lineterminator="\n").writerow(cells)
        self._file.flush()

    def _append(self) -> None:
        self.close(finished=False)
        self._file = private_files.open_file(self._path, "a", newline="", encoding="utf-8")

    def _read(self) -> list[Json]:
        """Return the file's rows, without a last row that was cut short, and store its columns."""
        text = self._path.read_text(encoding="utf-8")
        reader = csv.DictReader(text[: text.rfind("\n") + 1].splitlines(keepends=True))
        rows = list(reader)
        columns = list(reader.fieldnames or [])
        if columns[: len(_PLACE)] != list(_PLACE) and text:
            raise ValueError(f"{self._path} is no file of CSVLogger, and is left as it is: name another one")
        self._columns = columns
        return rows

    def _rewrite(self, rows: list[Json]) -> None:
        temporary = self._path.with_name(f".{self._path.name}.new")
        temporary.unlink(missing_ok=True)
        with private_files.open_file(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        temporary.replace(self._path)


class TensorBoardLogger(Logger):
    """Log to a folder that `tensorboard --logdir` shows: curves by global step, configuration and environment as text.

    Curves are named "interval/loss", "epoch/val_loss" and so on. One folder is one run. A run that resumes from a
    checkpoint adds a file to it, and TensorBoard hides the steps after the checkpoint's, which are repeated. If another
    run begins in the same folder, TensorBoard hides all earlier steps.

    Args:
        folder: the run's folder.
        every_s: seconds between two logged intervals; an epoch's last interval is always logged.
        options: the script's own options, as JSON; logged with the configuration.

    Raises:
        PackageMissingError: tensorboard is not installed.
        ValueError: every_s is below 0.
        TypeError: options are not JSON.
    """

    def __init__(self, folder: str | os.PathLike[str], *, every_s: float = 5.0, options: Json | None = None) -> None:
        super().__init__(_EventFile(expanded(folder)), every_s=every_s, options=options, package=_TENSORBOARD)


class _EventFile:
    """A file of events, without the package's EventFileWriter, which imports TensorFlow and reports failures late."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: Any = None

    def open(self, run: Run) -> None:
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        text: Any = importlib.import_module("tensorboard.plugins.text.summary_v2")
        writer: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        private_files.make_folder(self._folder)
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_files_here)}"
        self._file = private_files.open_file(self._folder / name, "xb")
        self._records = writer.RecordWriter(self._file)
        self._event(file_version="brain.Event:2")
        # Where it begins: what other files of this folder hold from there on is no part of the run.
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._event(step=run.global_step + 1 if run.global_step else 0, session_log=start)
        for tag, facts in (("config", run.config), ("environment", run.environment)):
            self._event(step=run.global_step, summary=text.text_pb(tag, _table(facts)))
        self._file.flush()

    def write(self, record: Record) -> None:
        summary = self._summaries.Summary()
        for tag, value in record.named.items():
            summary.value.add(tag=tag, simple_value=value)
        self._event(record.time, step=record.global_step, summary=summary)
        self._file.flush()

    def close(self, *, finished: bool) -> None:
        if self._file is not None:
            self._file.close()

    def _event(self, wall_time: float | None = None, **content: Any) -> None:
        event = self._events.Event(wall_time=time.time() if wall_time is None else wall_time, **content)
        self._records.write(event.SerializeToString())


def _table(facts: dict[str, Any]) -> str:
    """Return Markdown, which TensorBoard draws."""
    rows = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in fact] for fact in facts.items()]
    return "\n".join(["| name | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


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

    Raises:
        PackageMissingError: MLflow is not installed.
        ValueError: every_s is below 0.
        TypeError: options are not JSON.
    """

    def __init__(
        self,
        tracking_uri: str | os.PathLike[str] | None = None,
        *,
        experiment: str = "hvdtrain",
        name: str | None = None,
        every_s: float = 5.0,
        options: Json | None = None,
    ) -> None:
        sink = _MLflowRun(os.fspath(tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "mlruns"), experiment)
        super().__init__(sink, every_s=every_s, options=options, name=name, package=_MLFLOW)


class _MLflowRun:
    def __init__(self, place: str, experiment: str) -> None:
        self._folder = None if "://" in place or place.startswith("file:") else expanded(place)
        self._uri = place if self._folder is None else self._folder.absolute().as_uri()
        self._experiment = experiment
        self._client: Any = None
        self._id = ""
        self._logged: dict[str, int] = {}  # metric -> the last step that an earlier start has logged

    def open(self, run: Run) -> None:
        self._id, self._logged = "", {}
        if self._folder is not None:
            private_files.make_folder(self._folder)  # MLflow's own files in it have the umask's mode
        allows = self._uri.startswith("file:") and _MLFLOW_FILES not in os.environ
        if allows:
            os.environ[_MLFLOW_FILES] = "true"  # else newer versions of MLflow refuse to write to a folder
        try:
            self._client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=self._uri)
        finally:
            if allows:
                del os.environ[_MLFLOW_FILES]
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
        earlier: list[Any] = []
        if run.goes_on:
            its = f"tags.`{_MLFLOW_ID}` = '{run.id}'"
            earlier = self._client.search_runs([experiment], filter_string=its, max_results=1)
        known: dict[str, str] = {}
        if not earlier:
            self._id = self._client.create_run(experiment, run_name=run.name, tags={_MLFLOW_ID: run.id}).info.run_id
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
            for name, value in ((_MLFLOW_NOT_IN_NAMES.sub("_", name), value) for name, value in record.named.items())
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
        config = {_MLFLOW_NOT_IN_NAMES.sub("_", name): str(value) for name, value in run.config.items()}
        changed = {f"config.{name}": value for name, value in config.items() if known.get(name, value) != value}
        tags = {_MLFLOW_NOT_IN_NAMES.sub("_", name): str(value) for name, value in run.environment.items()} | changed
        params = [entities.Param(name, value) for name, value in config.items() if name not in known]
        run_tags = [entities.RunTag(name, value) for name, value in tags.items()]
        for kind, items in (("params", params), ("tags", run_tags)):
            for begin in range(0, len(items), _MLFLOW_MOST):
                self._client.log_batch(self._id, **{kind: items[begin : begin + _MLFLOW_MOST]})


class WandbLogger(Logger):
    """Log a run for Weights & Biases without a network: `wandb sync FOLDER/wandb/offline-run-...` uploads it.

    Metrics are named "interval/loss", "epoch/val_loss" and so on, by global step. A run that resumes from a
    checkpoint writes a second folder under the same run id, with repeated steps; `wandb sync` merges the folders of one
    id, in order, into one run. W&B's own collection of data (command line, host, git state, code, console output, error
    reports) is off. The configuration is that of `RunFolder`.

    Args:
        project: the run's project.
        folder: where the folder wandb is; None for WANDB_DIR, or the working directory.
        name: of the run; None for HVDTRAIN_RUN_NAME, or the script's and the time.
        every_s: seconds between two logged intervals; an epoch's last interval is always logged.
        options: the script's own options, as JSON; logged with the configuration.

    Raises:
        PackageMissingError: wandb is not installed.
        ValueError: every_s is below 0.
        TypeError: options are not JSON.
    """

    def __init__(
        self,
        project: str = "hvdtrain",
        *,
        folder: str | os.PathLike[str] | None = None,
        name: str | None = None,
        every_s: float = 5.0,
        options: Json | None = None,
    ) -> None:
        place = expanded(folder or os.environ.get("WANDB_DIR") or ".")
        super().__init__(_OfflineRun(project, place), every_s=every_s, options=options, name=name, package=_WANDB)


class _OfflineRun:
    def __init__(self, project: str, folder: Path) -> None:
        self._project = project
        self._folder = folder
        self._run: Any = None

    def open(self, run: Run) -> None:
        wandb: Any = importlib.import_module("wandb")
        private_files.make_folder(self._folder)
        if not os.access(self._folder, os.W_OK):  # W&B would take the system's temporary folder
            raise PermissionError(f"{self._folder} cannot be written to")
        private_files.make_folder(self._folder / "wandb")  # W&B's own files in it have the umask's mode
        self._run = wandb.init(
            project=self._project,
            dir=str(self._folder),
            id=run.id,
            name=run.name,
            mode="offline",
            config={**run.config, **{f"environment.{name}": value for name, value in run.environment.items()}},
            settings=wandb.Settings(
                reinit="create_new",  # besides a run of the script's own
                silent=True,
                console="off",
                disable_code=True,
                disable_git=True,
                save_code=False,
                x_disable_machine_info=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
                x_transaction_log_flush_interval=1.0,  # s: what is not written yet when the process is killed is lost
            ),
        )

    def write(self, record: Record) -> None:
        # An epoch and its last interval have the same step, and so go into one row.
        self._run.log(record.named, step=record.global_step)

    def close(self, *, finished: bool) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=0 if finished else 1)
