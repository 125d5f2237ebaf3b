"""Where a rank's training time goes: a recorder of compute, exposed communication and data wait, step by step.

Nothing records unless `start` is called, or the environment variable HVDTRAIN_STEP_TIMES is set, which `hvdtrain bench
--script` does; then each framework's `step_marks` calls the recorder, and otherwise no code of it runs at all.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import socket
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.distributed.tuning import usable_cores
from hvdtrain.errors import HvdTrainError

# "0" records until the script ends, "N" ends it after N measured steps. Each rank then prints one line that begins
# with MARK, and the rest of which is JSON: standard output is the one way back that every launcher has.
VARIABLE = "HVDTRAIN_STEP_TIMES"
MARK = "HVDTRAIN_STEP_TIMES:"

WARMUP_STEPS = 3  # they compile, allocate and connect: left out
MIN_STEPS = 2  # fewer measured steps have no spread
_KEPT_STEPS = 10_000  # the newest; a step is four floats


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of what was measured, in its own unit."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}-{self.high:.3f}]"

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of `values`; fewer than four have no quartiles: then the smallest and largest."""
        if len(values) < 4:
            return cls(statistics.median(values), min(values), max(values))
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


@dataclass(frozen=True)
class Summary:
    """A rank's typical step, split into parts that add up to its median, in seconds.

    The parts have the proportions of the steps of the middle half, so that an evaluation or a pause between two steps
    does not count.

    Attributes:
        steps: how many were measured.
        step_s: median and quartiles of whole steps, from the end of one to the end of the next.
        compute_s: forward, backward, update, and whatever else is neither of the other two.
        communication_s: exposed: the rank did nothing but wait for the reduction, and in it for slower ranks.
        data_s: from the end of a step to the next batch being there.
        own_s: median and quartiles of what steps take this rank by itself: all but communication.
        backward_s: what the backward pass takes of compute_s; None where it cannot be seen from outside.
    """

    steps: int
    step_s: Spread
    own_s: Spread
    compute_s: float
    communication_s: float
    data_s: float
    backward_s: float | None = None


@dataclass
class _Step:
    communication: float = 0.0
    data: float = 0.0
    backward: float = 0.0
    total: float = 0.0


class Recorder:
    """Adds up the parts of each step; all times are of this rank's own clock.

    Args:
        limit: number of measured steps after which `on_limit` is called; 0 means never.
        on_limit: called at the end of that step and of each one after it.
        clock: seconds, ever rising.

    Attributes:
        facts: what the marks found out beside times, such as the gradient's size: JSON.
    """

    def __init__(
        self,
        *,
        limit: int = 0,
        on_limit: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self.facts: dict[str, Any] = {}
        self._limit = limit
        self._on_limit = on_limit
        self._steps: deque[_Step] = deque(maxlen=_KEPT_STEPS)
        self._count = 0
        self._sees_backward = False
        self.begin()

    def begin(self) -> None:
        """Let the step under way begin now: what went before it is not counted."""
        self._current = _Step()
        self._began = self.clock()

    def waited(self, seconds: float) -> None:
        """Count `seconds` of the step under way as exposed communication."""
        self._current.communication += max(0.0, seconds)

    def waited_for_data(self, seconds: float) -> None:
        """Count `seconds` of the step under way as data wait."""
        self._current.data += max(0.0, seconds)

    def went_backward(self, seconds: float) -> None:
        """Count `seconds` of the step under way as backward pass, waits within it included."""
        self._sees_backward = True
        self._current.backward += max(0.0, seconds)

    def step_done(self) -> None:
        """End the step under way; the next one begins."""
        now = self.clock()
        step, self._current = self._current, _Step()
        step.total, self._began = now - self._began, now
        self._count += 1
        if self._count > WARMUP_STEPS:
            self._steps.append(step)
        if self._limit and self._on_limit and self._count >= self._limit + WARMUP_STEPS:
            self._on_limit()

    @property
    def steps_taken(self) -> int:
        """Steps so far, those of the warm-up included."""
        return self._count

    def summary(self) -> Summary | None:
        """Return the typical step; None if there were too few after the warm-up."""
        if len(self._steps) < MIN_STEPS:
            return None
        spread = Spread.of([step.total for step in self._steps])
        middle = [step for step in self._steps if spread.low <= step.total <= spread.high] or [*self._steps]
        whole = sum(step.total for step in middle)

        def part(of: Callable[[_Step], float]) -> float:
            return spread.median * sum(map(of, middle)) / whole if whole else 0.0

        communication, data = part(lambda step: step.communication), part(lambda step: step.data)
        compute = spread.median - communication - data
        backward = min(compute, part(lambda step: step.backward)) if self._sees_backward else None
        own = Spread.of([step.total - step.communication for step in self._steps])
        return Summary(len(self._steps), spread, own, compute, communication, data, backward)


@dataclass
class RankTimes:
    """What one rank reports at its end.

    Attributes:
        rank: its number; 0 in a run of one process.
        size: number of ranks.
        steps_taken: all of them, the warm-up included.
        summary: None where steps_taken is too small.
        facts: see `Recorder.facts`; "host", "cores", "threads", "local_size" and so on.
    """

    rank: int
    size: int
    steps_taken: int
    summary: Summary | None
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return one line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RankTimes:
        """Return what `to_json` wrote; raises ValueError, KeyError or TypeError for anything else."""
        told = json.loads(text)
        summary = told.pop("summary")
        if summary is not None:
            summary |= {name: Spread(**summary[name]) for name in ("step_s", "own_s")}
            summary = Summary(**summary)
        return cls(summary=summary, **told)


_recorder: Recorder | None = None


def recorder() -> Recorder | None:
    """Return the recorder, or None where nothing is recorded."""
    return _recorder


def start(recorder: Recorder | None) -> None:
    """Record into `recorder` from now on; None ends it. The frameworks' `step_marks.attach` fill it."""
    global _recorder
    _recorder = recorder


def from_environment() -> Recorder:
    """Return the recorder that HVDTRAIN_STEP_TIMES asks for, the same one each time.

    Raises:
        HvdTrainError: the variable is not a number of steps.
    """
    if _recorder is not None:
        return _recorder
    asked = os.environ.get(VARIABLE, "")
    if not asked.isdigit():
        raise HvdTrainError(f"{VARIABLE} must be a number of steps, 0 for all of them. Received: {asked!r}")
    made = Recorder(limit=int(asked), on_limit=_end_script)
    start(made)
    atexit.register(_report_once)
    return made


_reported = False


def _end_script() -> None:
    if _recorder is not None:
        _recorder.facts["stopped"] = True
    _report_once()
    # Every rank comes here after the same step: none is left waiting for another.
    raise SystemExit(0)


def _report_once() -> None:
    """Print this rank's times, once."""
    global _reported
    found = _recorder
    if _reported or found is None:
        return
    _reported = True
    text = rank_times(found).to_json()
    sys.stdout.flush()
    # Past whatever the script has made of sys.stdout, and in one piece.
    os.write(1, f"\n{MARK}{text}\n".encode())


def rank_times(found: Recorder) -> RankTimes:
    """Return what this rank can say of its steps, and of where it ran."""
    # Asked of what is loaded, so that this module needs no framework and no World.
    world_module: Any = sys.modules.get("hvdtrain.distributed.world")
    world = getattr(world_module, "_world", None)
    engine = next(iter(getattr(world_module, "_loaded", {}).values()), None)
    facts: dict[str, Any] = {"host": socket.gethostname(), **process_facts(), **found.facts}
    rank, size = 0, 1
    if engine is not None:
        facts |= {"engine": engine.__name__, "mpi_built": bool(engine.mpi_built())}
        try:
            rank, size = engine.rank(), engine.size()
            gloo = os.environ.get("HOROVOD_CPU_OPERATIONS", "").lower() == "gloo" or not engine.mpi_enabled()
            facts |= {"local_size": engine.local_size(), "data_plane": "gloo" if gloo else "mpi"}
        except (ValueError, RuntimeError):  # the script has shut Horovod down: the launcher's word is left
            rank = int(os.environ.get("HOROVOD_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
            size = int(os.environ.get("HOROVOD_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 1)
    facts["device"] = getattr(world, "device", "cpu")
    return RankTimes(rank, size, found.steps_taken, found.summary(), facts)


def process_facts() -> dict[str, Any]:
    """Return how many threads this process computes with, and how many cores it may use."""
    torch: Any = sys.modules.get("torch")
    tensorflow: Any = sys.modules.get("tensorflow")
    keras: Any = sys.modules.get("keras")
    backend = keras.config.backend() if keras is not None and hasattr(keras, "config") else None
    cores = usable_cores()
    facts: dict[str, Any] = {"cores": cores}
    try:
        if backend == "tensorflow" and tensorflow is not None:
            # 0 leaves it to TensorFlow, which asks the environment, and else takes one a core.
            chosen = tensorflow.config.threading.get_intra_op_parallelism_threads()
            facts["threads"] = chosen or int(os.environ.get("TF_NUM_INTRAOP_THREADS") or cores)
        elif backend in (None, "torch") and torch is not None:
            facts["threads"] = torch.get_num_threads()
    except AttributeError:  # still importing when the process ended
        pass
    return facts
