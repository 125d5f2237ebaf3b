"""Whatever one rank does, the job ends within the limit, and says who waited for whom, in what, and where."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from hvdtrain.distributed import watchdog
from hvdtrain.system import start_ranks

SCRIPT = Path(__file__).with_name("hanging.py")
STALL_S = 5.0  # on a busy machine ranks that are well wait for each other for a second or two
# The limit, what the watch gives the ranks to speak and Horovod to let go, and the launcher's own time: horovodrun
# takes 10 s to end a stopped process.
ENDS_S = STALL_S + 5 + 20
GOES_S = 3.0  # horovodrun's own helpers outlive it by a moment
LONG = os.environ.get("HVDTRAIN_FAULTS") == "long"
PREFIX = re.compile(r"^\[(?:\d+,)?(\d+)\]<std(?:out|err)>:", re.MULTILINE)

# fault, victim, ranks, framework, data plane
SHORT = [
    ("sleep", 1, 3, "torch", "--mpi"),
    ("sleep", 0, 2, "tensorflow", "--gloo"),
    ("stop", 1, 2, "torch", "--mpi"),
    ("kill", 0, 2, "torch", "--gloo"),
    ("raise", 1, 3, "torch", "--gloo"),
    ("end early", 1, 2, "torch", "--mpi"),
    ("other names", 1, 2, "torch", "--gloo"),
]
CUTOFF = [("sleep", 1, 2, "cutoff", "--gloo"), ("raise", 1, 2, "cutoff", "--mpi"), ("kill", 0, 2, "cutoff", "--mpi")]
LENGTHS = ("other lengths", 1, 2, "distributed", "--mpi")
# Ranks of a Grid wait at their end, but not with an error's status.
EXITS = [("exit with 3", 1, 2, "distributed", "--mpi"), ("raise an exit with 3", 0, 2, "stages", "--gloo")]
SHORT += [LENGTHS, *EXITS, *(pytest.param(*each, marks=pytest.mark.long) for each in CUTOFF)]
FAULTS = ("kill", "stop", "sleep", "raise", "raise first", "end early", "other names", "other shapes")
ALL = [
    (fault, victim, size, framework, plane)
    for fault in FAULTS
    for victim, size in ((0, 2), (1, 2), (1, 3))
    for framework in ("torch", "tensorflow")
    for plane in ("--mpi", "--gloo")
] + [*CUTOFF, LENGTHS, *EXITS]


@dataclass
class Job:
    """One run: the launcher's exit status, seconds from the fault to its end, and each rank's lines."""

    status: int
    seconds: float
    lines: list[tuple[int, str]]

    def says(self, text: str, *, rank: int | None = None) -> list[str]:
        """Return the lines that hold `text`."""
        return [line for of, line in self.lines if text in line and rank in (None, of)]


def run(fault: str, victim: int, size: int, framework: str, plane: str) -> Job:
    token = uuid.uuid4().hex
    environment = start_ranks.rank_environment({
        watchdog.LIMIT: str(STALL_S), "KERAS_BACKEND": "tensorflow", "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "HVDTRAIN_TEST_TOKEN": token, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    })  # fmt: skip
    launcher = [*start_ranks.horovodrun(Path(sys.executable)), "-np", str(size), "-H", f"localhost:{size}", plane]
    command = [*launcher, sys.executable, "-u", str(SCRIPT), framework, fault, str(victim)]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    at: dict[str, float] = {}
    lines: list[str] = []

    def read() -> None:
        for line in process.stdout or ():
            if "FAULT" in line:
                at["fault"] = time.monotonic()
            lines.append(line.rstrip("\n"))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    begun = time.monotonic()
    try:
        while process.poll() is None and time.monotonic() - at.get("fault", begun + 60) < ENDS_S:
            time.sleep(0.05)
        ended = time.monotonic()
    finally:
        left = end(token, process)
    reader.join(5)
    if process.stdout is not None:
        process.stdout.close()
    whole = "\n".join(lines)
    assert process.returncode is not None, f"no end {ENDS_S} s after the fault\n{whole}"
    assert "fault" in at, whole
    assert not left, f"left behind: {left}\n{whole}"
    pieces = [(PREFIX.match(line), line) for line in lines]
    return Job(
        process.returncode, ended - at["fault"], [(int(m[1]) if m else -1, PREFIX.sub("", s)) for m, s in pieces]
    )


def end(token: str, process: subprocess.Popen[str]) -> list[str]:
    """Kill what is left of a job; return those that its launcher, a moment after its own end, has not ended."""
    until = time.monotonic() + (GOES_S if process.poll() is not None else 0)
    while (left := family(token)) and time.monotonic() < until:
        time.sleep(0.1)
    commands = [" ".join(other.info["cmdline"] or []) for other in left]
    for other in left:
        with contextlib.suppress(psutil.Error):
            other.kill()
    return commands


def family(token: str) -> list[psutil.Process]:
    found = []
    for other in psutil.process_iter(["cmdline", "status"]):
        with contextlib.suppress(psutil.Error):
            if other.info["status"] != psutil.STATUS_ZOMBIE and other.environ().get("HVDTRAIN_TEST_TOKEN") == token:
                found.append(other)
    return found


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("fault", "victim", "size", "framework", "plane"), ALL if LONG else SHORT)
def test_one_rank_that_goes_wrong_ends_all_and_is_named(fault, victim, size, framework, plane, row):
    if plane == "--mpi" and shutil.which("mpirun") is None:
        pytest.skip("no Open MPI here")
    job = run(fault, victim, size, framework, plane)
    whole = "\n".join(f"{rank}: {line}" for rank, line in job.lines)
    assert job.status != 0, whole
    others = [rank for rank in range(size) if rank != victim]
    who = f"rank {victim} (host "
    if fault in ("raise", "raise first"):
        assert len(job.says("ValueError: bad sample", rank=victim)) == 1, whole
        assert job.says(f"{who}", rank=victim), whole
        assert not any(job.says("Traceback", rank=rank) for rank in others), whole
    elif fault == "other shapes":
        assert len([line for rank, line in job.lines if rank >= 0 and "Mismatched" in line]) in (1, 2), whole
        assert sum(1 for rank, line in job.lines if rank >= 0 and line.startswith("Traceback")) <= 2, whole
    elif fault in ("stop", "sleep", "other names"):
        lead = min(others) if fault != "other names" else 0
        waited = [line for line in job.says(" has waited ") if " (step " in line]
        assert waited, whole
        assert any(word in waited[0] for word in ("dense", "weight", "bias", "only.here", "batches of other")), whole
        assert "hanging.py:" in whole, whole
        assert job.says(" has waited ", rank=lead), whole
        assert job.says("Stack of the main thread"), whole
        if fault == "stop":
            assert job.says(f"rank {victim} is missing: its process"), whole
        if fault == "sleep":
            assert job.says(f"{who}", rank=victim), whole
            assert job.says("time.sleep(1000)", rank=victim), whole
            assert sum(len(job.says("Stack of the main thread", rank=rank)) for rank in others) == 1, whole
        assert job.seconds >= STALL_S - 0.5, whole
    elif fault == "other lengths":
        waits = [f"allgather of 'torch.distributed.allgather.ranks-0-1.{numbers}-numbers" for numbers in (1, 2)]
        for rank in range(size):
            assert any(waits[rank] in line for line in job.says(" has waited ", rank=rank)), whole
            assert job.says(f"rank {1 - rank} waits in {waits[1 - rank]}", rank=rank), whole
    elif fault == "end early" or "exit" in fault:
        assert not job.says(" has waited "), whole
        assert job.says(f"rank {victim} ended early"), whole
        assert not job.says("Traceback (most recent call last):", rank=others[0]), whole
    row(f"{fault}: rank {victim} of {size}, {framework}, {plane[2:]}", 1, f"ended in {job.seconds:.1f} s")
