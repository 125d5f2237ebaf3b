"""A live allreduce over one data plane: what `hvdtrain build` proves and `hvdtrain doctor` shows.

`hvdtrain build` proves a training step too. `allreduce` starts ranks under horovodrun; each runs this module as a
script and leaves its answer in a file.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.horovod_build.installed import Plane
from hvdtrain.system import process_tree
from hvdtrain.system.start_ranks import horovodrun, rank_environment

_ANSWERS = "HVDTRAIN_PROBE_ANSWERS"
_SIZE_BYTES = 1 << 20
_REPEATS = 20
_TAIL_LINES = 12
_STEP_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Probe:
    """The result of a trial launch: the ranks' answers."""

    framework: str  # "torch" or "tensorflow"
    plane: Plane  # the requested data plane
    ranks: int  # how many were started
    error: str  # "" if every rank got the right sum, and the right weights, else what was printed last
    start_s: float  # from the launch to the end, seconds
    allreduce_ms: float | None = None  # median time of one allreduce of 1 MiB, milliseconds; None after an error
    device: str = "cpu"  # where rank 0's tensor was: "cpu" or "cuda:0"
    command: tuple[str, ...] = ()  # what was run; typed by hand, it prints the rank's answer and everything else

    @property
    def ok(self) -> bool:
        """True if every rank got the right sum."""
        return not self.error

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        if not self.ok:
            return f"FAILED after {self.start_s:.1f} s, {ranks}"
        return f"{self.allreduce_ms:.2f} ms for 1 MiB, {ranks} on {self.device}, {self.start_s:.1f} s in all"


def plan(frameworks: Mapping[str, str], planes: Iterable[Plane], *, gpus: int) -> list[tuple[str, Plane, int]]:
    """Return (framework, data plane, ranks) of each allreduce that can be tried; a CPU build's CUDA version is ""."""
    # NCCL refuses two ranks on one GPU: with one GPU, one rank shows that library and driver fit.
    kinds = ((name, plane) for name in frameworks for plane in planes)
    there = [(name, plane) for name, plane in kinds if plane != "nccl" or (gpus and frameworks[name])]
    return [(name, plane, min(2, gpus) if plane == "nccl" else 2) for name, plane in there]


def allreduce(framework: str, plane: Plane, *, ranks: int = 2, timeout_s: float = 90, step: bool = False) -> Probe:
    """Let `ranks` processes of this host sum an array; what fails is in the Probe's `error`, and not raised.

    "nccl" sums GPU memory, a GPU for each rank. With `step` they also take a training step, in host memory.
    """
    chosen = {"KERAS_BACKEND": "tensorflow", "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    # A data plane that the user prefers is not the requested one.
    environment = rank_environment({**chosen, "OMPI_MCA_rmaps_base_oversubscribe": "1"}, without=("HOROVOD_",))
    line = [*horovodrun(Path(sys.executable)), "-np", str(ranks), *([] if plane == "nccl" else [f"--{plane}"])]
    line += [sys.executable, "-m", "hvdtrain.horovod_build.probe", framework, plane, *(["step"] if step else [])]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hvdtrain-probe-") as folder:
        environment[_ANSWERS] = folder
        error, output = run_ranks(line, environment, timeout_s, Path(folder) / "output")
        answers = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank-*.json"))]
    seconds = time.monotonic() - started
    # A rank's own error says more than the launcher's exit status.
    said = next((answer["error"] for answer in answers if answer["error"]), "")
    if not said and (error or len(answers) < ranks):
        said = f"{error or f'{len(answers)} of {ranks} ranks answered'}\n{tail_of(output)}".strip()
    first = {} if said else answers[0]
    took, device = first.get("allreduce_ms"), first.get("device", "cpu")
    return Probe(framework, plane, ranks, said, seconds, took, device, tuple(line))


def tail_of(output: str) -> str:
    """Return the last lines of what ranks printed."""
    return "\n".join(output.strip().splitlines()[-_TAIL_LINES:])


def run_ranks(line: list[str], environment: dict[str, str], timeout_s: float, log: Path) -> tuple[str, str]:
    """Run `line` in a new session and return (error, output)."""
    # To a file, not a pipe: a grandchild that outlives its parent would hold a pipe open.
    with log.open("wb") as stream:
        try:
            process = subprocess.Popen(
                line, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
            )
        except OSError as problem:
            return f"{line[0]} does not start: {problem}", ""
        try:
            status = process.wait(timeout=timeout_s)
            error = f"horovodrun exited with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            error = f"no answer within {timeout_s:g} s"
            process_tree.end(None, below=process.pid)
            process.wait()
    return error, log.read_text(encoding="utf-8", errors="replace")


def rank_main(framework: str, plane: str, *, step: bool = False) -> int:
    """Run as one rank: sum arrays, and write the outcome into a file for the parent."""
    rank = os.environ.get("HOROVOD_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK", "0")
    answer: dict[str, Any] = {"error": "", "allreduce_ms": None, "device": "cpu"}
    try:
        answer |= _measure(framework, plane)
        if step:
            _take_step(framework)
    except Exception as problem:  # noqa: BLE001  whatever it was, the parent shows it
        answer["error"] = f"rank {rank}: {type(problem).__name__}: {problem}"
        traceback.print_exc()
    if _ANSWERS in os.environ:
        Path(os.environ[_ANSWERS], f"rank-{rank}.json").write_text(json.dumps(answer))
    else:
        print(json.dumps(answer))
    return 1 if answer["error"] else 0


def _measure(framework: str, plane: str) -> dict[str, Any]:
    """Sum an array whose sum is known, several times; return where it was and the median time."""
    world_module = importlib.import_module("hvdtrain.distributed.world")
    world = world_module.init(framework)
    values = np.full(_SIZE_BYTES // 4, world.rank + 1, np.float32)
    expected = world.size * (world.size + 1) / 2
    if plane == "nccl":
        if world.device == "cpu":
            raise RuntimeError(f"{framework} sees no GPU")
        horovod = world_module.load_engine(framework)
        module = importlib.import_module(framework)
        if framework == "torch":
            tensor = module.from_numpy(values).to(world.device)
        else:
            with module.device("/GPU:0"):  # TensorFlow numbers the GPUs that it was shown: one per rank
                tensor = module.constant(values)

        def reduce() -> np.ndarray[Any, Any]:
            result = horovod.allreduce(tensor, name="probe", op=horovod.Sum)
            return np.asarray((result.cpu() if framework == "torch" else result).numpy())
    else:

        def reduce() -> np.ndarray[Any, Any]:
            return np.asarray(world.allreduce(values, name="probe"))

    times: list[float] = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        total = reduce()
        times.append((time.perf_counter() - started) * 1000)
        if not np.array_equal(total, np.full_like(values, expected)):
            raise RuntimeError(f"the sum over {world.size} ranks is {total[:3]}..., expected {expected}")
    return {"allreduce_ms": round(statistics.median(times), 3), "device": world.device if plane == "nccl" else "cpu"}


def _take_step(framework: str) -> None:
    """Take a training step with the other ranks, and one of one process on all their data."""
    world = importlib.import_module("hvdtrain.distributed.world").init(framework)
    proof = importlib.import_module("hvdtrain.distributed.frameworks").load(framework, "proof")
    difference = proof.step_difference(world)
    if not difference <= _STEP_TOLERANCE:
        raise RuntimeError(
            f"after one training step on {world.size} ranks a weight is {difference:g} from one process's"
        )


if __name__ == "__main__":
    sys.exit(rank_main(sys.argv[1], sys.argv[2], step="step" in sys.argv[3:]))
