"""Step times for `hvdtrain bench`: compute, exposed communication and data wait, step by step.

Nothing is saved unless HVDTRAIN_STEP_TIMES is set, which `hvdtrain bench --script` does, or a `StepTimes` is made and a
framework's `step_marks` are attached to it.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import socket
import statistics
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hvdtrain.distributed import world
from hvdtrain.distributed.recorder import Recorder, Seconds, recorder
from hvdtrain.distributed.tuning import usable_cores
from hvdtrain.errors import HvdTrainError
from hvdtrain.telemetry import rank_memory
from hvdtrain.telemetry.memory import Parts

# "0" records until the script ends, "N" ends it after N measured steps. Each rank then prints one line that begins
# with MARK, and the rest of which is JSON: standard output is the one way back that every launcher has.
VARIABLE = "HVDTRAIN_STEP_TIMES"
MARK = "HVDTRAIN_STEP_TIMES:"

WARMUP_STEPS = 3  # they compile, allocate and connect: left out
MIN_STEPS = 2  # fewer measured steps have no spread
_SAVED_STEPS = 10_000  # the newest; a step is seven floats


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of measured values, in their unit."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}-{self.high:.3f}]"

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of `values`; of fewer than four the smallest and largest."""
        if len(values) < 4:
            return cls(statistics.median(values), min(values), max(values))
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class StepSummary:
    """A rank's typical step in seconds, split into parts that add up to its median.

    Their proportions are those of the middle half of the steps: a pause between two steps does not count. Where ranks
    exchange weights every so many steps, a step is the mean of those from one exchange to the next: most steps have
    none, and a median of steps would show none.
    """

    steps: int  # how many were measured
    step_s: Spread  # whole steps, from the end of one to the end of the next
    own_s: Spread  # what steps take this rank by itself: all but communication
    compute_s: float  # forward, backward, update, and whatever else is neither of the other two
    communication_s: float  # exposed: the rank did nothing but wait for the reduction, and in it for slower ranks
    data_s: float  # loading the next batch
    backward_s: float | None = None  # the backward pass's share of compute_s; None where nothing reports it
    exchanges: int | None = None  # of weights in these steps; None without a strategy that exchanges them


class StepTimes:
    """Saves the parts of each recorded step; calls `on_limit` from `limit` measured steps on, 0 for never."""

    def __init__(
        self, times: Recorder = recorder, *, limit: int = 0, on_limit: Callable[[], None] = lambda: None
    ) -> None:
        self.facts: dict[str, Any] = {}  # what the marks found out beside times, such as the gradient's size: JSON
        self.memory: Callable[[], Parts | None] = lambda: None  # what a step took at most; the marks replace it
        self.steps_taken = 0  # those of the warm-up included
        self.recorder = times
        self._limit, self._on_limit = limit, on_limit
        self._steps: deque[Seconds] = deque(maxlen=_SAVED_STEPS)
        self._exchanges: deque[int] = deque(maxlen=_SAVED_STEPS)  # up to each step's end
        times.on_step = self._add

    def _add(self, step: Seconds) -> None:
        self.steps_taken += 1
        if self.steps_taken > WARMUP_STEPS:
            self._steps.append(step)
            self._exchanges.append(self.recorder.exchanges or 0)
        if self._limit and self.steps_taken >= self._limit + WARMUP_STEPS:
            self._on_limit()

    def summary(self) -> StepSummary | None:
        """Return the typical step; None if there were too few after the warm-up."""
        if len(self._steps) < MIN_STEPS:
            return None
        steps = self._cycles()
        spread = Spread.of([sum(step) for step in steps])
        own = Spread.of([sum(step) - step.waited for step in steps])
        middle = [step for step in steps if spread.low <= sum(step) <= spread.high] or steps
        whole = sum(map(sum, middle))
        scale = spread.median / whole if whole else 0.0
        communication = scale * sum(step.waited for step in middle)
        data = scale * sum(step.data for step in middle)
        compute = spread.median - communication - data
        reported = any(step.backward for step in self._steps)
        backward = min(compute, scale * sum(step.backward for step in middle)) if reported else None
        exchanges = None if self.recorder.exchanges is None else self._exchanges[-1] - self._exchanges[0]
        return StepSummary(len(self._steps), spread, own, compute, communication, data, backward, exchanges)

    def _cycles(self) -> list[Seconds]:
        """Return the mean step from each exchange of weights to the next; without exchanges, the steps themselves."""
        steps, counts = [*self._steps], [*self._exchanges]
        begins = [index for index, (before, now) in enumerate(pairwise(counts), 1) if now > before]
        if not begins:
            return steps
        # What comes before the first exchange, and after the last, has none of its own.
        cycles = [steps[begin:end] for begin, end in pairwise(begins)] or [steps]
        return [Seconds._make(statistics.fmean(part) for part in zip(*cycle, strict=True)) for cycle in cycles]


@dataclass
class RankReport:
    """A rank's report, made when it ends."""

    rank: int
    size: int
    steps_taken: int  # all of them, the warm-up included
    summary: StepSummary | None  # None where steps_taken is too small
    facts: dict[str, Any] = field(default_factory=dict)  # `StepTimes.facts`, "host", "cores", "threads" and so on

    def to_json(self) -> str:
        """Return one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankReport:
        """Return what `to_json` wrote; raises ValueError, KeyError or TypeError for anything else."""
        report = json.loads(text)
        summary = report.pop("summary")
        if summary is not None:
            summary = StepSummary(**summary | {name: Spread(**summary[name]) for name in ("step_s", "own_s")})
        return cls(summary=summary, **report)


@functools.cache
def from_environment() -> StepTimes:
    """Return the object that records the steps for HVDTRAIN_STEP_TIMES, always the same one; it reports at exit."""
    limit = os.environ.get(VARIABLE, "")
    if not limit.isdigit():
        raise HvdTrainError(f"{VARIABLE} must be a number of steps, 0 for all of them. Received: {limit!r}")

    @functools.cache
    def report() -> None:
        text = rank_report(times).to_json()
        sys.stdout.flush()
        # Past whatever the script has made of sys.stdout, and in one piece.
        os.write(1, f"\n{MARK}{text}\n".encode())

    def end_script() -> None:
        times.facts["stopped"] = True
        report()
        # Every rank comes here after the same step: none is left waiting for another.
        raise SystemExit(0)

    times = StepTimes(limit=int(limit), on_limit=end_script)
    atexit.register(report)
    return times


def rank_report(times: StepTimes) -> RankReport:
    """Return this rank's report: its steps, its host and its settings."""
    engine: Any = next(iter(world._loaded.values()), None)
    facts: dict[str, Any] = {"host": socket.gethostname(), "cores": usable_cores(), **_threads(), **times.facts}
    rank, size = 0, 1
    if engine is not None:
        facts |= {"engine": engine.__name__, "mpi_built": bool(engine.mpi_built())}
        try:
            rank, size = engine.rank(), engine.size()
            gloo = os.environ.get("HOROVOD_CPU_OPERATIONS", "").lower() == "gloo" or not engine.mpi_enabled()
            facts |= {"local_size": engine.local_size(), "data_plane": "gloo" if gloo else "mpi"}
        except (ValueError, RuntimeError):  # the script has shut Horovod down: the launcher's variables are left
            rank = int(os.environ.get("HOROVOD_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
            size = int(os.environ.get("HOROVOD_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1)
    with contextlib.suppress(Exception):  # what cannot be measured
        facts |= {"memory": dataclasses.asdict(parts)} if (parts := times.memory()) is not None else {}
    facts["in_script"] = rank_memory.is_of_script()
    facts["device"] = getattr(world._world, "device", "cpu")
    return RankReport(rank, size, times.steps_taken, times.summary(), facts)


def _threads() -> dict[str, int]:
    """Return how many threads this process computes with, where that is known."""
    try:
        backend = sys.modules["keras"].config.backend() if "keras" in sys.modules else "torch"
        if backend == "tensorflow":
            # 0 lets TensorFlow decide: it reads the environment, else it uses one thread per core.
            chosen = sys.modules["tensorflow"].config.threading.get_intra_op_parallelism_threads()
            return {"threads": chosen or int(os.environ.get("TF_NUM_INTRAOP_THREADS") or usable_cores())}
        return {"threads": sys.modules["torch"].get_num_threads()} if backend == "torch" else {}
    except (AttributeError, KeyError):  # not imported, or still importing when the process ended
        return {}
