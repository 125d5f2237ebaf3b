"""An elastic job of one host, and another user of that host who sends code to whoever unpickles it."""

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
from attacked import Job, listening, total

if TYPE_CHECKING:
    from conftest import Stranger

# What is unpickled makes a file that says whose process did it.
BOMBS = (
    attacked.PORTS
    + r"""
import base64, hashlib, hmac, json, os, pickle, struct

class Bomb:
    def __reduce__(self):
        return exec, (f"import os; open({sys.argv[2]!r} + '/exploded-' + str(os.getuid()), 'w')",)

before, bomb = {tuple(each) for each in json.loads(sys.argv[1])}, pickle.dumps(Bomb())
there = sorted(ports() - before)
for address in there:
    for host in ("localhost", "127.0.0.1"):
        http(address, "PUT", f"/worker_addresses/{host}:0", base64.b64encode(bomb))
        http(address, "GET", f"/rank_and_size/{host}:0")
    digest = hmac.new(bytes(32), bomb, hashlib.sha256).digest()
    say(address, digest + struct.pack("i", len(bomb)) + bomb)  # Horovod's own form of messages
    say(address, bytes(16) + struct.pack(">Q", len(bomb)) + hashlib.sha256(bomb).digest() + digest + bomb)
print(len(there))
"""
)
# A commit that is never needed makes it an elastic job like others, with a notification service on each rank.
SCRIPT = """
import os, sys, time
from pathlib import Path
import horovod.torch as hvd, torch
folder = Path(sys.argv[1])
hvd.init()
model = torch.nn.Linear(2, 1)
state = hvd.elastic.TorchState(model=model)

@hvd.elastic.run
def train(state):
    (folder / f"began-{hvd.rank()}").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)
    hvd.allreduce(torch.ones(1), name="together")
    state.commit()
    total = hvd.allreduce(torch.full((1000,), 10.0 ** hvd.rank()), op=hvd.Sum).unique().tolist()
    sys.stdout.write(f"rank {hvd.rank()} of {hvd.size()}: {total}\\n")

train(state)
"""


@pytest.fixture
def before() -> str:
    return json.dumps(sorted(listening()))


@pytest.fixture
def job(tmp_path: Path, before: str) -> Iterator[Job]:
    discovery = tmp_path / "discover"
    discovery.write_text("#!/bin/sh\necho localhost:2\n")
    discovery.chmod(0o755)
    limits = ["-np", "2", "--min-np", "2", "--max-np", "2", "--host-discovery-script", str(discovery)]
    job = Job(tmp_path, ["horovodrun", "--gloo", *limits, "--network-interfaces", "lo"], SCRIPT)
    job.wait_for("began-0", "began-1")
    yield job
    job.kill()


def test_a_stranger_gets_no_code_run(job: Job, before: str, stranger: Stranger) -> None:
    assert int(stranger.run(BOMBS, before, stranger.folder)) >= 3  # the driver, and a notification service each
    output = job.end()
    assert [path.name for path in stranger.folder.iterdir()] == []
    assert output.count(f"of 2: {total(2)}") == 2
    said = [line for line in output.splitlines() if "refused a request from 127.0.0.1" in line]
    assert len(said) == 3
    assert "Traceback" not in output
