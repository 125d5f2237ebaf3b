"""A one-host job over MPI, and another user of that host who connects to mpirun."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from hvdtrain.horovod_build import installed

pytest.importorskip("horovod.torch", exc_type=ImportError)
sys.path.insert(0, str(Path(__file__).parent))
from attacked import TRAIN, Job, total

if TYPE_CHECKING:
    from conftest import Stranger

if "mpi" not in installed.record().get("data_planes", ""):
    pytest.skip("Horovod was built without MPI", allow_module_level=True)

COMMANDS = {
    "horovodrun": ["horovodrun", "-np", "2", "--mpi"],
    "hvdtrain run": ["hvdtrain", "run", "-np", "2", "--mpi"],
    "hvdtrain run --launcher mpirun": ["hvdtrain", "run", "-np", "2", "--launcher", "mpirun"],
}

# Prints the connections that are still open a while later, and those at which something was answered.
CONNECT = """
import json, socket, sys, time
addresses, data = json.loads(sys.argv[1]), bytes.fromhex(sys.argv[2])
held, found = [], []
for address in addresses:
    for _ in range(5):
        connection = socket.create_connection(address, 5)
        try:
            connection.sendall(data)
        except OSError:
            pass
        held.append((address, connection))
for address, connection in held:
    connection.settimeout(3)
    try:
        answer = connection.recv(100)
        if answer:
            found.append([address, answer.hex()])
    except TimeoutError:
        found.append([address, "open"])
    except OSError:
        pass
print(json.dumps(found))
"""
# Says something and is gone before mpirun has taken the connection, which then has no owner any more.
AND_GO = """
import json, socket, sys
for address in json.loads(sys.argv[1]):
    for _ in range(20):
        with socket.create_connection(address, 5) as connection:
            connection.sendall(b"\\0" * 200)
"""


def listens(job: Job) -> list[tuple[str, int]]:
    """Return the addresses at which a job's processes listen."""
    found = set()
    for process in psutil.Process(job.process.pid).children(recursive=True):
        for each in process.net_connections("tcp"):
            if each.status == psutil.CONN_LISTEN:
                found.add(tuple(each.laddr))
    return sorted(found)


@pytest.mark.parametrize("command", COMMANDS)
def test_nobody_else_of_this_host_gets_a_connection_to_mpirun(command: str, tmp_path: Path, stranger: Stranger) -> None:
    script = TRAIN.replace("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")
    job = Job(tmp_path, COMMANDS[command], script)
    try:
        job.wait_for("began-0", "began-1")
        addresses = json.dumps(listens(job))
        assert addresses != "[]", "mpirun listens"
        for data in (b"", b"\0" * 200, b"\xff" * 5000):
            assert json.loads(stranger.run(CONNECT, addresses, data.hex())) == []
        stranger.run(AND_GO, addresses)
        output = job.end()
    finally:
        job.kill()
    assert output.count(f"of 2: {total(2)}") == 2
    told = re.findall("refused a connection to Open MPI by user [0-9]+ of this host; the job is not affected", output)
    assert len(told) == 1
    assert f"user {stranger.uid} " in told[0]
