"""A stranger who connects to whatever a Spark job's driver listens at, and says nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Stranger

pytest.importorskip("horovod.torch", exc_type=ImportError)
pytest.importorskip("pyspark", reason="needs PySpark: pip install 'hvdtrain[spark]'")
if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
    pytest.skip("needs Java, in which Spark runs", allow_module_level=True)
pytestmark = pytest.mark.timeout(240)

JOB = """
import pathlib, sys, time
from pyspark.sql import SparkSession
from hvdtrain.integrations import spark

def rank():
    import horovod.torch as hvd
    hvd.init()
    return hvd.rank()

if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    builder = SparkSession.builder.master("local[2]")
    for name, value in {
        "spark.ui.enabled": "false", "spark.log.level": "OFF", "spark.local.dir": str(folder),
        "spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1", "spark.driver.memory": "1g",
    }.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    (folder / "up").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)
    print("returned", spark.run(rank, np=2, start_timeout_s=60))
    session.stop()
"""
# Connects to the first new port of root's 300 times, and stays. Spark's own sockets are others: Java's are in tcp6.
HOLDS = """
import socket, time

def ports():
    lines = [line.split() for line in open("/proc/net/tcp").readlines()[1:]]
    return {int(fields[1].rpartition(":")[2], 16) for fields in lines if fields[3] == "0A" and fields[7] == "0"}

seen, new = ports(), set()
print("looking", flush=True)
while not new:
    new = ports() - seen
held = []
while True:
    try:
        held.append(socket.create_connection(("127.0.0.1", min(new)), timeout=1))
        print("held", len(held), flush=True)
    except OSError:  # the door is full, or closed by now
        time.sleep(0.1)
    if len(held) == 300:
        time.sleep(200)
"""


def test_silent_strangers_do_not_keep_a_spark_jobs_ranks_from_starting(stranger: Stranger, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    words = [sys.executable, "job.py", str(tmp_path)]
    with subprocess.Popen(
        words, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        deadline = time.monotonic() + 90
        while not (tmp_path / "up").exists() and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        attack = stranger.start(HOLDS)
        assert attack.stdout is not None
        try:
            assert attack.stdout.readline() == "looking\n"
            (tmp_path / "go").touch()
            output = job.communicate(timeout=140)[0]
        finally:
            job.kill()
            attack.kill()
            said = attack.communicate()[0]
    assert "returned [0, 1]" in output, output[-3000:]
    assert "held 100\n" in said
    assert "refused a connection from 127.0.0.1, which" in output, "it was the caller's port"
