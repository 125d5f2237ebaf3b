"""Record the configuration and the metrics of a run, in files that other tools can read."""

from __future__ import annotations

import datetime
import itertools
import json
import logging
import math
import os
import platform
import re
import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from hvdtrain.callbacks.base import Callback, Logs, RunContext
from hvdtrain.horovod_build.installed import version_of
from hvdtrain.system import private_files, redact
from hvdtrain.system.settings import RUN_NAME
from hvdtrain.system.user_paths import expanded
from hvdtrain.telemetry.interval import PARTS, Interval

log = logging.getLogger("hvdtrain")

Json = dict[str, Any]

RUNS = "HVDTRAIN_RUNS"
CONFIG, ENVIRONMENT, METRICS = "config.json", "environment.json", "metrics.jsonl"

_PACKAGES = ("hvdtrain", "horovod", "torch", "tensorflow", "tensorflow-cpu", "keras", "jax", "numpy")
_VARIABLES = (
    "HOROVOD_", "OMPI_MCA_", "PRTE_MCA_", "NCCL_", "HVDTRAIN_", "OMP_NUM_THREADS", "KERAS_BACKEND",
    "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
# Set by a launcher so that its ranks find each other: not chosen by the user, and different each time.
_OF_THE_LAUNCH = re.compile(
    r"OMPI_MCA_(orte_|ess|initial_wdir|pmix|shmem_RUNTIME|PREFIXES|cpu_type|num_procs)|PRTE_MCA_prte_|HOROVOD_(RANK|SIZE|LOCAL_|CROSS_|HOSTNAME|GLOO_RENDEZVOUS)"
)

_runs_here = itertools.count(1)  # of a job with a name


_ROWS_A_DOUBLING = 64  # learning rates recorded between two powers of two of steps


class RecordingCallback(Callback):
    """Calls `record` for steps that change the learning rate, for intervals, validations and epochs, in their order.

    See `RunFolder` for its arguments and for records.
    """

    def __init__(self, every_s: float, options: Json | None) -> None:
        if not every_s >= 0:
            raise ValueError(f"every_s must be >= 0. Received: every_s={every_s!r}")
        json.dumps(options)
        self._options = options or {}
        self._every_s = every_s
        self._recorded_at = -math.inf
        self._newest: Interval | None = None  # not recorded yet
        self._rate: float | None = None  # the learning rate that was seen last
        self._rates: list[Json] = []  # not recorded yet

    def record(self, facts: Json) -> None:
        """Record a step, an interval, a validation or an epoch."""
        raise NotImplementedError

    def on_step_end(self, trainer: RunContext, step: int) -> None:
        """Note another learning rate: of each step at first, later of fewer, the same ones in each run."""
        done = trainer.global_step
        if done % max(1, (1 << done.bit_length()) // (2 * _ROWS_A_DOUBLING)) or not trainer.world.is_root:
            return
        before, self._rate = self._rate, trainer.learning_rate
        if before not in (None, self._rate):
            place = {"epoch": trainer.epoch, "step": trainer.step, "global_step": done}
            self._rates.append({"time": time.time(), "kind": "step", **place, "learning_rate": self._rate})

    def on_interval(self, trainer: RunContext, interval: Interval) -> None:
        """Record an interval, if it is time."""
        self._newest = interval
        if time.monotonic() - self._recorded_at >= self._every_s:
            self._record_waiting()

    def on_validation_end(self, trainer: RunContext, logs: Logs) -> None:
        """Record a validation within an epoch; the epoch's record has the one at its end."""
        if trainer.in_epoch:
            self._record_waiting()
            place = {"epoch": trainer.epoch, "step": trainer.step, "global_step": trainer.global_step}
            self.record({"time": time.time(), "kind": "validation", **place, "metrics": logs})

    def on_epoch_end(self, trainer: RunContext, epoch: int, logs: Logs) -> None:
        """Record the epoch's last interval, then its metrics."""
        self._record_waiting()
        facts = {"time": time.time(), "kind": "epoch", "epoch": epoch, "global_step": trainer.global_step}
        self.record({**facts, "metrics": logs, "memory": trainer.memory})

    def _record_waiting(self) -> None:
        """Record the newest interval and the learning rates, in the order of their steps."""
        waiting, self._rates = self._rates, []
        if self._newest is not None:
            waiting.append(_describe_interval(self._newest))
            self._newest, self._recorded_at = None, time.monotonic()
        for facts in sorted(waiting, key=lambda each: each["global_step"]):
            self.record(facts)


def _describe_interval(interval: Interval) -> Json:
    parts = {part: getattr(interval.times, part) for part in ("step", *PARTS)}
    return {
        "time": time.time(), "kind": "interval", "epoch": interval.epoch, "step": interval.step,
        "global_step": interval.global_step, "samples_per_s": interval.samples_per_s,
        "learning_rate": interval.learning_rate, "metrics": interval.metrics,
        "rank_s": {name: [float(f"{value:.6g}") for value in part] for name, part in parts.items()},
    }  # fmt: skip


class RunFolder(RecordingCallback):
    """Write a folder for this run: config.json, environment.json, and metrics.jsonl, a line at a time.

    metrics.jsonl has one JSON object per line. `"kind": "interval"` has "epoch", "step", "global_step", "samples_per_s"
    over all ranks, "learning_rate", "metrics" of the epoch so far, and "rank_s", each rank's mean seconds of a step:
    {"step": [...], "data": [...], "compute": [...], "reduction": [...], "other": [...]}, as in `RankTimes`. `"kind":
    "step"` has the "learning_rate" after a step that changed it: of each of the first 127 steps, later of 64 in the
    time in which the number of steps doubles. `"kind": "validation"` has the metrics of a validation set within an
    epoch. `"kind": "epoch"` has the metrics of History, also for a part of an epoch after which steps or seconds ended
    the run, and rank 0's `Trainer.memory`. Epochs count from 0, as in callbacks and in all loggers; on the screen they
    count from 1. NaN and infinity are null, because JSON has no such numbers. A resumed run appends. Rank 0 writes; if
    a write fails, it logs a warning and training continues. What looks like a secret is left out, in the options too.
    Only the owner can read the files, unless HVDTRAIN_SHARE_FILES=1.

    Args:
        folder: the run's folder. None for runs/<name>. HVDTRAIN_RUNS replaces runs; if it is empty, nothing is written.
            <name> is HVDTRAIN_RUN_NAME, or the script's name and the time.
        every_s: seconds between two intervals that are written; an epoch's last one always is.
        options: the script's own options, as JSON, to be written to config.json too.

    Raises:
        ValueError: every_s is below 0.
        TypeError: options are not JSON.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, *, every_s: float = 5.0, options: Json | None = None
    ) -> None:
        super().__init__(every_s, options)
        self.folder = None if folder is None else expanded(folder)
        self._file: IO[str] | None = None

    def on_fit_begin(self, trainer: RunContext) -> None:
        """Make the folder, and write the run's configuration and environment."""
        if not trainer.world.is_root or (self.folder is None and os.environ.get(RUNS) == ""):
            return
        try:
            self.folder = make_folder() if self.folder is None else self.folder
            private_files.make_folder(self.folder)
            _write(self.folder / CONFIG, {**trainer.config, "options": self._options})
            _write(self.folder / ENVIRONMENT, describe_environment(trainer))
            self._file = private_files.open_file(self.folder / METRICS, "a", encoding="utf-8")
        except OSError as problem:
            log.warning("this run is not recorded in %s: %s", self.folder or "a run folder", problem)

    def on_training_end(self, trainer: RunContext) -> None:
        """Say where the run is recorded, and how to see it."""
        if self._file is not None:
            line = f"recorded in {self.folder}; for a page with curves: hvdtrain report {shlex.quote(str(self.folder))}"
            trainer.decisions.append(line)
            log.info("%s", line)

    def close(self) -> None:
        """Write the records that still wait, and close the file."""
        self._record_waiting()
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError as problem:
                log.warning("the last records in %s may be missing: %s", self.folder, problem)

    def record(self, facts: Json) -> None:
        """Append a line to metrics.jsonl."""
        if self._file is None:
            return
        try:
            # One write and a flush: a reader finds complete lines, during the run and after a kill.
            self._file.write(json.dumps(redact.strings(plain(facts))) + "\n")
            self._file.flush()
        except OSError as problem:
            log.warning("this run is not recorded any longer in %s: %s", self.folder, problem)
            self._file = None


def make_folder() -> Path:
    """Make runs/<name> and return it: a new one, unless HVDTRAIN_RUN_NAME says that several starts are one run.

    The run of a script's second Trainer is <name>-2, in every start.
    """
    runs, name = expanded(os.environ.get(RUNS, "runs")), os.environ.get(RUN_NAME)
    private_files.make_folder(runs)
    for number in _runs_here if name else itertools.count(1):
        folder = runs / ((name or default_name()) + (f"-{number}" if number > 1 else ""))
        with suppress(FileExistsError):
            private_files.make_folder(folder, exist_ok=bool(name))
            return folder
    raise AssertionError


def default_name() -> str:
    """Return the script's name and the time."""
    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] not in ("", "-", "-c", "-m") else "run"
    return f"{script}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def describe_environment(trainer: RunContext) -> dict[str, Any]:
    """Return host, versions and variables of this run; values that look like secrets are left out."""
    chosen = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_VARIABLES) and not _OF_THE_LAUNCH.match(name)
    }
    found: dict[str, Any] = redact.document({
        "began": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": sys.argv,
        "folder": os.getcwd(),
        "ranks": trainer.world.size,
        "hosts": list(trainer.hosts),
        "device": trainer.world.device,
        "engine": trainer.world.engine,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version for name in _PACKAGES if (version := version_of(name))},
        "variables": chosen,
    })  # fmt: skip
    return found


def _write(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)  # left by a killed start, perhaps with another mode
    private_files.write_text(temporary, json.dumps(redact.document(plain(value)), indent=2) + "\n")
    temporary.replace(path)


def plain(value: Any) -> Any:
    """Return `value` as JSON can hold it; what callbacks put into logs may be of NumPy's types."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
