"""A Ray job of one host, and another user of that host who talks to what listens for it and reads what it leaves."""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("horovod.torch", exc_type=ImportError)
pytest.importorskip("ray", reason="Ray is not installed: pip install 'hvdtrain[ray]'")
sys.path.insert(0, str(Path(__file__).parent))
from attacked import Job, command_lines, listening, total
from test_elastic import BOMBS
from test_rendezvous import READ_AND_WRITE
from test_secrets import READS

if TYPE_CHECKING:
    from conftest import Stranger

pytestmark = pytest.mark.timeout(240)

# One Ray for the jobs that are asked for. A job stops before its ranks meet, and again when they have met.
SCRIPT = """
import os, sys, time
from pathlib import Path
import ray
from hvdtrain.integrations.ray import run

def rank(folder, secret):
    import horovod.torch as hvd, torch

    def wait(name):
        while not (folder / name).exists():
            time.sleep(0.02)

    mine = os.environ["HOROVOD_RANK"]
    (folder / f"key-{mine}").write_text(os.environ["HVDTRAIN_JOB_KEY"])
    (folder / f"began-{mine}").touch()
    if mine != "0":
        wait("meet")
    hvd.init()

    @hvd.elastic.run  # with a notification service on each rank
    def train(state):
        (folder / f"met-{mine}").touch()
        wait("go")
        return hvd.allreduce(torch.full((1000,), 10.0 ** hvd.rank()), op=hvd.Sum).unique().tolist()

    print("I am rank", mine)
    return train(hvd.elastic.TorchState(model=torch.nn.Linear(2, 1)))

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    ray.init(address="local", num_cpus=2, include_dashboard=False, _temp_dir=os.environ["SESSION"])
    (folder / "up").touch()
    for kind in map(str.strip, (folder / "jobs").open()):
        limits = {"min_np": 2} if kind == "elastic" else {}
        returned = run(rank, (folder / kind, os.environ["PLANTED"]), np=2, **limits)
        print(kind, "returned", returned, flush=True)
        (folder / kind / "ended").touch()
"""


class Ray:
    """A script on a Ray of its own, which runs the jobs that it is asked for.

    Attributes:
        job: the script's process, and its files.
        session: Ray's folder, with those of its session.
        planted: what is in the script's environment and an argument of each rank's function.
    """

    def __init__(self, folder: Path, session: Path) -> None:
        self.session, self.planted = session, secrets.token_hex(16)
        (folder / "script.py").write_text(SCRIPT)
        os.mkfifo(folder / "jobs")
        variables = {"SESSION": str(session), "PLANTED": self.planted, "HVDTRAIN_MY_TOKEN": self.planted}
        words = ["python", str(folder / "script.py"), str(folder)]
        self.job = Job(folder, words, RAY_DEDUP_LOGS="0", RAY_USAGE_STATS_ENABLED="0", **variables)
        self.job.wait_for("up")
        self._asks = (folder / "jobs").open("w")

    def ask(self, kind: str) -> Path:
        """Ask for a job; return its folder."""
        folder = self.job.folder / kind
        folder.mkdir()
        self._asks.write(f"{kind}\n")
        self._asks.flush()
        return folder

    def end(self) -> None:
        """End the script, and Ray with it."""
        self._asks.close()
        try:
            self.job.end()
        finally:
            self.job.kill()


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ray]:
    # Every user may enter it, as /tmp/ray; its path is short, since Ray has sockets there.
    session = Path(tempfile.mkdtemp(prefix="hvdtrain-ray-"))
    session.chmod(0o755)
    try:
        ray = Ray(tmp_path_factory.mktemp("ray"), session)
        yield ray
        ray.end()
    finally:
        shutil.rmtree(session, ignore_errors=True)


@pytest.mark.parametrize("kind", ["fixed", "elastic"])
def test_a_stranger_neither_takes_part_in_a_ray_job_nor_finds_its_key(
    kind: str, script: Ray, stranger: Stranger
) -> None:
    job, before, printed = script.job, json.dumps(sorted(listening())), len(script.job.output())
    folder = script.ask(kind)
    job.wait_for(f"{kind}/began-0", f"{kind}/began-1")
    assert json.loads(stranger.run(READ_AND_WRITE, before)) == []
    (folder / "meet").touch()
    job.wait_for(f"{kind}/met-0", f"{kind}/met-1")
    bombs = BOMBS.replace("/{host}:0", "/worker-0:0")  # hvdtrain's name for it
    assert int(stranger.run(bombs, before, stranger.folder)) >= 3  # the rendezvous, and each rank's service

    (key,) = {path.read_text() for path in folder.glob("key-*")}
    assert len(key) == 64
    assert not [line for line in command_lines() if key in line or script.planted in line]
    readable = [script.session / name for name in stranger.run(READS, script.session).splitlines()]
    found = {path: path.read_bytes() for path in readable}
    assert any(b"I am rank 0" in content for content in found.values())  # what ranks print, Ray lets everybody read
    raw = bytes.fromhex(key)
    hidden = [key.encode(), raw, base64.b64encode(raw), script.planted.encode()]
    assert [path for path, content in found.items() if any(each in content for each in hidden)] == []

    (folder / "go").touch()
    job.wait_for(f"{kind}/ended")
    output = job.output()[printed:]
    assert f"{kind} returned [{total(2)}, {total(2)}]" in output
    assert [path.name for path in stranger.folder.iterdir()] == []
    assert len(re.findall(r"refused a request from [\d.]+ that was not made with this job's key", output)) == 3, output
    assert "Traceback" not in output


# Names a Ray of his own to everybody, and counts who comes.
LURES = """
import os, socket, sys
server = socket.create_server(("", 0))
os.makedirs(sys.argv[1], exist_ok=True)
with open(sys.argv[1] + "/ray_current_cluster", "w") as file:
    file.write("127.0.0.1:%d" % server.getsockname()[1])
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    print("came", connection.recv(24), flush=True)
    connection.close()
"""
ALONE = """
import sys, time
from pathlib import Path
from hvdtrain.integrations.ray import run

def rank(folder):
    print("I am rank 0", flush=True)
    (folder / "began-0").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)
    return 7

if __name__ == "__main__":
    print("returned", run(rank, (Path(sys.argv[1]),), np=1))
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder like /tmp; Ray's sockets below it need a short path."""
    with tempfile.TemporaryDirectory(prefix="hvd-") as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)


def test_a_job_goes_to_no_ray_that_a_stranger_names_and_lets_nobody_into_its_own(
    open_folder: Path, tmp_path: Path, stranger: Stranger
) -> None:
    home = open_folder / "home"
    home.mkdir(mode=0o755)
    (tmp_path / "script.py").write_text(ALONE)
    lure = stranger.start(LURES, open_folder / "ray")
    assert lure.stdout is not None
    assert lure.stdout.readline() == "ready\n"
    words = ["python", str(tmp_path / "script.py"), str(tmp_path)]
    job = Job(tmp_path, words, RAY_TMPDIR=str(open_folder), HOME=str(home), RAY_USAGE_STATS_ENABLED="0")
    try:
        job.wait_for("began-0")
        readable = stranger.run(READS, open_folder).splitlines()
        assert list(home.glob(".ray/auth_token"))
        output = job.end()
    finally:
        job.kill()
        lure.kill()
    assert lure.communicate()[0] == "", "it came to the stranger's port"
    assert readable == ["ray/ray_current_cluster"]
    assert f"{open_folder}/ray/ray_current_cluster belongs to user" in output
    assert "returned [7]" in output
    assert sorted(path.name for path in open_folder.iterdir()) == ["home", "ray"], "the job's own Ray has left"
