"""A host that lacks what a job needs says so in one line at the start; what is left behind is nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.horovod_build import installed
from hvdtrain.system import process_tree

BIN = Path(sys.executable).parent
GLOO, MPI, MPIRUN = "hvdtrain run --gloo", "hvdtrain run --mpi", "hvdtrain run --launcher mpirun"
PLAIN, PLAIN_GLOO = "horovodrun --mpi", "horovodrun --gloo"
ALL = [GLOO, MPI, MPIRUN, PLAIN, PLAIN_GLOO]
SUM = """
import torch, horovod.torch as hvd
hvd.init()
print(f"sum {hvd.allreduce(torch.ones(100_000), op=hvd.Sum)[0].item()}")  # in one piece: mpirun marks each
"""
NO_MPI = "mpi" not in str(installed.record().get("data_planes", "")).split(",")

# Of each kind of /dev/shm, what is done to a new one; and what is said of it.
FULL = ("mount -t tmpfs -o size=64k none /dev/shm; head -c 1M /dev/zero > /dev/shm/x 2>/dev/null", "0 KiB of /dev/shm")
TINY = ("mount -t tmpfs -o size=64k none /dev/shm", "64 KiB of /dev/shm")
UNWRITABLE = ("mount -t tmpfs -o ro none /dev/shm", "/dev/shm cannot be written")

own_shared_memory = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="a /dev/shm of its own needs root"
)


def run(command: str, folder: Path, *, before: str = "") -> tuple[int, str]:
    """Return the status and the output of `command -np 2` on a script, after `before`."""
    if NO_MPI and "gloo" not in command:
        pytest.skip("Horovod was built without MPI")
    (folder / "train.py").write_text(SUM)
    python = "" if command.startswith("hvdtrain") else f"'{sys.executable}'"
    line = f"{before}\n'{BIN}'/{command} -np 2 {python} train.py 2>&1"
    words = ["unshare", "-m"] if "mount" in before else []
    done = subprocess.run(
        [*words, "bash", "-c", line], cwd=folder, capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
    )  # fmt: skip
    assert list(folder.glob("hvdtrain-run-*")) == []
    return done.returncode, done.stdout


def lines_of(output: str) -> list[str]:
    assert "Traceback" not in output
    return [line for line in output.splitlines() if line.strip()]


@own_shared_memory
@pytest.mark.parametrize(
    ("command", "shared"),
    [
        *((command, shared) for command in (GLOO, MPI, PLAIN, PLAIN_GLOO) for shared in (FULL, UNWRITABLE)),
        (PLAIN, TINY),
    ],
)
def test_shared_memory_that_horovodrun_cannot_do_without_is_named_at_the_start(
    command: str, shared: tuple[str, str], tmp_path: Path
) -> None:
    mount, said = shared
    status, output = run(command, tmp_path, before=mount)
    assert status != 0
    (line,) = lines_of(output)
    assert said in line
    assert "docker run --shm-size=1g" in line


@own_shared_memory
@pytest.mark.parametrize(
    ("command", "shared"),
    [
        (MPIRUN, UNWRITABLE),
        (MPI, TINY),
        *(pytest.param(*each, marks=pytest.mark.long) for each in ((MPIRUN, FULL), (MPIRUN, TINY), (GLOO, TINY))),
    ],
)
def test_where_another_folder_will_do_it_is_taken_with_a_word(
    command: str, shared: tuple[str, str], tmp_path: Path
) -> None:
    mount, said = shared
    status, output = run(command, tmp_path, before=mount)
    assert status == 0, output
    assert output.count("sum 2.0") == 2
    (line,) = [line for line in lines_of(output) if "instead" in line]
    assert said in line
    assert str(tmp_path) in line


@pytest.mark.parametrize("command", ALL)
def test_a_limit_of_open_files_is_named_with_what_to_type(command: str, tmp_path: Path) -> None:
    status, output = run(command, tmp_path, before="ulimit -n 20")
    assert status != 0
    (line,) = lines_of(output)
    assert "the hard limit is 20 (ulimit -Hn)" in line
    assert "nofile=1024" in line


@pytest.mark.parametrize("command", [GLOO, *(pytest.param(each, marks=pytest.mark.long) for each in (MPIRUN, PLAIN))])
def test_a_limit_of_open_files_that_may_be_raised_is_raised(command: str, tmp_path: Path) -> None:
    status, output = run(command, tmp_path, before="ulimit -S -n 20")
    assert status == 0, output
    assert output.count("sum 2.0") == 2


PRINTS = """
import os, pathlib
for number in range(5000):
    print(number, "-" * 80)
pathlib.Path("end-" + (os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])).touch()
"""


@pytest.mark.parametrize(
    ("command", "errors"),
    [
        *((command, "2>&1") for command in ALL),
        (PLAIN, "2>err"),
        *(pytest.param(command, "2>err", marks=pytest.mark.long) for command in ALL if command != PLAIN),
    ],
)
def test_a_reader_that_has_seen_enough_ends_no_job(command: str, errors: str, tmp_path: Path) -> None:
    if NO_MPI and "gloo" not in command:
        pytest.skip("Horovod was built without MPI")
    (tmp_path / "train.py").write_text(PRINTS)
    python = "" if command.startswith("hvdtrain") else f"'{sys.executable}'"
    line = f"{{ '{BIN}'/{command} -np 2 {python} train.py {errors}; echo $? >status; }} | head -1"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert len(done.stdout.splitlines()) == 1
    assert (tmp_path / "status").read_text() == "0\n"
    if errors == "2>err":
        said = (tmp_path / "err").read_text().splitlines()
        assert [line for line in said if not line.startswith("hvdtrain run: ")] == []
    assert sorted(path.name for path in tmp_path.glob("end-*")) == ["end-0", "end-1"]


@pytest.mark.parametrize(
    "options", ["--launcher mpirun --host-discovery-script false", "--host-discovery-script false --min-np 1"]
)
def test_a_failed_check_leaves_nothing_behind(options: str, tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    before = set(shared.glob("hvdtrain-run-*"))
    status, output = run(f"hvdtrain run {options}", tmp_path)
    assert status != 0, output
    # Other jobs of this host may make and remove such folders meanwhile. What is left behind stays.
    left, deadline = set(shared.glob("hvdtrain-run-*")) - before, time.monotonic() + 20
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = {path for path in left if path.exists() and not process_tree.members(str(path))}
    assert left == set()
