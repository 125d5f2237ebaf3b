"""The watch: what it reads off stacks, what ranks tell each other, how a rank ends. A few lines play Horovod."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from hvdtrain import watch
from hvdtrain.watch import board, endings, steps, thread, waits

ROOT = Path(__file__).resolve().parents[2]

# Files and functions named like Horovod's, in which a thread waits until it is let go.
SYNCHRONIZE = """
def synchronize(handle):
    with gate:
        pass
"""
REDUCE = """
def grouped_allreduce(tensors, name):
    return synchronize(7)
class Unit:
    names = ["a", "b", "c", "d", "e"]
    def finish(self):
        synchronize(8)
"""


def closed():
    """Return a lock that is taken: to wait for it is one native call, as Horovod's are."""
    gate = threading.Lock()
    gate.acquire()
    return gate


def open_(gate):
    if gate.locked():
        gate.release()


@pytest.fixture
def horovod():
    """Return a namespace of such functions; whoever waits in them is let go at the end."""
    space = {"gate": closed()}
    exec(compile(SYNCHRONIZE, "/x/site-packages/horovod/torch/mpi_ops.py", "exec"), space)  # noqa: S102
    inside = str(Path(waits._PACKAGE) / "torch/reduce_ops.py")
    exec(compile(REDUCE, inside, "exec"), space)  # noqa: S102
    yield space
    open_(space["gate"])


def waiting(function, *args):
    """Run `function` on a thread; return the thread once it waits, and what is found of it."""
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    until = time.monotonic() + 30
    while time.monotonic() < until:
        found = [wait for wait in waits.find() if wait.thread == thread.ident]
        if found:
            return found[0]
    raise AssertionError("the wait was not found")


def test_a_wait_is_the_same_wait_until_it_ends(horovod):
    first = waiting(horovod["synchronize"], 3)
    again = next(wait for wait in waits.find() if wait.thread == first.thread)
    other = waiting(horovod["synchronize"], 4)
    assert (first.kind, first.key == again.key, first.key == other.key) == ("collective", True, False)
    open_(horovod["gate"])
    until = time.monotonic() + 30
    while {first.key, other.key} & {wait.key for wait in waits.find()}:
        assert time.monotonic() < until


@pytest.mark.parametrize("collects", [True, False])
def test_stacks_are_read_without_collecting_garbage(monkeypatch, collects):
    """Else a process with tensors in its garbage may hang on Python 3.11: see `frames`."""
    seen = []
    monkeypatch.setattr(sys, "_current_frames", lambda: seen.append(gc.isenabled()) or {})
    if not collects:
        gc.disable()
    try:
        waits.find()
        waits.stacks()
        assert (seen, gc.isenabled()) == ([False, False], collects)
    finally:
        gc.enable()


def test_a_wait_names_the_collective_and_the_tensors(horovod):
    assert waiting(horovod["grouped_allreduce"], [], "loss").what == "allreduce of 'loss'"
    assert waiting(horovod["Unit"]().finish).what == "allreduce of 'a', 'b', 'c' and 2 more"


def test_a_thread_that_computes_waits_for_nobody(horovod):
    assert not [wait for wait in waits.find() if wait.thread == threading.get_ident()]


def test_a_graph_waits_between_its_two_counters(monkeypatch):
    counts = [4, 4]
    monkeypatch.setattr(waits, "_graphs", {})
    waits.note_graph(["kernel"], lambda: (counts[0], counts[1]))
    space = {"gate": closed(), "entered": []}
    code = "def quick_execute():\n    entered.append(1)\n    with gate:\n        pass\n"
    exec(compile(code, "/x/tensorflow/python/eager/execute.py", "exec"), space)  # noqa: S102
    thread = threading.Thread(target=space["quick_execute"], daemon=True)
    thread.start()
    while not space["entered"]:
        time.sleep(0.01)
    assert not [wait for wait in waits.find() if wait.thread == thread.ident]
    counts[0] = 5
    found = [wait for wait in waits.find() if wait.thread == thread.ident]
    open_(space["gate"])
    assert [(wait.kind, wait.what) for wait in found] == [("graph", "the reduction of 'kernel'")]
    assert waits.steps_in_graphs() == 4


def test_the_oldest_step_that_a_gpu_has_not_come_by_is_one_wait(monkeypatch):
    monkeypatch.setattr(waits, "_device", (0, lambda: True))
    passed = {"a": False, "b": False}

    def found():  # threads that other tests let go may still be on their way
        return [wait for wait in waits.find() if wait.kind == "device"]

    waits.note_device(lambda: passed["a"])
    (first,) = found()
    waits.note_device(lambda: passed["b"])  # later ones cannot have come by
    assert [wait.key for wait in found()] == [first.key]
    assert first.what == "a step's reductions on the GPU"
    passed["a"] = True
    assert found() == []
    waits.note_device(lambda: passed["b"])
    assert [wait.key for wait in found()] not in ([], [first.key])
    passed["b"] = True
    waits.note_device(lambda: 1 / 0)
    assert found() == []  # the device's error is for whoever trains


def test_the_place_is_the_users_and_not_a_librarys():
    def here():
        return json.loads("1", parse_int=lambda _: waits.place(sys._getframe()))

    assert here().startswith("test_watch.py:")
    assert here().endswith(" in here") is False  # the lambda's own line


def test_steps_are_counted_until_somebody_knows_the_number(monkeypatch):
    monkeypatch.setattr(steps, "_steps", 0)
    monkeypatch.setattr(steps, "_told", False)
    watch.step_done()
    watch.step_done()
    assert steps.done() == 2
    watch.step_done(40)
    watch.step_done()  # the optimizer under the Trainer
    assert steps.done() == 40


@pytest.mark.parametrize("value", ["-1", "soon", "nan"])
def test_a_limit_that_is_none_is_refused(monkeypatch, value):
    monkeypatch.setenv(watch.LIMIT, value)
    with pytest.raises(ValueError, match=f"Received: HVDTRAIN_STALL_S='{value}'"):
        watch.limit_s()


@pytest.mark.parametrize(
    ("value", "own", "check", "shutdown"),
    [("", "", 60, 660), ("8", "", 2, 10), ("1", "", 1, 2), ("600", "30", 30, 630)],
)
def test_horovod_names_stalled_tensors_before_our_limit_and_ends_them_after_it(
    monkeypatch, value, own, check, shutdown
):
    monkeypatch.setenv(watch.LIMIT, value)
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", own)
    limits = watch.horovods_limits()
    assert limits["HOROVOD_STALL_CHECK_TIME_SECONDS"] == str(check)
    assert limits["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == str(shutdown)


def test_no_limit_leaves_horovods_alone(monkeypatch):
    monkeypatch.setenv(watch.LIMIT, "0")
    assert watch.limit_s() == float("inf")
    assert watch.horovods_limits() == {}


# ---- the board


def test_ranks_read_each_others_facts_and_one_alone_is_first(tmp_path):
    zero, one = board.Board(tmp_path, rank=0), board.Board(tmp_path, rank=1)
    zero.post("pid", 12)
    one.post("error", {"rank": 1, "text": "x"})
    assert one.all("pid") == {0: 12}
    assert zero.all("error") == {1: {"rank": 1, "text": "x"}}
    assert [one.claim("first"), zero.claim("first"), one.claim("first")] == [True, False, False]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["claimed-first", "error-1.json", "pid-0"]


def test_what_an_earlier_job_left_says_nothing(tmp_path):
    for name in ("error-1.json", "claimed-first"):
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (1, 1))
    here = board.Board(tmp_path, rank=0)
    assert here.all("error") == {}
    assert here.claim("first")


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    gone = board.Board(tmp_path / "gone", rank=0)
    gone.post("pid", 1)
    assert gone.all("pid") == {}
    assert gone.claim("first")


def test_a_folder_that_the_last_rank_removes_while_another_one_reads_it_says_nothing(tmp_path):
    read, ended = board.Board(tmp_path / "job", rank=0), threading.Event()

    def come_and_go():
        while not ended.is_set():
            (tmp_path / "job").mkdir()
            (tmp_path / "job").rmdir()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        assert all(read.all("pid") == {} for _ in range(20_000))
    finally:
        ended.set()
        thread.join()


def test_ranks_of_one_job_share_a_private_folder_and_the_last_one_removes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(board.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv(board.RUN_DIR, str(tmp_path / "another-hosts"))  # `hvdtrain run` runs there
    for name in board._JOB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert board.open_board(0).directory is None
    monkeypatch.setenv("PMIX_NAMESPACE", "17")
    zero, one = board.open_board(0), board.open_board(1)
    assert zero.directory == one.directory
    assert zero.directory.parent.stat().st_mode & 0o777 == 0o700
    for rank in (zero, one):
        rank.post("pid", os.getpid())
    zero.leave()
    assert one.directory.exists()
    one.leave()
    assert not one.directory.exists()
    zero.directory.parent.chmod(0o777)  # anybody may write there: not ours alone
    assert board.open_board(0).directory is None


def test_the_state_of_a_process_is_told():
    process = subprocess.Popen(["sleep", "100"])
    try:
        assert board.process_state(process.pid) == ""
        process.send_signal(19)
        until = time.monotonic() + 30
        while not board.process_state(process.pid) and time.monotonic() < until:
            time.sleep(0.01)
        assert "stopped" in board.process_state(process.pid)
    finally:
        process.kill()
        process.wait()
    assert "gone" in board.process_state(process.pid)


# ---- the end


def run_rank(code: str, tmp_path: Path, *, rank: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` as a rank of two whose Horovod says when it is shut down."""
    head = f"""
        import atexit, os, sys, threading, time
        from pathlib import Path
        from hvdtrain.watch.board import Board
        from hvdtrain.watch.endings import Endings
        board = Board(Path({str(tmp_path)!r}), rank={rank})
        atexit.register(print, "exit functions run")
        rank = Endings(board, rank={rank}, size=2, host="h", step=lambda: 12, shut_down=lambda: print("shut down"))
        rank.install()
        class HorovodInternalError(RuntimeError): pass
        GONE = "Horovod has been shut down. This was caused by"
    """
    script = textwrap.dedent(head) + textwrap.dedent(code)
    for path in tmp_path.glob("*"):  # the ranks of one job are there at the same time
        os.utime(path, (time.time() + 60, time.time() + 60))
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)


def test_an_exception_is_printed_whole_and_ends_the_process_without_waiting_for_others(tmp_path):
    before = time.monotonic()
    run = run_rank("threading.Thread(target=time.sleep, args=(60,)).start()\nraise ValueError('bad')", tmp_path)
    assert time.monotonic() - before < 30
    assert run.returncode == 1
    assert run.stderr.startswith("rank 0 (host h) failed after 12 steps:\nTraceback (most recent call last):")
    assert run.stderr.count("ValueError: bad") == 1
    assert run.stdout == "exit functions run\n"  # and no shutdown, which waits for the others
    error = json.loads((tmp_path / "error-0.json").read_text())
    assert (error["rank"], error["host"]) == (0, "h")
    assert "ValueError: bad" in error["text"]


def test_the_same_exception_on_another_rank_is_one_line(tmp_path):
    run_rank("raise ValueError('bad')", tmp_path, rank=1)
    same, other = run_rank("raise ValueError('bad')", tmp_path), run_rank("raise ValueError('worse')", tmp_path)
    assert same.stderr == "rank 0 (host h): the same ValueError as on rank 1\n"
    assert "Traceback" in other.stderr
    assert (same.returncode, other.returncode) == (1, 1)


def test_what_another_rank_caused_is_one_line_that_names_it(tmp_path):
    nobody = run_rank("raise HorovodInternalError(GONE)", tmp_path)
    assert "another rank failed or ended first" in nobody.stderr
    run_rank("raise ValueError('bad')", tmp_path, rank=1)
    run = run_rank("raise HorovodInternalError(GONE)", tmp_path)
    assert run.stderr.startswith(
        "rank 0 (host h): ended because rank 1 failed first (ValueError: bad); see its message."
    )
    assert run.stderr.count("\n") == 1
    assert run.returncode == 1
    debug = run_rank("raise HorovodInternalError(GONE)", tmp_path, HVDTRAIN_DEBUG="1")
    assert "Traceback" in debug.stderr


def test_a_rank_that_ended_early_or_was_killed_is_named(tmp_path):
    run_rank("sys.exit(0)", tmp_path, rank=1)
    assert "rank 1 ended early" in run_rank("raise HorovodInternalError(GONE)", tmp_path).stderr
    (tmp_path / "ended-1.json").unlink()
    (tmp_path / "pid-1").write_text("4194304")  # above the largest number that Linux gives
    assert "rank 1 (pid 4194304) is gone" in run_rank("raise HorovodInternalError(GONE)", tmp_path).stderr


def test_a_rank_that_another_one_has_ended_too_is_not_named_as_the_cause(tmp_path):
    (tmp_path / "pid-1").write_text("4194304")
    run_rank("raise HorovodInternalError(GONE)", tmp_path, rank=1)
    assert "because another rank failed or ended first" in run_rank("raise HorovodInternalError(GONE)", tmp_path).stderr


def test_horovods_own_error_of_shapes_is_no_consequence():
    class HorovodInternalError(RuntimeError):
        pass

    assert not endings.is_caused_by_others(HorovodInternalError("Mismatched ALLREDUCE tensor shapes"))
    assert not endings.is_caused_by_others(ValueError("Horovod has been shut down"))
    wrapped = RuntimeError("step failed")
    wrapped.__cause__ = HorovodInternalError("Connection closed by peer")
    assert endings.is_caused_by_others(wrapped)


def test_the_users_hook_is_called_and_a_later_one_does_not_keep_the_process(tmp_path):
    early = run_rank("", tmp_path / "a")
    assert (early.returncode, early.stdout) == (0, "shut down\nexit functions run\n")
    later = run_rank("sys.excepthook = lambda *a: print('mine')\nraise ValueError", tmp_path)
    assert (later.returncode, later.stdout) == (1, "mine\n")


def test_a_thread_that_dies_is_named_and_the_rank_goes_on(tmp_path):
    code = """
        thread = threading.Thread(target=lambda: 1 / 0, name="loader")
        thread.start(); thread.join()
        print(rank.dead_threads)
    """
    run = run_rank(code, tmp_path)
    assert run.stderr.startswith("rank 0 (host h): the thread loader died")
    assert "loader (ZeroDivisionError: division by zero)" in run.stdout
    assert run.returncode == 0


STUCK = """
    import sys, threading, types, os
    from hvdtrain import watch
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
    env = {**os.environ, "PYTHONPATH": str(ROOT), watch.LIMIT: "1", board.RUN_DIR: str(tmp_path)}
    run = subprocess.run([sys.executable, script, how], env=env, capture_output=True, text=True, timeout=60)
    assert run.returncode == watch.STALLED
    assert "rank 0 (host " in run.stderr
    what = "a step's reductions on the GPU" if how == "device" else "a collective"
    assert f" s in {what} (step 1), at train.py:" in run.stderr
    assert 'train.py", line' in run.stderr
    assert ("let go" in run.stdout) is (how == "alive")
    assert ("Horovod itself is stuck" in run.stderr) is (how != "alive")
    assert json.loads((tmp_path / "progress-0.json").read_text())["step"] == 1
    assert (tmp_path / "pid-0").read_text().isdecimal()


def test_a_job_that_may_be_started_anew_hears_of_the_first_step_at_once(tmp_path, monkeypatch):
    """Killed a second later, it has got somewhere, and is worth another start."""
    watching = thread.Watch(600)
    watching.stop()
    assert watching._next_tick_s() == 1.0
    monkeypatch.setenv(board.RUN_DIR, str(tmp_path))
    assert watching._next_tick_s() == 0.1
    watching._written = 0  # it has joined
    assert watching._next_tick_s() == 0.1
    watching._written = 1
    assert watching._next_tick_s() == 1.0
