"""`hvdtrain run` and horovodrun on real processes: what is killed comes back, what is asked to stop stops."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from launched import Run

pytestmark = pytest.mark.timeout(300)

# Counts its steps in a file of its own; a step more than the last whole one is what a kill may cost.
TORCH = """
import json, os, signal, sys, time
from pathlib import Path
import torch
import hvdtrain.torch as hvd

hvd.init()
rank, folder, steps = hvd.rank(), Path(sys.argv[1]), int(sys.argv[2])
asked = torch.zeros(1)
for each in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(each, lambda *_: asked.fill_(1))
model = torch.nn.Linear(4, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
saved = folder / "step"
begin = int(saved.read_text()) if saved.exists() else 0
steps = begin + steps if begin else 10**9  # the first attempt does not end by itself
with (folder / f"log-{rank}").open("a", buffering=1) as log:
    log.write(json.dumps({"begin": begin, "pid": os.getpid(), "time": time.time()}) + "\\n")
    for step in range(begin + 1, steps + 1):
        time.sleep(0.02)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        stop = hvd.allreduce(asked, op=hvd.Sum, name="stop").item() > 0
        if rank == 0:
            (folder / "new").write_text(str(step))
            (folder / "new").replace(saved)
        if step in (begin + 1, steps):
            log.write(json.dumps({"step": step, "time": time.time()}) + "\\n")
        if stop:
            log.write(json.dumps({"stopped": step}) + "\\n")
            hvd.barrier()  # mpirun ends the others when the first one exits
            sys.exit(75)
"""

# No framework: what the launcher does is the same.
LIGHT = """
import json, os, signal, sys, time
from pathlib import Path

rank = int(os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
folder, steps, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
asked = []
for each in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(each, lambda *_: asked.append(1))
run = os.environ.get("HVDTRAIN_RUN_DIR")
with (folder / f"log-{rank}").open("a", buffering=1) as log:
    log.write(json.dumps({"begin": 0, "pid": os.getpid()}) + "\\n")
    for step in range(1, steps + 1):
        time.sleep(0.02)
        if run:
            Path(run, f"new-{rank}").write_text(json.dumps({"step": step, "time": time.time()}))
            Path(run, f"new-{rank}").replace(Path(run, f"progress-{rank}.json"))
        if step == 1:
            log.write(json.dumps({"step": step}) + "\\n")
        if how == "raise" and rank == 1 and step == 5:
            raise ValueError("boom")
        if asked and how != "deaf":
            time.sleep(float(how) if how.isdecimal() else 0)
            log.write(json.dumps({"stopped": step}) + "\\n")
            until = time.monotonic() + 15  # the launcher ends the other when the first one exits
            while how.isdecimal() and "stopped" not in (folder / f"log-{1 - rank}").read_text():
                time.sleep(0.02 if time.monotonic() < until else 1000)
            sys.exit(75)
"""

# A line in pieces, as print makes one without a buffer. Long enough for Open MPI, which loses what marks make too long.
PIECES = """
import os
rank = os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
for line in range(500):
    for piece in ("<", rank, " ", str(line), " " + 40 * "-", ">\\n"):
        os.write(1, piece.encode())
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(command: str, script: str, *arguments: str, **env: str) -> Run:
        folder = tmp_path / str(len(runs))
        folder.mkdir()
        runs.append(Run(folder, command.split(), script, *arguments, **env))
        return runs[-1]

    yield begin
    for run in runs:
        run.clean_up()


MPI = "hvdtrain run -np 2"
GLOO = "hvdtrain run -np 2 --gloo"
MPIRUN = "hvdtrain run -np 2 --launcher mpirun"


@pytest.mark.parametrize(
    ("command", "victim"),
    [
        (MPI, "rank 1"),
        pytest.param(MPI, "rank 0", marks=pytest.mark.long),
        pytest.param(MPI, "launcher", marks=pytest.mark.long),
        (GLOO, "rank 1"),
        (MPIRUN, "launcher"),
    ],
)
def test_training_listens_on_loopback_alone_and_goes_on_within_20_s_of_a_kill(
    command: str, victim: str, start: Callable[..., Run]
) -> None:
    run = start(command, TORCH, "60")
    run.wait_for_steps()
    assert_it_listens_on_loopback_alone(run)
    run.wait_for(lambda: int((run.folder / "step").read_text()) > 10)
    pid = run.launcher().pid if victim == "launcher" else run.pid(int(victim[-1]))
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    assert run.ends() == 0
    begins, steps = run.log(0, "begin"), run.log(0, "step")
    assert len(begins) == 2
    assert begins[1]["begin"] > 5
    assert steps[-1]["step"] == begins[1]["begin"] + 60
    first_new = next(fact for fact in steps if fact["step"] == begins[1]["begin"] + 1)
    print(f"{command}, {victim}: {first_new['time'] - killed:.2f} s")
    assert first_new["time"] - killed < 20
    (line,) = run.said()
    who = r"(rank \d on host \S+|horovodrun|mpirun)" if victim == "launcher" else f"{victim} on host \\S+"
    assert re.search(f"restart 1 of 3: {who} was killed by signal 9 after [0-9.]+ s", line), line


def test_mpirun_below_horovodrun_and_a_ranks_shell_may_be_killed_too(start: Callable[..., Run]) -> None:
    run = start(MPI, LIGHT, "4000", "")
    run.wait_for_steps()
    (run.family("mpirun") or run.family("prterun"))[-1].kill()
    run.wait_for_steps(2)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.ends() == 75


@pytest.mark.parametrize("command", [MPI, pytest.param(GLOO, marks=pytest.mark.long)])
def test_a_crash_loop_stops_with_its_first_cause(command: str, start: Callable[..., Run]) -> None:
    run = start(f"{command} --max-restarts 9", LIGHT, "400", "raise")
    assert run.ends() == 1
    output, said = run.output(), run.said()
    assert len(run.log(1, "begin")) <= 4
    assert sum("restart" in line for line in said[:-2]) == len(run.log(1, "begin")) - 1
    last = output[output.rindex("the first error, of rank 1 on host") :]
    assert "(its traceback is above): ValueError: boom" in last
    assert "Traceback (most recent call last)" not in last
    assert re.search(r"hvdtrain run: gave up after \d attempts", last.splitlines()[-1]), last
    assert "rank 1 on host" in last.splitlines()[-1]


def test_a_script_that_cannot_be_imported_is_not_tried_again(start: Callable[..., Run]) -> None:
    run = start(MPI, "import no_such_module\n")
    assert run.ends() == 1
    assert run.output().count("hvdtrain run: restart") == 0
    assert "ModuleNotFoundError: No module named 'no_such_module'" in run.output()


def test_a_usage_error_is_not_tried_again(start: Callable[..., Run]) -> None:
    run = start(MPI, "import sys; sys.exit(2)\n")
    assert run.ends() == 2
    assert run.output().count("hvdtrain run: restart") == 0


@pytest.mark.parametrize(
    ("command", "number"),
    [
        *[(command, signal.SIGTERM) for command in (MPI, GLOO, MPIRUN)],
        *[(MPI, number) for number in (signal.SIGINT, signal.SIGUSR1)],
        *[
            pytest.param(command, number, marks=pytest.mark.long)
            for command in (GLOO, MPIRUN)
            for number in (signal.SIGINT, signal.SIGUSR1)
        ],
    ],
)
def test_asked_to_stop_all_ranks_end_in_order(command: str, number: int, start: Callable[..., Run]) -> None:
    run = start(command, LIGHT, "4000", "")
    run.wait_for_steps()
    folder = run.run_dir()
    assert folder.stat().st_mode & 0o777 == 0o700
    run.process.send_signal(number)
    assert run.ends(40) == 75
    assert not folder.exists()
    assert run.log(0, "stopped") or run.log(1, "stopped")  # the first to end may end the other one
    assert "stopped on request" in run.said()[-1]
    assert "if it wrote one" in run.said()[-1]  # nobody has told of a checkpoint
    assert not any("restart" in line for line in run.said())


def test_all_ranks_of_a_training_stop_at_the_same_step(start: Callable[..., Run]) -> None:
    run = start(MPI, TORCH, "100000")
    run.wait_for_steps()
    run.process.send_signal(signal.SIGTERM)
    assert run.ends(40) == 75
    assert run.log(0, "stopped") == run.log(1, "stopped") != []


@pytest.fixture
def slow(tmp_path: Path) -> dict[str, str]:
    """Return settings for an mpirun that closes slowly, and makes a file called "closing" first."""
    wrapper, log, closing = tmp_path / "mpirun", tmp_path / "said", tmp_path / "closing"
    command = f'[ "$1" = --version ] && exec {shutil.which("mpirun")} --version\n'
    command += f'{shutil.which("mpirun")} "$@" >{log} 2>&1\nstatus=$?\ntouch {closing}\nsleep 2\nexit $status\n'
    wrapper.write_text(f"#!/bin/sh\n{command}")
    wrapper.chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_a_launcher_that_closes_slowly_still_tells_how_its_ranks_ended(start: Callable[..., Run], slow: Any) -> None:
    run = start(MPIRUN, LIGHT, "4000", "", **slow)
    run.wait_for_steps()
    run.process.send_signal(signal.SIGTERM)
    assert run.ends(40) == 75


def test_a_request_to_stop_that_comes_after_the_ranks_end_changes_no_status(
    start: Callable[..., Run], slow: Any, tmp_path: Path
) -> None:
    run = start(MPIRUN, LIGHT, "1", "", **slow)
    run.wait_for((tmp_path / "closing").exists)
    run.process.send_signal(signal.SIGTERM)
    assert run.ends(40) == 0


def test_however_often_it_is_asked_to_stop_its_status_is_that_of_the_job(start: Callable[..., Run]) -> None:
    run = start(MPI, LIGHT, "4000", "1")
    run.wait_for_steps()
    while run.process.poll() is None:  # also while it cleans up, and while its interpreter ends
        run.process.send_signal(signal.SIGTERM)
        time.sleep(0.005)
    assert run.ends() == 75


def test_patience_has_an_end(start: Callable[..., Run]) -> None:
    run = start(f"{MPI} --grace 1", LIGHT, "4000", "deaf")
    run.wait_for_steps()
    asked = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    assert run.ends(30) == 128 + signal.SIGTERM
    assert 1 < time.monotonic() - asked < 15
    assert "not in order" in run.said()[-1]


def test_a_second_ctrl_c_ends_at_once(start: Callable[..., Run]) -> None:
    run = start(MPI, LIGHT, "4000", "deaf")
    run.wait_for_steps()
    run.process.send_signal(signal.SIGINT)
    run.wait_for(lambda: "asking the ranks to stop" in run.output())
    asked = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.ends(30) == 128 + signal.SIGINT
    assert time.monotonic() - asked < 10


@pytest.mark.parametrize("command", [MPI, GLOO, MPIRUN])
def test_killed_itself_it_leaves_no_process_and_no_folder(command: str, start: Callable[..., Run]) -> None:
    run = start(command, LIGHT, "4000", "deaf")
    run.wait_for_steps()
    folder = run.run_dir()
    run.process.kill()
    run.process.wait()
    run.wait_for(lambda: not run.family(), 10)
    run.wait_for(lambda: not folder.exists(), 10)


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("horovodrun -np 2", signal.SIGTERM),
        ("horovodrun -np 2 --gloo", signal.SIGUSR1),
        pytest.param("horovodrun -np 2", signal.SIGUSR1, marks=pytest.mark.long),
        pytest.param("horovodrun -np 2 --gloo", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_horovodrun_gives_ranks_time_to_stop(command: str, number: int, start: Callable[..., Run]) -> None:
    run = start(command, LIGHT, "4000", "7")  # each needs 7 s
    run.wait_for_steps()
    run.process.send_signal(number)
    assert run.ends(40) == 75
    assert run.log(0, "stopped")
    assert run.log(1, "stopped")


@pytest.mark.parametrize("options", [MPI, GLOO, MPIRUN, f"{MPI} --prefix-output-with-timestamp"])
def test_lines_are_whole_and_have_their_ranks_mark_though_ranks_write_in_pieces(
    options: str, start: Callable[..., Run]
) -> None:
    run = start(options, PIECES)
    assert run.ends() == 0
    marked = re.findall(r"^.{0,26}\[(?:1,)?(.)\]<stdout>:<(.) (\d+) -+>$", run.output(), re.MULTILINE)
    assert sorted(marked) == sorted((rank, rank, str(line)) for rank in "01" for line in range(500))


def assert_it_listens_on_loopback_alone(run: Run) -> None:
    """Check each address on which a process of the job listens."""
    mine = {p.pid for p in run.family()}
    lines = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    found = {}
    for line in lines:
        for name, pid in re.findall(r'"([^"]*)",pid=(\d+)', line):
            if int(pid) in mine:
                found[line.split()[3]] = name
    assert found, "at least the launcher listens"
    assert [where for where in found if not where.startswith(("127.0.0.1:", "[::1]:"))] == [], found


@pytest.mark.parametrize("command", ["horovodrun -np 2", "horovodrun -np 2 --gloo"])
def test_horovodrun_listens_on_loopback_alone(command: str, start: Callable[..., Run]) -> None:
    run = start(command, TORCH, "100000")
    run.wait_for_steps()
    assert_it_listens_on_loopback_alone(run)


def test_an_elastic_job_of_one_host_starts_and_listens_on_loopback_alone(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    script = tmp_path / "hosts"
    script.write_text("#!/bin/sh\necho localhost:2\n")
    script.chmod(0o755)
    run = start(f"hvdtrain run -np 2 --min-np 2 --host-discovery-script {script}", TORCH, "100000")
    run.wait_for_steps()
    assert_it_listens_on_loopback_alone(run)
