"""The rank's side of a measurement: train when told to, time every step, answer, and wait for the next turn.

A peer's script makes `Turns`, calls `begin()` before its first step and `tick()` after each step. Between turns it
blocks here, in the middle of its own training loop, so that long-lived peers can be measured in turn.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

SOCKET_VARIABLE = "BENCH_SOCKET"
_PROJECTIONS = 8
_CHUNK = 1 << 13  # elements projected at once: what the check needs of memory must not show in the peak


class Finished(Exception):  # noqa: N818  no error: what ends a loop that others own
    """The runner has no more turns for this process."""


class Clock:
    """Tells when a step was done: by the host's clock, which is right where nothing computes behind it."""

    def mark(self) -> Any:
        """Return what `spans` takes."""
        return time.perf_counter()

    def spans(self, marks: list[Any]) -> list[float]:
        """Return the seconds between marks."""
        return [later - earlier for earlier, later in itertools.pairwise(marks)]


class Turns:
    """Steps in turns, as the runner asks for them.

    Args:
        rank: this process's number in its group.
        weights: yields the trainable weights, in an order that is the same for every peer of a workload.
        loss: the loss over samples that are the same for every peer, with the present weights.
        clock: tells when a step was done.
    """

    def __init__(
        self,
        *,
        rank: int,
        weights: Callable[[], Iterable[Any]],
        loss: Callable[[], float],
        clock: Clock | None = None,
    ) -> None:
        self._rank, self._weights, self._loss, self._clock = rank, weights, loss, clock or Clock()
        self._command: dict[str, Any] = {}
        self._marks: list[Any] = []
        self._cpu_s = 0.0
        self._steps = 0
        self._peak_kib = 0
        self._before = np.zeros(_PROJECTIONS)
        self._reader, self._writer = _connect()

    def begin(self) -> None:
        """Say that the first step comes next, and wait for the first turn."""
        self._send({"rank": self._rank, "pid": os.getpid()})
        self._wait()

    def tick(self) -> None:
        """Note that a step is done; at the end of a turn, answer and wait. Raises Finished when all are over."""
        self._marks.append(self._clock.mark())
        if len(self._marks) > self._steps:
            self._answer()
            self._wait()

    def _answer(self) -> None:
        answer: dict[str, Any] = {
            "step_s": self._clock.spans(self._marks),
            "cpu_s": time.process_time() - self._cpu_s,
            "done_at": time.monotonic(),  # one clock for all processes of a host
        }
        if self._command["op"] == "check":
            self._peak_kib = peak_kib()
            answer |= {
                "update": (project(self._weights()) - self._before).tolist(),
                "digest": digest(self._weights()),
                "loss": self._loss(),
            }
            reset_peak()
        self._send(answer)

    def _wait(self) -> None:
        line = self._reader.readline()
        self._command = json.loads(line) if line else {"op": "end"}
        if self._command["op"] == "check":
            self._before = project(self._weights())
        if self._command["op"] == "end":
            if line:
                peak = max(self._peak_kib, peak_kib())
                self._send({"peak_kib": peak, "digest": digest(self._weights()), "threads": _threads()})
            raise Finished
        self._steps = int(self._command["steps"])
        self._cpu_s = time.process_time()
        self._marks = [self._clock.mark()]

    def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(json.dumps(message) + "\n")
        self._writer.flush()


def report(rank: int, result: dict[str, Any]) -> None:
    """Send the runner one result, from a script that measures by itself and takes no turns."""
    _, writer = _connect()
    writer.write(json.dumps({"rank": rank, "pid": os.getpid(), "result": result}) + "\n")
    writer.flush()


def project(weights: Iterable[Any]) -> np.ndarray[Any, Any]:
    """Return sums of all weights under fixed random signs, in float64: a short summary that every error changes.

    Of a difference of two weight vectors, each sum's square has the squared distance as its mean.
    """
    signs = np.random.default_rng(0).choice(np.array([-1.0, 1.0]), (_PROJECTIONS, _CHUNK))
    total = np.zeros(_PROJECTIONS)
    for index, array in enumerate(weights):
        flat = np.asarray(array).reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            chunk = flat[start : start + _CHUNK].astype(np.float64)
            total += np.roll(signs[:, : chunk.size] @ chunk, index + start // _CHUNK)
    return total


def digest(weights: Iterable[Any]) -> str:
    """Return a hash of every bit of the weights."""
    found = hashlib.sha256()
    for array in weights:
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def peak_kib() -> int:
    """Return the largest resident size so far, or since `reset_peak`, in KiB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))


def reset_peak() -> None:
    """Forget the peak so far: reading all weights may have copied them, which training does not."""
    try:
        with open("/proc/self/clear_refs", "w") as stream:
            stream.write("5")
    except OSError:
        pass  # then the peak includes those copies: too high, never too low


def _threads() -> dict[str, str]:
    """Return how many threads compute here, where the framework says so, and the cores that they may use."""
    found = {"cores": ",".join(map(str, sorted(os.sched_getaffinity(0))))}
    if "torch" in sys.modules:
        found["torch"] = str(sys.modules["torch"].get_num_threads())
    if "tensorflow" in sys.modules:
        threading = sys.modules["tensorflow"].config.threading
        found["tensorflow"] = f"{threading.get_intra_op_parallelism_threads()} intra-op"
    return found


def _connect() -> tuple[Any, Any]:
    path = os.environ.get(SOCKET_VARIABLE)
    if not path:
        raise SystemExit("A peer's script is started by `python -m benchmarks`, which tells it what to do.")
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection.makefile("r"), connection.makefile("w")
