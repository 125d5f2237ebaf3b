from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain.distributed.watchdog import shared_facts
from hvdtrain.launch import exit_cause, supervisor
from hvdtrain.launch.exit_cause import Cause, Listener, RankError, first_error, reported_by_ranks, root_cause

# Open MPI 5's.
SIGNAL_5 = b"prterun noticed that process rank 1 with PID 3173 on node vm exited on\nsignal 9 (Killed).\n"
CODE_5 = (
    b"prterun detected that one or more processes exited with non-zero status,\n"
    b"thus causing the job to be terminated. The first process to do so was:\n\n"
    b"   Process name: [prterun-vm-3046@1,1]\n   Exit code:    7\n----"
)
ABORT_5 = (
    b"MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n  Proc: [[46140,1],1]\n  Errorcode: 9\n\nNOTE"
)
SIGNAL = b"mpirun noticed that process rank 1 with PID 0 on node vm exited on signal 9 (Killed).\n"
STATUS = (
    b"mpirun detected that one or more processes exited with non-zero status, thus causing\n"
    b"the job to be terminated. The first process to do so was:\n\n"
    b"  Process name: [[31331,1],2]\n  Exit code:    75\n"
)
ABORT = (
    b"MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD\nwith errorcode 4.\n"
)  # fmt: skip
GLOO = b"Process 1 exit with status code 137.\nTerminating remaining workers\nProcess 0 exit with status code 75.\n"


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (SIGNAL, Cause("rank 1 on host vm", 137, 1)),
        (STATUS, Cause("rank 2 on host here", 75, 2)),
        (ABORT, Cause("rank 3 on host here", 4, 3)),
        (SIGNAL_5, Cause("rank 1 on host vm", 137, 1)),
        (CODE_5, Cause("rank 1 on host here", 7, 1)),
        (ABORT_5, Cause("rank 1 on host here", 9, 1)),
        (GLOO, Cause("rank 1 on host here", 137, 1)),
        (b"Process 1 exit with status code -9.\n", Cause("rank 1 on host here", 137, 1)),
        (b"Remote daemon: [[7555,0],1] on node gpu2\n", Cause("host gpu2", 205, how="no longer answers")),
        (b"epoch 1, loss 0.3\n", None),
    ],
)
@pytest.mark.parametrize("piece", [1, 7, 10_000])
def test_the_first_rank_to_end_is_heard_in_pieces_of_any_size(said: bytes, cause: Cause | None, piece: int) -> None:
    listener = Listener("here")
    for i in range(0, len(said), piece):
        listener.feed("stderr", said[i : i + piece])
    assert listener.cause == cause


def test_a_rank_of_another_host_is_named_with_it() -> None:
    said = b"Process 1 exit with status code 255.\n"
    for by_rank, text in (
        (("here", "there"), "rank 1 on host there was killed, or the connection to it broke (ssh's status 255)"),
        (("there", "here"), "rank 1 on host here ended with status 255"),
        (("", ""), "rank 1 ended with status 255"),
    ):
        listener = Listener("here", by_rank)
        listener.feed("stdout", said)
        assert str(listener.cause) == text


def test_a_rank_that_gloo_told_of_silence_is_no_culprit() -> None:
    listener = Listener("here")
    listener.feed("stderr", b"[0]<stderr>:[gloo/unbound_buffer.cc:81] Timed out waiting 30000ms for recv operation\n")
    listener.feed("stdout", b"Process 0 exit with status code 1.\n")
    text = "rank 0 on host here heard nothing from another one for 30 s, whose host, network or process hangs"
    assert str(listener.cause) == text


@pytest.mark.parametrize("piece", [1, 10_000])
def test_that_mpirun_ends_a_job_is_heard_before_it_says_why(piece: int, tmp_path: Path) -> None:
    listener = Listener("here")
    said = b"a non-zero exit code. Per user-direction, the job has been aborted.\n"
    assert not listener.is_aborted
    for i in range(0, len(said), piece):
        listener.feed("stderr", said[i : i + piece])
    assert listener.is_aborted
    assert listener.cause is None
    assert reported_by_ranks(tmp_path, host="here") is None
    (tmp_path / "waits-3.json").write_text("{}")
    assert str(reported_by_ranks(tmp_path, host="here")) == "rank 3 on host here has waited too long for others"
    (tmp_path / "error-2.json").write_text("{}")
    assert str(reported_by_ranks(tmp_path, host="here")) == "rank 2 on host here ended with status 1"


def test_a_cause_reads_as_a_sentence() -> None:
    assert str(Cause("rank 1 on host h", 137)) == "rank 1 on host h was killed by signal 9"
    assert str(Cause("horovodrun", 3)) == "horovodrun ended with status 3"


def test_only_the_end_of_a_long_output_is_kept() -> None:
    listener = Listener("here")
    for _ in range(40):
        listener.feed("stdout", b"x" * 2**16)
    listener.feed("stderr", SIGNAL)
    assert len(listener.text()) < 2**21
    assert listener.cause is not None


def heard(printed: str) -> Listener:
    listener = Listener("h")
    listener.feed("stdout", printed.encode())
    return listener


def write(folder: Path, rank: int, time: float, text: str) -> None:
    content = {"rank": rank, "host": "h", "time": time, "text": text}
    (folder / f"error-{rank}.json").write_text(json.dumps(content))


def test_the_earliest_written_error_is_the_first(tmp_path: Path) -> None:
    write(tmp_path, 0, 12.5, "HorovodInternalError: peer")
    write(tmp_path, 1, 12.0, "Traceback\nValueError: boom\n")
    (tmp_path / "error-2.json").write_text('{"rank": 2, "ti')
    found = first_error(tmp_path, listener=Listener("here"), cause=Cause("rank 0", 1, 0))
    assert found is not None
    assert (found.rank, found.last_line) == (1, "ValueError: boom")


def test_what_peers_of_a_killed_rank_raise_is_not_the_reason(tmp_path: Path) -> None:
    write(tmp_path, 0, 12.5, "HorovodInternalError: peer")
    printed = "[0]<stderr>:Traceback (most recent call last):\n[0]<stderr>:HorovodInternalError: peer\n"
    assert first_error(tmp_path, listener=heard(printed), cause=Cause("rank 1", 137, 1)) is None


def test_without_a_written_error_the_failing_ranks_traceback_is_found_in_the_output(tmp_path: Path) -> None:
    printed = (
        "[1,0]<stderr>:Traceback (most recent call last):\n[1,0]<stderr>:OtherError: late\n"
        "[1,1]<stderr>:Traceback (most recent call last):\n"
        '[1,1]<stderr>:  File "train.py", line 20, in <module>\n'
        '[1,1]<stderr>:    [1,1]<stderr>:raise ValueError("boom")[1,1]<stderr>:\n'
        "[1,1]<stderr>:ValueError[1,1]<stderr>:: [1,1]<stderr>:boom[1,1]<stderr>:\n"
        "Traceback (most recent call last):\nRuntimeError: the launcher's own\n"
    )
    found = first_error(tmp_path, listener=heard(printed), cause=Cause("rank 1", 1, 1))
    assert found is not None
    assert found.rank == 1
    assert found.text.splitlines()[-1] == "ValueError: boom"
    assert '    raise ValueError("boom")' in found.text


def test_the_launchers_own_traceback_is_not_a_ranks(tmp_path: Path) -> None:
    printed = "[1]<stderr>:Killed\nTraceback (most recent call last):\nRuntimeError: Horovod detected\n"
    assert first_error(tmp_path, listener=heard(printed), cause=Cause("rank 1", 1, 1)) is None


def test_steps_and_pids_are_read_as_far_as_they_are_whole(tmp_path: Path) -> None:
    assert exit_cause.latest_step(tmp_path, rank=None) is None
    (tmp_path / "progress-0.json").write_text('{"step": 12, "time": 1.0}')
    (tmp_path / "progress-1.json").write_text('{"step": 1')
    (tmp_path / "pid-0").write_text("4711")
    (tmp_path / "pid-1").write_text("")
    (tmp_path / "progress-2.json").write_text('{"step": 10, "time": 1.0}')
    assert exit_cause.latest_step(tmp_path, rank=1) == 12
    assert exit_cause.latest_step(tmp_path, rank=2) == 10
    assert shared_facts.read(tmp_path, "pid") == {0: 4711}


def test_an_error_is_found_where_two_ranks_printed_theirs_in_pieces_on_the_same_lines(tmp_path: Path) -> None:
    printed = (
        "[1,0]<stderr>:Traceback (most recent call last):\n"
        "[1,1]<stderr>:Traceback (most recent call last):\n"
        '[1,0]<stderr>:  File "s.py", line 1, in <module>\n'
        '[1,0]<stderr>:    [1,1]<stderr>:  File "s.py", line 1, in <module>\n'
        "[1,0]<stderr>:import one[1,1]<stderr>:    [1,0]<stderr>:\n"
        "[1,0]<stderr>:ModuleNotFoundError[1,0]<stderr>:: [1,0]<stderr>:No module named 'one'[1,0]<stderr>:\n"
        "[1,1]<stderr>:import two\n"
        "[1,1]<stderr>:ModuleNotFoundError: No module named 'two'\n"
        "-----\nPrimary job  terminated normally"
    )
    for rank, name in enumerate(("one", "two")):
        found = first_error(tmp_path, listener=heard(printed), cause=Cause(f"rank {rank}", 1, rank))
        assert found is not None
        assert found.text == (
            'Traceback (most recent call last):\n  File "s.py", line 1, in <module>\n'
            f"    import {name}\nModuleNotFoundError: No module named '{name}'"
        )


@pytest.mark.parametrize("status", [0, 205])
def test_a_lost_host_is_no_success_though_open_mpi_5_ends_with_0(status: int, tmp_path: Path) -> None:
    said = "  HNP daemon   : [prterun-hosta-18@0,0] on node a\n  Remote daemon: [prterun-hosta-18@0,1] on node b\n\n"
    job = SimpleNamespace(listener=heard(said), run_dir=tmp_path)
    assert str(supervisor._cause(job, status, "mpirun")) == "host b no longer answers"
    job = SimpleNamespace(listener=heard(""), run_dir=tmp_path)
    assert supervisor._cause(job, 0, "mpirun").code == 0


def posted(run_dir: Path, **facts: object) -> Path:
    """Write what ranks post; `waits_0={}` is waits-0.json, `pid_0=1` is pid-0."""
    run_dir.mkdir()
    for name, content in facts.items():
        fact, _, rank = name.partition("_")
        (run_dir / f"{fact}-{rank}{'.json' * isinstance(content, dict)}").write_text(json.dumps(content))
    return run_dir


def failed(rank: int, time: float) -> dict[str, object]:
    return {"rank": rank, "host": "here", "time": time}


@pytest.mark.parametrize(
    ("code", "facts", "text"),
    [
        (1, {"error_1": failed(1, 5.0), "followed_0": {}}, "rank 1 on host here ended with status 1"),
        (1, {"error_0": failed(0, 6.0), "error_1": failed(1, 5.0)}, "rank 1 on host here ended with status 1"),
        (1, {"error_0": failed(0, 5.0), "error_1": failed(1, 6.0)}, "rank 0 on host here ended with status 1"),
        (3, {"error_1": failed(1, 6.0)}, "rank 0 on host here ended with status 3"),  # by itself: sys.exit(3)
        (137, {"error_1": failed(1, 6.0)}, "rank 0 on host here was killed by signal 9"),
        (1, {"ended_1": {}, "followed_0": {}}, "rank 1 on host here ended early"),
        (
            76,
            {"pid_0": 1, "pid_1": 2, "idle_1": {"place": "a.py:6"}},
            "rank 1 on host here hung (at a.py:6)",
        ),
        (76, {"pid_0": 1, "pid_1": 2, "waits_0": {}}, "rank 1 on host here hung"),
        (76, {"pid_0": 1, "waits_0": {}}, "rank 0 on host here has waited too long for others"),
        (1, {}, "rank 0 on host here ended with status 1"),
    ],
)
def test_the_cause_is_the_rank_that_made_the_first_one_end(code, facts, text, tmp_path) -> None:
    cause = root_cause(posted(tmp_path / "job", **facts), Cause("rank 0 on host here", code, 0), host="here")
    assert str(cause).startswith(text)
    assert str(cause.rank) in text


BEGAN = b"[0]<stdout>:rank 1 (host b) failed after 3 steps: says rank 0\n"
ENDED_0 = b"[0]<stderr>:rank 0 (host here): ended because another rank failed or ended first; see there\n"
FAILED_1 = b"[1]<stderr>:rank 1 (host b) failed after 15 steps:\n"
MISSING_2 = (
    b"[1]<stderr>:rank 1 (host b) has waited 9 s in allreduce of 'weight' (step 15).\n"
    b"[1]<stderr>:  rank 2 is missing: its process (pid 9) is stopped (SIGSTOP, or a debugger)\n"
)
IDLE_1 = b"[1]<stderr>:rank 1 (host b) has been in no collective for 6 s (step 15), and other ranks wait for it.\n"


@pytest.mark.parametrize(
    ("code", "printed", "text"),
    [
        (1, ENDED_0 + FAILED_1, "rank 1 on host b ended with status 1"),
        (76, IDLE_1, "rank 1 on host b hung"),
        (76, MISSING_2, "rank 2 on host b hung"),
        (1, ENDED_0, "rank 1 ended first, without a message"),
        (76, b"", "rank 0 on host here has waited too long for others"),
        (3, BEGAN, "rank 0 on host here ended with status 3"),
    ],
)
def test_the_cause_may_be_a_rank_of_another_host_by_what_it_printed(code, printed, text, tmp_path) -> None:
    said = exit_cause.said_by_ranks((BEGAN + printed).decode())
    cause = root_cause(tmp_path, Cause("rank 0 on host here", code, 0), host="here", said=said, size=2)
    assert str(cause) == text


def test_a_rank_that_followed_keeps_what_the_launcher_said_of_its_end(tmp_path) -> None:
    said = exit_cause.said_by_ranks(ENDED_0.decode())
    silence = Cause("rank 0 on host here", 1, 0, how="heard nothing from another one for 3 s")
    assert root_cause(tmp_path, silence, host="here", said=said, size=2) == silence
    assert root_cause(tmp_path, silence, host="here", said=said, size=4) == silence


def test_a_rank_that_only_followed_is_not_called_the_cause(tmp_path) -> None:
    said = exit_cause.said_by_ranks(ENDED_0.decode())
    cause = root_cause(tmp_path, Cause("rank 0 on host here", 1, 0), host="here", said=said, size=4)
    assert str(cause) == "rank 0 on host here ended because another rank had failed or ended first"


def test_two_errors_of_memory_are_the_same_whatever_the_rank_held_then() -> None:
    text = (
        "Traceback (most recent call last):\n  ...\ntorch.OutOfMemoryError: CUDA out of memory.\n{}: activations {} GB"
    )
    first, second = (RankError(1, "h", text.format("hvdtrain: memory of rank 1", size)) for size in (5, 6))
    assert first.name == "OutOfMemoryError"
    assert first.last_line == "torch.OutOfMemoryError: CUDA out of memory."
    assert first.is_like(second)


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        (["    raise ValueError('boom')", "ValueError: boom"], "ValueError: boom"),
        (["    --------", "raise ValueError('boom')", "ValueError: boom", "after: it"], "ValueError: boom"),
        (["    raise KeyboardInterrupt", "KeyboardInterrupt", "after: it"], "KeyboardInterrupt"),
        (["    raise X", "what is no exception at all"], "what is no exception at all"),
    ],
)
def test_a_traceback_ends_with_its_exception_also_where_a_launcher_wrote_into_a_line(between, expected):
    lines = ["before", "Traceback (most recent call last):", '  File "train.py", line 1, in <module>', *between]
    assert exit_cause.traceback_in(lines).splitlines()[-1] == expected
