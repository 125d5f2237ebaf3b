"""Log to TensorBoard, with TensorBoard's own package: it imports neither torch nor TensorFlow."""

from __future__ import annotations

import importlib
import itertools
import os
import socket
import time
from pathlib import Path
from typing import Any

from hvdtrain.callbacks.loggers.logger import Logger, Package, Record, Run
from hvdtrain.system import private_files

_PACKAGE = Package("tensorboard", "tensorboard.summary.writer.record_writer")
_files_here = itertools.count()  # of this process: names differ even within a second


class TensorBoardLogger(Logger):
    """Log to a folder that `tensorboard --logdir` shows: curves by global step, configuration and environment as text.

    Curves are named "interval/loss", "epoch/val_loss" and so on. One folder is one run. A run that resumes from a
    checkpoint adds a file to it, and TensorBoard hides the steps after the checkpoint's, which are repeated. If another
    run begins in the same folder, TensorBoard hides all earlier steps.

    Args:
        folder: the run's folder.
        every_s: seconds between two logged intervals; an epoch's last interval is always logged.
        options: the script's own options, as JSON; logged with the configuration.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, every_s: float = 5.0, options: dict[str, Any] | None = None
    ) -> None:
        super().__init__(_EventFile(Path(folder)), every_s=every_s, options=options, package=_PACKAGE)


class _EventFile:
    """A file of TensorBoard's events.

    It writes records one by one, without the package's EventFileWriter, which imports TensorFlow if that is installed
    and reports a failure only later.
    """

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
