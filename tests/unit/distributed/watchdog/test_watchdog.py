"""The watch as a whole: its limit, its steps, and a rank that waits too long."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hvdtrain.distributed import watchdog
from hvdtrain.distributed.watchdog import waits
from hvdtrain.system import process_tree

ROOT = Path(__file__).resolve().parents[4]


def test_steps_are_counted_until_a_caller_knows_the_number(monkeypatch):
    monkeypatch.setattr(waits, "_steps", 0)
    monkeypatch.setattr(waits, "_given", False)
    watchdog.step_done()
    watchdog.step_done()
    assert waits.steps_done() == 2
    watchdog.step_done(40)
    watchdog.step_done()  # the optimizer under the Trainer
    assert waits.steps_done() == 40


@pytest.mark.parametrize("value", ["-1", "soon", "nan"])
def test_a_limit_that_is_none_is_refused(monkeypatch, value):
    monkeypatch.setenv(watchdog.LIMIT, value)
    with pytest.raises(ValueError, match=f"Received: HVDTRAIN_STALL_S='{value}'"):
        watchdog.limit_s()


@pytest.mark.parametrize(
    ("value", "own", "check", "shutdown"),
    [("", "", 60, 660), ("8", "", 2, 10), ("1", "", 1, 2), ("600", "30", 30, 630)],
)
def test_horovod_names_stalled_tensors_before_our_limit_and_ends_them_after_it(
    monkeypatch, value, own, check, shutdown
):
    monkeypatch.setenv(watchdog.LIMIT, value)
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", own)
    limits = watchdog.horovods_limits()
    assert limits["HOROVOD_STALL_CHECK_TIME_SECONDS"] == str(check)
    assert limits["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == str(shutdown)


def test_no_limit_leaves_horovods_alone(monkeypatch):
    monkeypatch.setenv(watchdog.LIMIT, "0")
    assert watchdog.limit_s() == float("inf")
    assert watchdog.horovods_limits() == {}


STUCK = """
    import sys, threading, types, os
    from hvdtrain.distributed import watchdog as watch
    space = {"threading": threading}
    code = "def synchronize(handle):\\n    gate.acquire()"
    exec(compile(code, "/x/site-packages/horovod/torch/mpi_ops.py", "exec"), space)
    space["gate"] = threading.Lock()
    space["gate"].acquire()
    stuck = sys.argv[1] == "stuck"
    def shutdown():
        threading.Event().wait() if stuck else space["gate"].release()
    library = types.SimpleNamespace(horovod_is_initialized=lambda: 1, horovod_process_set_ranks=lambda *a: 0)
    basics = types.SimpleNamespace(shutdown=shutdown, MPI_LIB_CTYPES=library)
    sys.modules["horovod.torch.mpi_ops"] = types.SimpleNamespace(_basics=basics)
    watch.joined(types.SimpleNamespace(__name__="horovod.torch", rank=lambda: 0, size=lambda: 2))
    def allreduce(name):
        space["synchronize"](1)
    watch.step_done()
    if sys.argv[1] == "device":
        watch.note_device(lambda: False)
        threading.Event().wait()
    allreduce("loss")
    print("let go")
    raise type("HorovodInternalError", (RuntimeError,), {})("Horovod has been shut down")
"""


@pytest.mark.parametrize("how", ["stuck", "alive", "device"])
def test_a_rank_that_waits_too_long_says_so_and_ends_by_an_error_or_else_with_its_process(tmp_path, how):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(STUCK))
    env = {**os.environ, "PYTHONPATH": str(ROOT), watchdog.LIMIT: "1", process_tree.RUN_DIR: str(tmp_path)}
    run = subprocess.run([sys.executable, script, how], env=env, capture_output=True, text=True, timeout=60)
    assert run.returncode == watchdog.STALLED
    assert "rank 0 (host " in run.stderr
    what = "a step's reductions on the GPU" if how == "device" else "a collective"
    assert f" s in {what} (step 1), at train.py:" in run.stderr
    assert 'train.py", line' in run.stderr
    assert ("let go" in run.stdout) is (how == "alive")
    assert ("Horovod itself is stuck" in run.stderr) is (how != "alive")
    assert json.loads((tmp_path / "progress-0.json").read_text())["step"] == 1
    assert (tmp_path / "pid-0").read_text().isdecimal()


def test_a_job_that_may_be_restarted_learns_of_the_first_step_at_once(tmp_path, monkeypatch):
    """Killed a second later, it has got somewhere, and is worth another start."""
    watching = watchdog.Watchdog(600)
    watching.stopped.set()
    assert watching._next_tick_s() == 1.0
    monkeypatch.setenv(process_tree.RUN_DIR, str(tmp_path))
    assert watching._next_tick_s() == 0.1
    watching._written = 0  # it has joined
    assert watching._next_tick_s() == 0.1
    watching._written = 1
    assert watching._next_tick_s() == 1.0


def test_a_killed_rank_leaves_the_number_of_its_last_step(tmp_path):
    """Not the one of a second before: `hvdtrain run` would take the next attempt's for progress."""
    code = (
        "import os, pathlib, sys\n"
        "from hvdtrain.distributed.watchdog import shared_facts, waits\n"
        "waits.report_steps(shared_facts.SharedFacts(pathlib.Path(sys.argv[1]), 1).counter('progress'))\n"
        "for step in (7, 12345, 170):\n"
        "    waits.step_done(step)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, timeout=60)
    assert run.returncode == -9
    assert json.loads((tmp_path / "progress-1.json").read_text()) == {"step": 170}
