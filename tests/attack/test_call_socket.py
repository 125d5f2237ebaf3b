"""A call of `hvdtrain.run`: its socket, over which pickles go, its ports, and what others can read of it."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Stranger

pytest.importorskip("horovod.torch", exc_type=ImportError)
sys.path.insert(0, str(Path(__file__).parent))
from attacked import Job, command_lines, listening, total
from test_rendezvous import READ_AND_WRITE

CALLS = """
import pathlib, sys, time, hvdtrain

def wait(folder):
    pathlib.Path(folder, "begun").touch()
    while not pathlib.Path(folder, "go").exists():
        time.sleep(0.05)
    return 7

if __name__ == "__main__":
    print("returned", hvdtrain.run(wait, args=(sys.argv[1],), np=1))
"""
# Each rank says with which keys it was started, and stops before the ranks meet.
MEETS = """
import os, pathlib, sys, time, hvdtrain

def meet(folder, secret):
    rank = os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
    started = pathlib.Path("/proc/self/environ").read_bytes().decode().split("\\0")
    keys = [each.partition("=")[2] for each in started if each.startswith(("HVDTRAIN_JOB_KEY=", "HVDTRAIN_CALL_KEY="))]
    pathlib.Path(folder, f"keys-{rank}").write_text(" ".join(keys))
    pathlib.Path(folder, f"began-{rank}").touch()
    while rank != "0" and not pathlib.Path(folder, "go").exists():
        time.sleep(0.02)
    import horovod.torch as hvd, torch
    hvd.init()
    return hvd.allreduce(torch.full((1000,), 10.0 ** hvd.rank()), op=hvd.Sum).unique().tolist()

if __name__ == "__main__":
    folder, plane = sys.argv[1:3]
    print("returned", hvdtrain.run(meet, args=(folder, os.environ["PLANTED"]), np=2, options=(plane,)))
"""
CONNECTS = """
import glob, os, socket, sys
folders = glob.glob("/dev/shm/hvdtrain-run-*") + glob.glob("/tmp/hvdtrain-run-*")
names = [line.split()[-1] for line in open("/proc/net/unix") if "hvdtrain-run-" in line]
print("folders", len(folders), "sockets", len(names))
for name in [*names, *(os.path.join(each, "call") for each in folders)]:
    try:
        socket.socket(socket.AF_UNIX).connect(name)
        print("connected to", name)
    except OSError as error:
        print(type(error).__name__)
for each in folders:
    try:
        print("listed", os.listdir(each))
    except OSError as error:
        print(type(error).__name__)
"""


def test_no_other_user_reaches_the_socket_of_a_functions_run(stranger: Stranger, tmp_path: Path) -> None:
    (tmp_path / "call.py").write_text(CALLS)
    with subprocess.Popen(
        [sys.executable, "call.py", str(tmp_path)], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as job:
        deadline = time.monotonic() + 100
        while not (tmp_path / "begun").exists() and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        found = stranger.run(CONNECTS).splitlines()
        (tmp_path / "go").touch()
        output = job.communicate(timeout=100)[0]
    assert "returned [7]" in output
    assert " sockets 0" not in found[0]
    assert set(found[1:]) == {"PermissionError"}


@pytest.mark.parametrize("plane", ["--gloo", "--mpi"])
def test_another_user_finds_nothing_of_a_functions_run_nor_takes_part(
    plane: str, stranger: Stranger, tmp_path: Path
) -> None:
    (tmp_path / "call.py").write_text(MEETS)
    before, planted = json.dumps(sorted(listening())), secrets.token_hex(16)
    words = ["python", str(tmp_path / "call.py"), str(tmp_path), plane]
    job = Job(tmp_path, words, PLANTED=planted)
    try:
        job.wait_for("began-0", "began-1")
        assert json.loads(stranger.run(READ_AND_WRITE, before)) == []
        found = stranger.run(CONNECTS).splitlines()
        keys = {key for rank in range(2) for key in (tmp_path / f"keys-{rank}").read_text().split()}
        lines = command_lines()
        output = job.end()
    finally:
        job.kill()
    assert len(keys) == 2, "the job's and the call's"
    assert [line for line in lines if any(each in line for each in (*keys, planted))] == []
    assert set(found[1:]) == {"PermissionError"}
    assert f"returned [{total(2)}, {total(2)}]" in output
    assert not any(each in output for each in (*keys, planted))
    assert ("refused a request from 127.0.0.1" in output) == (plane == "--gloo")
    assert "Traceback" not in output
