"""The changes of Horovod's source, tested on the installed Horovod."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.horovod_build import installed

HOROVODRUN = Path(sys.executable).with_name("horovodrun")


def run(
    script: str, tmp_path: Path, *, ranks: int = 2, plane: str = "--mpi", timeout_s: float = 100, **env: str
) -> list[dict]:
    """Run `script` on ranks that each write one JSON object to `answer(...)`; return those, by rank."""
    path = tmp_path / "script.py"
    prologue = (
        "import json, os, pathlib\n"
        "def answer(rank, **facts):\n"
        f"    pathlib.Path({str(tmp_path)!r}, f'{{rank}}.json').write_text(json.dumps(facts))\n"
    )
    path.write_text(prologue + script)
    settings = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "OMPI_MCA_mpi_yield_when_idle": "1"}
    done = subprocess.run(
        [HOROVODRUN, "-np", str(ranks), plane, sys.executable, path, tmp_path],
        env=os.environ | settings | env,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]


TOKEN = """
seen = []
for command in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        seen += [command.parent.name] * (os.environ["TEST_TOKEN"].encode() in command.read_bytes())
    except OSError:
        continue
answer(int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK"))), seen=seen)
"""


@pytest.mark.parametrize("plane", ["--mpi", "--gloo"])
def test_no_value_of_the_environment_stands_on_a_command_line(plane, tmp_path):
    """Every user of a host may read those."""
    answers = run(TOKEN, tmp_path, plane=plane, TEST_TOKEN=f"hunter2-{tmp_path.name}")
    assert answers == [{"seen": []}] * 2


PIECES = """
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK")))
pieces = os.environ["PIECES"].split(",")
os.environ["HVDTRAIN_MPI_PIECE_BYTES"] = pieces[rank]
longest = 10_007 if "3" in pieces else 100_003  # which takes 26 s in pieces of 3 bytes
import horovod.torch as hvd, torch
hvd.init()
size, wrong = hvd.size(), []
for dtype in (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64):
    for n in (0, 1, 7, 1023, longest):
        mine = (torch.arange(n) % 5 + rank).to(dtype)
        total = (torch.arange(n) % 5 * size + size * (size - 1) // 2).to(dtype)
        got = hvd.allreduce(mine, op=hvd.Sum, name=f"{dtype}.{n}")
        scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2, postscale_factor=2, name=f"{dtype}.{n}.scaled")
        if not torch.equal(got, total) or not torch.equal(scaled, total * 4):
            wrong.append(f"{dtype} {n}")
        if dtype.is_floating_point:
            mean = hvd.allreduce(mine, op=hvd.Average, name=f"{dtype}.{n}.mean")
            if not torch.allclose(mean, total / size, rtol=2e-3 if dtype == torch.float16 else 1e-6):
                wrong.append(f"mean {dtype} {n}")
answer(rank, wrong=wrong)
"""


LONG = [
    pytest.param(each, marks=pytest.mark.long) for each in ("0,0,0", "4096,4096,4096", "1000,1000,1000", "4096,8192,0")
]


@pytest.mark.parametrize("pieces", ["3,3,3", "65536,4096,99", *LONG])
def test_sums_are_right_in_pieces_of_any_size_and_ranks_agree_on_the_smallest(pieces, tmp_path):
    answers = run(PIECES, tmp_path, ranks=len(pieces.split(",")), PIECES=pieces)
    assert all(answer["wrong"] == [] for answer in answers)


WAITING = """
import signal, sys, time
import hvdtrain.torch as hvd, torch
hvd.init()
if hvd.rank() == 0:
    class Alarm(Exception): pass
    def ring(*_):
        raise Alarm
    signal.signal(signal.SIGALRM, ring)
    handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="late")
    signal.alarm(1)
    began, busy, heard = time.perf_counter(), time.thread_time(), False
    try:
        hvd.synchronize(handle)
    except Alarm:
        heard = True
        pathlib.Path(sys.argv[1], "heard").touch()
    waited, busy = time.perf_counter() - began, time.thread_time() - busy
    signal.alarm(0)
else:
    until = time.monotonic() + 20
    while not pathlib.Path(sys.argv[1], "heard").exists() and time.monotonic() < until:
        time.sleep(0.05)
    handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, name="late")
    hvd.synchronize(handle)
hvd.barrier()
if hvd.rank() == 0:
    answer(0, heard=heard, waited=waited, busy=busy)
else:
    answer(1)
"""


def test_a_waiting_thread_hears_signals_and_takes_no_processor_time(tmp_path):
    first, _ = run(WAITING, tmp_path)
    assert first["heard"]  # the other rank waits for it, or comes after 20 s
    assert 0.9 < first["waited"] < 15
    assert first["busy"] < 0.3 * first["waited"]


SILENCE = """
import time
import horovod.torch as hvd, torch
hvd.init()
began = time.monotonic()
hvd.allreduce(torch.ones(3), name="first")
time.sleep(1)
total = hvd.allreduce(torch.ones(3), op=hvd.Sum, name="last").tolist()
hvd.shutdown()
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK")))
answer(rank, total=total, seconds=time.monotonic() - began)
"""


def test_ranks_without_tensors_do_not_negotiate_all_the_time(tmp_path):
    timeline = tmp_path / "timeline.json"
    answers = run(SILENCE, tmp_path, HOROVOD_TIMELINE=str(timeline), HOROVOD_TIMELINE_MARK_CYCLES="1")
    assert all(answer["total"] == [2.0, 2.0, 2.0] for answer in answers)
    # A round every 20 cycles of 1 ms, in the place of one a cycle.
    assert 5 < timeline.read_text().count("CYCLE_START") < 200 * answers[0]["seconds"]


NO_FRAMEWORK = """
import sys
from horovod.common.util import gloo_built, mpi_built
from horovod.common import util
util._check_extension_lambda = lambda *_: sys.exit("asked a framework's library")
print(mpi_built(), gloo_built())
"""


def test_horovodrun_knows_its_data_planes_without_importing_a_framework():
    done = subprocess.run([sys.executable, "-c", NO_FRAMEWORK], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    planes = installed.record()["data_planes"].split(",")
    assert done.stdout.split() == [str("mpi" in planes), str("gloo" in planes)]


OLD = """
import logging
heard = []
handler = logging.Handler()
handler.emit = lambda record: heard.append(record.getMessage())
logging.getLogger().addHandler(handler)
from hvdtrain.horovod_build import installed
if os.environ["OLD"] == "1":
    installed.record = lambda: {"key": "k", "edits": "of another version"}
import hvdtrain
world = hvdtrain.init("torch")
answer(world.rank, heard=[text for text in heard if "Another version" in text])
"""


@pytest.mark.parametrize("old", [0, 1])
def test_a_horovod_that_another_hvdtrain_built_is_told_of_by_rank_0(old: int, tmp_path: Path) -> None:
    first, second = run(OLD, tmp_path, OLD=str(old))
    assert len(first["heard"]) == old
    assert second["heard"] == []
    assert all("Run `hvdtrain build`" in text for text in first["heard"])


SSH = """
import os, sys
from horovod.runner.common.util.settings import Settings
from horovod.runner.mpi_run import mpi_run
hosts = [f"host{index}:1" for index in range(int(sys.argv[1]))]
settings = Settings(num_proc=2, hosts=",".join(hosts), ssh_port=2222, ssh_identity_file="/keys/id", verbose=0)
mpi_run(settings, ["eth0"], dict(os.environ), ["train"])
"""
MPIRUN_5 = """#!/bin/sh
[ "$1" = --version ] && { echo "mpirun (Open MPI) 5.0.7"; exit; }
env | grep ^PRTE_MCA_plm > "$SEEN"
"""


@pytest.mark.parametrize(("hosts", "tree"), [(2, []), (64, ["no_tree_spawn=true", "num_concurrent=64"])])
def test_open_mpi_5_hears_of_ssh_what_4_does(hosts: int, tree: list[str], tmp_path: Path) -> None:
    mpirun, seen = tmp_path / "mpirun", tmp_path / "seen"
    mpirun.write_text(MPIRUN_5)
    mpirun.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    given = {"PATH": path, "SEEN": str(seen), "PRTE_MCA_plm_ssh_args": "-o BatchMode=yes"}
    done = subprocess.run(
        [sys.executable, "-c", SSH, str(hosts)],
        env=os.environ | given,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    asked = ["args=-o BatchMode=yes -p 2222 -i /keys/id", *tree]
    assert sorted(seen.read_text().splitlines()) == [f"PRTE_MCA_plm_ssh_{each}" for each in asked]


ALONE = """
import os, sys
import hvdtrain
hvdtrain.init("torch")
script = "import hvdtrain; world = hvdtrain.init('torch'); print('rank', world.rank, 'of', world.size)"
status = os.system(f'{sys.argv[1]} {sys.executable} -c "{script}"')  # C's environment, not os.environ
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize(
    "launcher", ["mpirun --allow-run-as-root --oversubscribe", "hvdtrain run --max-restarts 0 --launcher mpirun"]
)
def test_a_process_that_has_started_mpi_alone_can_launch_a_job(launcher: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ALONE, f"{launcher} -np 2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(line[-11:] for line in done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


STOPS = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.5), sys.exit(75)))  # it writes a checkpoint
pathlib.Path(f"{os.getpid()}.ready").touch()
time.sleep(60)
"""


@pytest.mark.parametrize("plane", ["--mpi", pytest.param("--gloo", marks=pytest.mark.long)])
def test_ctrl_c_lets_ranks_stop_in_order(plane: str, tmp_path: Path) -> None:
    (tmp_path / "stops.py").write_text(STOPS)
    command = [HOROVODRUN, "-np", "2", plane, sys.executable, tmp_path / "stops.py"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=subprocess.STDOUT, text=True) as job:
        until = time.monotonic() + 60
        while len([*tmp_path.glob("*.ready")]) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        job.send_signal(signal.SIGINT)
        said = job.communicate(timeout=60)[0]
    assert job.returncode == 75
    assert "Ctrl-C again ends them at once" in said


def test_after_an_update_of_torch_horovod_says_to_run_hvdtrain_build() -> None:
    script = "import torch; torch.__version__ = '9.9.0'; import horovod.torch"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    assert "but pytorch 9.9.0 is installed" in done.stderr
    assert "Run `hvdtrain build` in this environment." in done.stderr


def test_no_message_of_horovod_says_to_reinstall_it() -> None:
    folder = installed.package_folder("horovod")
    assert folder
    advice = re.compile(r"--no-cache-dir|re-?install(?:ing)? Horovod|HOROVOD_(?:WITH|GPU)_\w+=", re.IGNORECASE)
    found = {str(path): advice.findall(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py")}
    assert len(found) > 100
    assert not {path: advised for path, advised in found.items() if advised}


APART = """
import random, time
import horovod.torch as hvd, torch
hvd.init()
rank, size, wrong, draw = hvd.rank(), hvd.size(), [], random.Random(0)
def step(turn, there):
    sent = []
    for name in draw.sample("abcde", 3):
        lengths = [draw.randint(1, 3) for _ in range(2 if name < "d" else 1)]
        tensors = [torch.full((n,), float(turn + k + 1)) for k, n in enumerate(lengths)]
        sent.append((lengths, hvd.grouped_allreduce_async(tensors, op=hvd.Sum, name=name)))
    for lengths, handle in sent:
        for k, (n, total) in enumerate(zip(lengths, hvd.synchronize(handle))):
            if not torch.equal(total, torch.full((n,), float(there * (turn + k + 1)))):
                wrong.append([turn, total.tolist()])
for turn in range(100):
    step(turn, size)
if rank != int(os.environ["FIRST"]):
    time.sleep(0.2)
    for turn in range(20):
        step(turn, size - 1)
hvd.join()
answer(rank, wrong=wrong)
"""


@pytest.mark.parametrize(("capacity", "first"), [("0", "1"), ("4", "1"), ("1024", "1"), ("1024", "0"), ("4", "0")])
def test_groups_that_are_reduced_apart_are_right_in_any_cache_and_after_join(capacity, first, tmp_path):
    """The rank that joins first has no group any more, and may be the coordinator."""
    answers = run(APART, tmp_path, HOROVOD_DISABLE_GROUP_FUSION="1", HOROVOD_CACHE_CAPACITY=capacity, FIRST=first)
    assert answers == [{"wrong": []}] * 2


TUNED = """
import horovod.torch as hvd, torch
hvd.init()
turns = 10 if hvd.rank() == int(os.environ["FIRST"]) else 30
totals = [float(hvd.allreduce(torch.ones(9), op=hvd.Sum, name="x")[0]) for _ in range(turns)]
answer(hvd.rank(), totals=totals, last=int(hvd.join()))
"""


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_joins_while_horovod_tunes_itself(first, tmp_path):
    answers = run(TUNED, tmp_path, HOROVOD_AUTOTUNE="1", FIRST=str(first))
    assert answers[first] == {"totals": [2.0] * 10, "last": 1 - first}
    assert answers[1 - first] == {"totals": [2.0] * 10 + [1.0] * 20, "last": 1 - first}


OTHER_SETS = """
import horovod.torch as hvd
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK")))
try:
    hvd.init(process_sets=[hvd.ProcessSet([0])] if rank == 0 else None)
except ValueError as error:
    answer(rank, said=str(error))
"""


@pytest.mark.parametrize("plane", ["--mpi", "--gloo"])
def test_init_fails_on_all_ranks_where_one_of_them_asks_for_another_process_set(plane, tmp_path):
    answers = run(OTHER_SETS, tmp_path, plane=plane)
    assert ["initialization failed" in answer["said"] for answer in answers] == [True, True]


NAMESAKES = """
import horovod.tensorflow as hvd, tensorflow as tf
hvd.init()
ones = tf.ones(2 * hvd.size())
reduce = tf.function(lambda x: hvd.mpi_ops._allreduce(x, op=hvd.Sum, name="same"))
scatter = tf.function(lambda x: hvd.reducescatter(x, op=hvd.Sum, name="same"))
got = [call(ones).numpy().tolist() for call in (reduce, reduce, scatter, reduce, scatter)]
answer(hvd.rank(), got=got)
"""


def test_a_reducescatter_may_have_the_name_of_an_allreduce(tmp_path):
    pytest.importorskip("tensorflow")
    assert run(NAMESAKES, tmp_path) == [{"got": [[2.0] * 4, [2.0] * 4, [2.0] * 2, [2.0] * 4, [2.0] * 2]}] * 2


SETTINGS = """
import sys
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK")))
name, *values = os.environ["SETTING"].split()
if len(values) > rank:
    os.environ[name] = values[rank]
import horovod.torch as hvd, torch
hvd.init()
totals = []
for turn in range(20):
    sent = [hvd.allreduce_async(torch.full((9,), float(turn)), op=hvd.Sum, name=f"{k}") for k in range(8)]
    totals.append({float(hvd.synchronize(each)[k]) for k, each in enumerate(sent)} == {2.0 * turn})
answer(rank, totals=totals)
"""


@pytest.mark.parametrize("plane", ["--mpi", "--gloo"])
@pytest.mark.parametrize(
    "setting", ["HOROVOD_TIMELINE {}/timeline", "HOROVOD_FUSION_THRESHOLD 0 64", "HOROVOD_CACHE_CAPACITY 1 4"]
)
def test_ranks_use_the_settings_of_the_first_one(setting, plane, tmp_path):
    assert run(SETTINGS, tmp_path, plane=plane, SETTING=setting.format(tmp_path)) == [{"totals": [True] * 20}] * 2
    assert (tmp_path / "timeline").exists() == ("TIMELINE" in setting)


AGAIN = """
import horovod.torch as hvd, torch
totals = []
for _ in range(3):
    hvd.init()
    rank = hvd.rank()
    totals.append(float(hvd.allreduce(torch.ones(1), op=hvd.Sum)))
    hvd.shutdown()
answer(rank, totals=totals)
"""


def test_horovod_is_initialized_again_with_settings_of_ones_own(tmp_path):
    answers = run(AGAIN, tmp_path, plane="--gloo", HOROVOD_FUSION_THRESHOLD="1000000", HOROVOD_CYCLE_TIME="1")
    assert answers == [{"totals": [2.0] * 3}] * 2
