"""A one-host job over Gloo, and another user of that host who talks to what listens for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("horovod.torch", exc_type=ImportError)
sys.path.insert(0, str(Path(__file__).parent))
import attacked
from attacked import Job, command_lines, listening, own_key, total

if TYPE_CHECKING:
    from conftest import Stranger

# Waits until rank 0 has said where it is, then reads that and writes another place over it, by all means.
READ_AND_WRITE = (
    attacked.PORTS
    + r"""
import json
before, read = {tuple(each) for each in json.loads(sys.argv[1])}, {}
until = time.monotonic() + 3
while time.monotonic() < until and not read:
    for address in ports() - before:
        for scope in ("global", "local_localhost", "cross_0"):
            answer = http(address, "GET", f"/{scope}/0")
            if b" 200 " in answer.split(b"\r\n")[0]:
                read[f"/{scope}/0"] = address
    time.sleep(0.1)
for address in ports() - before:
    for path in read or ("/global/0", "/global/1"):
        http(address, "PUT", path, b"\x00" * 300)
        http(address, "DELETE", path)
        http(address, "HEAD", "/etc/passwd")
        http(address, "PUT", path + "/more", b"x")
        say(address, b"\xff" * 5000)
print(json.dumps(sorted(read)))
"""
)
FUNCTION = """
import sys, time
from pathlib import Path
import horovod
folder = Path(sys.argv[1])
def work():
    import os, time
    (folder / f"began-{os.environ['HOROVOD_RANK']}").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)
    return int(os.environ["HOROVOD_RANK"]) + 1
if __name__ == "__main__":
    print("returned", horovod.run(work, num_proc=2, use_gloo=True))
"""
HOLD = (
    attacked.PORTS
    + r"""
import json
before = {tuple(each) for each in json.loads(sys.argv[1])}
held = []
for address in ports() - before:
    for _ in range(300):
        held.append(socket.create_connection(address, 5))
        held[-1].sendall(b"GET ")
print(len(held), flush=True)
time.sleep(60)
"""
)


@pytest.fixture
def before() -> str:
    return json.dumps(sorted(listening()))


@pytest.fixture
def job(tmp_path: Path, before: str) -> Iterator[Job]:
    job = Job(tmp_path, ["horovodrun", "--gloo", "-np", "2"])
    job.wait_for("began-0", "began-1")
    yield job
    job.kill()


def test_a_stranger_neither_reads_nor_writes_where_ranks_are(job: Job, before: str, stranger: Stranger) -> None:
    assert json.loads(stranger.run(READ_AND_WRITE, before)) == []
    output = job.end()
    assert output.count(f"of 2: {total(2)}") == 2
    assert output.count("refused a request from 127.0.0.1 that was not made with this job's key") == 1
    assert "Traceback" not in output


def test_a_stranger_who_holds_connections_holds_up_nobody(job: Job, before: str, stranger: Stranger) -> None:
    holder = stranger.start(HOLD, before)
    try:
        assert holder.stdout is not None
        assert int(holder.stdout.readline()) >= 300
        assert job.end().count(f"of 2: {total(2)}") == 2
    finally:
        holder.kill()
        holder.communicate()


def test_a_stranger_does_not_get_the_function_nor_say_what_it_returned(
    tmp_path: Path, before: str, stranger: Stranger
) -> None:
    steal = READ_AND_WRITE.replace('("global", "local_localhost", "cross_0")', '("runfunc", "runfunc_result")')
    steal = steal.replace("/{scope}/0", "/{scope}/func").replace('("/global/0", "/global/1")', '("/runfunc_result/0",)')
    (tmp_path / "function.py").write_text(FUNCTION)
    job = Job(tmp_path, ["python", str(tmp_path / "function.py"), str(tmp_path)])
    try:
        job.wait_for("began-0", "began-1")
        assert json.loads(stranger.run(steal, before)) == []
        assert "returned [1, 2]" in job.end()
    finally:
        job.kill()


@pytest.mark.parametrize("plane", ["--gloo", "--mpi"])
def test_the_key_is_in_the_environment_of_the_job_and_nowhere_else(plane: str, tmp_path: Path) -> None:
    script = (
        "import os, sys, time\nfrom pathlib import Path\n"
        "Path(sys.argv[1], f'pid-{os.getpid()}').touch()\n"
        "while not Path(sys.argv[1], 'go').exists(): time.sleep(0.02)\n"
    )
    job = Job(tmp_path, ["horovodrun", plane, "-np", "2", "--verbose"], script)
    try:
        while len(list(tmp_path.glob("pid-*"))) < 2:
            job.wait_for()
        keys = {own_key(int(path.name[4:])) for path in tmp_path.glob("pid-*")}
        assert len(keys) == 1
        (key,) = keys
        assert len(key) == 64
        assert not [line for line in command_lines() if key in line]
        assert key not in job.end()
    finally:
        job.kill()
    again = Job(tmp_path, ["horovodrun", plane, "-np", "1"], "import os\nprint('key', os.environ['HVDTRAIN_JOB_KEY'])")
    assert key not in again.end()
