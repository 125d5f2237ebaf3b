"""The end of a rank, and its message about the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hvdtrain.distributed.watchdog import rank_exit

ROOT = Path(__file__).resolve().parents[4]


def run_rank(code: str, tmp_path: Path, *, rank: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` as a rank of two whose Horovod says when it is shut down."""
    head = f"""
        import atexit, os, sys, threading, time
        from pathlib import Path
        from hvdtrain.distributed.watchdog.shared_facts import SharedFacts
        from hvdtrain.distributed.watchdog import waits
        from hvdtrain.distributed.watchdog.rank_exit import RankExit
        waits.step_done(12)
        facts = SharedFacts(Path({str(tmp_path)!r}), rank={rank})
        atexit.register(print, "exit functions run")
        rank = RankExit(facts, rank={rank}, size=2, host="h", shut_down=lambda: print("shut down"))
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


def test_what_is_known_about_an_exception_is_in_the_message_that_others_read(tmp_path):
    explain = "tracebacks.explain_with(lambda error: setattr(error, 'args', (f'{error}, because of this',)))"
    run = run_rank(
        f"from hvdtrain.distributed.watchdog import tracebacks\n{explain}\nraise ValueError('bad')", tmp_path
    )
    assert run.returncode == 1
    assert "ValueError: bad, because of this" in run.stderr
    assert "ValueError: bad, because of this" in json.loads((tmp_path / "error-0.json").read_text())["text"]


def test_the_same_exception_on_another_rank_is_one_line(tmp_path):
    run_rank("raise ValueError('bad')", tmp_path, rank=1)
    same, other = run_rank("raise ValueError('bad')", tmp_path), run_rank("raise ValueError('worse')", tmp_path)
    assert same.stderr == "rank 0 (host h): the same ValueError as on rank 1\n"
    assert "Traceback" in other.stderr
    assert (same.returncode, other.returncode) == (1, 1)


def test_an_exception_that_differs_by_its_own_rank_alone_is_the_same(tmp_path):
    run_rank("raise ValueError('no rows on rank 1')", tmp_path, rank=1)
    same, other = (run_rank(f"raise ValueError('no rows on rank {rank}')", tmp_path) for rank in (0, 2))
    assert same.stderr == "rank 0 (host h): the same ValueError as on rank 1\n"
    assert "ValueError: no rows on rank 2" in other.stderr
    for path in tmp_path.iterdir():
        path.unlink()
    of_both = "raise ValueError('1 on rank 0 but 2 on rank 1')"
    run_rank(of_both, tmp_path, rank=1)
    assert run_rank(of_both, tmp_path).stderr == "rank 0 (host h): the same ValueError as on rank 1\n"


@pytest.mark.parametrize(
    "raised",
    [
        "raise HorovodInternalError() from RuntimeError('DataLoader worker (pid 7) is killed by signal: Terminated. ')",
        "raise RuntimeError('DataLoader worker (pid(s) 7, 8) exited unexpectedly')",
    ],
)
def test_workers_that_the_launcher_ended_after_another_rank_failed_are_one_line(raised, tmp_path):
    alone = run_rank(raised, tmp_path)
    assert "Traceback" in alone.stderr
    for path in tmp_path.iterdir():
        path.unlink()
    run_rank("raise ValueError('bad')", tmp_path, rank=1)
    run = run_rank(raised, tmp_path)
    assert run.stderr.startswith("rank 0 (host h): ended because rank 1 failed first (ValueError: bad)")
    assert run.stderr.count("\n") == 1


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


def test_an_error_that_quotes_another_ranks_is_one_line_and_no_error_of_this_rank(tmp_path):
    run = run_rank("from hvdtrain.errors import OtherRankError\nraise OtherRankError(1, 'ValueError: bad')", tmp_path)
    assert run.stderr.startswith("rank 0 (host h): ended because rank 1 failed first (ValueError: bad)")
    assert run.stderr.count("\n") == 1
    assert (run.returncode, (tmp_path / "error-0.json").exists()) == (1, False)


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

    assert not rank_exit.is_caused_by_others(HorovodInternalError("Mismatched ALLREDUCE tensor shapes"))
    assert not rank_exit.is_caused_by_others(ValueError("Horovod has been shut down"))
    wrapped = RuntimeError("step failed")
    wrapped.__cause__ = HorovodInternalError("Connection closed by peer")
    assert rank_exit.is_caused_by_others(wrapped)


def test_the_users_hook_is_called_and_a_later_one_does_not_keep_the_process(tmp_path):
    early = run_rank("", tmp_path / "a")
    assert (early.returncode, early.stdout) == (0, "shut down\nexit functions run\n")
    later = run_rank("sys.excepthook = lambda *a: print('mine')\nraise ValueError", tmp_path)
    assert (later.returncode, later.stdout) == (1, "mine\n")


def test_a_thread_that_dies_is_named_and_the_rank_continues(tmp_path):
    code = """
        thread = threading.Thread(target=lambda: 1 / 0, name="loader")
        thread.start(); thread.join()
        print(rank.dead_threads)
    """
    run = run_rank(code, tmp_path)
    assert run.stderr.startswith("rank 0 (host h): the thread loader died")
    assert "loader (ZeroDivisionError: division by zero)" in run.stdout
    assert run.returncode == 0


EXITS = {
    "sys.exit(3)": (3, True),
    "sys.exit('no data')": (1, True),
    "sys.exit(0)": (0, False),
    "sys.exit()": (0, False),
    "pass": (0, False),
    "try: sys.exit(3)\nexcept SystemExit: waits.step_done(13)": (0, False),
    "thread = threading.Thread(target=sys.exit, args=(3,)); thread.start(); thread.join()": (0, False),
}


@pytest.mark.parametrize("code", EXITS)
def test_the_status_with_which_a_script_leaves_is_known_at_exit(tmp_path, code):
    status, is_failing = EXITS[code]
    run = run_rank(f"atexit.register(lambda: print(rank.is_failing))\n{code}", tmp_path)
    assert (run.returncode, run.stdout.splitlines()[0]) == (status, str(is_failing))
    assert run.stderr.strip() == ("no data" if status == 1 else "")
