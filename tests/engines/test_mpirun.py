"""`hvdtrain run --launcher mpirun` on real processes: where ranks may run, and a scheduler's way of asking."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.timeout(120)]

COMMAND = [str(Path(sys.executable).parent / "hvdtrain"), "run", "--launcher", "mpirun"]

# Takes a second for its checkpoint.
TRAIN = """
import os, signal, sys, time
rank = os.environ["OMPI_COMM_WORLD_RANK"]
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
open(f"begun-{rank}", "w").close()
while not asked:
    time.sleep(0.02)
time.sleep(1)
open(f"kept-{rank}", "w").close()
sys.exit(75)
"""


def test_a_rank_may_use_every_core_until_the_user_binds_it() -> None:
    script = "import os; print('cores', *sorted(os.sched_getaffinity(0)))"
    cores = sorted(os.sched_getaffinity(0))
    for options, expected in (([], cores), (["--bind-to", "hwthread"], cores[:1])):
        line = [*COMMAND, "-np", "1", *options, sys.executable, "-c", script]
        done = subprocess.run(line, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr
        assert re.findall(r"cores (.*)", done.stdout) == [" ".join(map(str, expected))]


def test_a_sigterm_to_every_process_of_a_job_leaves_its_ranks_time_for_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    job = subprocess.Popen(
        [*COMMAND, "-np", "2", "train.py"], cwd=tmp_path, env={**os.environ, "HVDTRAIN_TEST_MARK": str(tmp_path)},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not all((tmp_path / f"begun-{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        family = [job.pid, *(child.pid for child in psutil.Process(job.pid).children(recursive=True))]
        assert len(family) >= 4
        for pid in family:
            os.kill(pid, signal.SIGTERM)
        _, said = job.communicate(timeout=60)
        assert job.returncode == 75, said
        assert list(tmp_path.glob("kept-*")), said
    finally:
        job.kill()
        job.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="a small /dev/shm of its own needs root")
def test_two_ranks_need_no_more_shared_memory_than_a_small_container_has(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch, hvdtrain, hvdtrain.torch as hvd; hvdtrain.init()\n"
        "print('sum', hvd.allreduce(torch.ones(2_000_000), op=hvd.Sum).unique().tolist())\n"
    )
    small = 'mount -t tmpfs -o size=16m none /dev/shm && exec "$@"'
    line = ["unshare", "--mount", "sh", "-c", small, "-", *COMMAND, "-np", "2", "--max-restarts", "0", "train.py"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum [2.0]") == 2
