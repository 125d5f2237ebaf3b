"""The common part of all loggers: records, when they are made, and the rank that writes them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from hvdtrain.callbacks.base import RunContext
from hvdtrain.callbacks.run_folder import Json, RecordingCallback, describe_environment, plain
from hvdtrain.errors import PackageMissingError
from hvdtrain.system import redact

log = logging.getLogger("hvdtrain")

_MOST_WAITING = 1000  # calls: more than an hour of intervals
CLOSE_LIMIT_S = 10.0  # of the 30 s that a rank has after a stop request


@dataclass(frozen=True)
class Run:
    """The run, as a sink sees it when it opens.

    Attributes:
        id: unique to the run; equal for all attempts and resumes of it, whichever rank is the root.
        name: a name for people.
        goes_on: whether an earlier attempt may have logged under this id.
        global_step: optimizer steps before this attempt; later steps that were logged are repeated.
        config: arguments of the Trainer, of fit and of the logger, without recognised secrets; names of nested dicts
            are joined with dots.
        environment: versions, hosts and variables, in the same form.
    """

    id: str
    name: str
    goes_on: bool
    global_step: int
    config: dict[str, Any]
    environment: dict[str, Any]


@dataclass(frozen=True)
class Record:
    """A line of metrics.jsonl as named numbers.

    Attributes:
        kind: "step", "interval", "validation" (of one set, within an epoch) or "epoch".
        time: in seconds since 1970.
        epoch: from 0.
        step: optimizer steps of the epoch so far; None for an epoch.
        global_step: optimizer steps of the run.
        values: of a step "learning_rate", else the metrics; of an interval also "samples_per_s", "learning_rate" and
            "rank_s_max/step", ".../data", ".../compute", ".../reduction", ".../other": mean seconds of a step, of the
            rank that takes longest.
    """

    kind: str
    time: float
    epoch: int
    step: int | None
    global_step: int
    values: dict[str, float]

    @property
    def named(self) -> dict[str, float]:
        """The values as "interval/loss", "epoch/val_loss": running and final metrics are not one curve."""
        return {f"{self.kind}/{name}": value for name, value in self.values.items()}


@dataclass(frozen=True)
class Package:
    """A package that a sink needs and hvdtrain does not install."""

    name: str  # that pip knows it by
    module: str  # that is imported on rank 0 when fit begins
    variables: dict[str, str] = field(default_factory=dict)  # set in the environment before that, unless they are

    def require(self, who: str) -> None:
        """Raise PackageMissingError unless it can be imported. It is not imported: other ranks do not need it."""
        spec = importlib.util.find_spec(self.module.partition(".")[0])
        # A folder of that name is no package, for example W&B's folder of runs.
        if spec is None or spec.origin is None:
            raise PackageMissingError(
                f"{who} needs the package {self.name}, which is not installed on host {socket.gethostname()}. Type: "
                f"pip install {self.name}"
            )

    def load(self) -> None:
        """Import it."""
        for name, value in self.variables.items():
            os.environ.setdefault(name, value)
        importlib.import_module(self.module)


class Sink(Protocol):
    """The target of a logger, used in one thread, on rank 0 only. An exception ends the logging."""

    def open(self, run: Run) -> None:
        """Begin a log, or continue the log of an earlier attempt."""

    def write(self, record: Record) -> None:
        """Write a record so that it outlives this process."""

    def close(self, *, finished: bool) -> None:
        """Close what `open` opened, if anything; `finished` says whether the run reached its end."""


class Logger(RecordingCallback):
    """Log a run to a sink, on rank 0, in the background, with the moments and names of metrics.jsonl.

    If a sink fails, because of a full disk or a lost server, a warning says so and its log ends; training continues. A
    run that resumes from a checkpoint continues its log.

    Args:
        sink: where to log.
        every_s: seconds between two logged intervals; an epoch's last interval is always logged.
        options: the script's own options, as JSON; logged with the configuration.
        name: of the run; None for HVDTRAIN_RUN_NAME, or the script's and the time.
        package: what the sink needs.

    Raises:
        PackageMissingError: the package is not installed.
        ValueError: every_s is below 0.
        TypeError: options are not JSON.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        every_s: float = 5.0,
        options: Json | None = None,
        name: str | None = None,
        package: Package | None = None,
    ) -> None:
        if package is not None:
            package.require(type(self).__name__)
        super().__init__(every_s, options)
        self._sink = sink
        self._given_name = name
        self._package = package
        self._finished = self._begun = False
        self._background: Background | None = None

    @property
    def name(self) -> str:
        """The class's name with a prefix: Keras has a CSVLogger, too."""
        return f"hvdtrain.{type(self).__name__}"

    def on_fit_begin(self, trainer: RunContext) -> None:
        """Import the sink's package, on rank 0."""
        self._finished = self._begun = False
        if trainer.world.is_root:
            self._background = Background(type(self).__name__, lambda well: self._sink.close(finished=well))
            if self._package is not None:
                # Here all ranks wait. During the first steps, the import would make this rank look slow.
                self._background.attempt(self._package.load)

    def on_epoch_begin(self, trainer: RunContext, epoch: int) -> None:
        """Open the sink before the first epoch; a run without epochs logs nothing."""
        if self._background is not None and not self._begun:
            self._begun = True
            self._background.attempt(partial(self._open, self._background, trainer))

    def _open(self, background: Background, trainer: RunContext) -> None:
        assert trainer.run is not None  # within fit
        run = Run(
            id=trainer.run.id,
            name=self._given_name or trainer.run.name,
            goes_on=trainer.run.resumed,
            global_step=trainer.global_step,
            config=_flat(redact.document(plain({**trainer.config, "options": self._options}))),
            environment=_flat(describe_environment(trainer)),
        )
        background.submit(partial(self._sink.open, run))

    def on_fit_end(self, trainer: RunContext) -> None:
        """Note that the run has reached its end."""
        self._finished = True

    def close(self) -> None:
        """Write all waiting records, and close the sink; wait for ten seconds at most."""
        self._record_waiting()
        if self._background is not None:
            background, self._background = self._background, None
            background.close(well=self._finished, limit_s=CLOSE_LIMIT_S)

    def record(self, facts: Json) -> None:
        """Write to the sink, in the background."""
        if self._background is not None:
            self._background.submit(partial(self._sink.write, _record(facts)))


def _record(facts: Json) -> Record:
    # What callbacks put into logs may be of NumPy's types, or no number at all.
    values = {
        name: float(value)
        for name, value in facts.get("metrics", {}).items()
        if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    }
    values |= {name: facts[name] for name in ("samples_per_s", "learning_rate") if name in facts}
    values |= {f"rank_s_max/{part}": max(ranks) for part, ranks in facts.get("rank_s", {}).items()}
    return Record(
        kind=facts["kind"], time=facts["time"], epoch=facts["epoch"], step=facts.get("step"),
        global_step=facts["global_step"], values=values,
    )  # fmt: skip


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return {"data.number of samples": 900}; lists become JSON, which tools for parameters can show."""
    flat: dict[str, Any] = {}
    for name, each in plain(value).items():
        if isinstance(each, dict):
            flat |= _flat(each, f"{prefix}{name}.")
        else:
            flat[prefix + name] = json.dumps(each) if isinstance(each, list) else each
    return flat


class Background:
    """Makes calls in a separate thread, one after the other, and `release`, with whether all succeeded, in the end.

    The first call that raises causes one warning and is the last call: after a full disk or a lost server, later calls
    would fail too. A call that does not return while a thousand others wait ends it in the same way.
    """

    def __init__(self, who: str, release: Callable[[bool], object]) -> None:
        self._who = who
        self._release = release
        self._failed = threading.Event()
        self._well = False
        self._calls: queue.Queue[Callable[[], object] | None] = queue.Queue(_MOST_WAITING)
        # A daemon: a process that ends does not wait for a server that does not answer.
        self._thread = threading.Thread(target=self._run, name=f"hvdtrain-{who}", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], object]) -> None:
        """Queue `call`. It has no effect after a call has failed."""
        if self._failed.is_set():
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._fail(f"it takes nothing, and {_MOST_WAITING} records wait for it")

    def close(self, *, well: bool, limit_s: float) -> None:
        """Finish the queued calls, call `release`, and wait for both up to `limit_s`; `well`: the run succeeded."""
        self._well = well
        until = time.monotonic() + limit_s
        with suppress(queue.Full):
            self._calls.put(None, timeout=0 if self._failed.is_set() else limit_s)
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive() and not self._failed.is_set():
            self._fail(f"it did not end within {limit_s:g} s; the last records may be missing")

    def _run(self) -> None:
        while not self._failed.is_set() and (call := self._calls.get()) is not None:
            self.attempt(call)
        self.attempt(lambda: self._release(self._well and not self._failed.is_set()))

    def attempt(self, call: Callable[[], object]) -> None:
        """Make a call in this thread."""
        try:
            call()
        except Exception as problem:  # noqa: BLE001 - another package's error: training continues
            self._fail(problem)

    def _fail(self, why: object) -> None:
        if not self._failed.is_set():
            self._failed.set()
            what = f"{type(why).__name__}: {why}" if isinstance(why, Exception) else why
            # A server's address may contain a password.
            log.warning(
                "%s logs nothing more, and training continues without it: %s", self._who, redact.text(str(what))
            )
