"""The socket of `hvdtrain.run`, over which pickles go: in a folder that no other user may enter."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Stranger

pytest.importorskip("horovod.runner", exc_type=ImportError)

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
