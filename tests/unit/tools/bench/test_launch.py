from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.launch.arguments import LaunchSpec
from hvdtrain.launch.rank_output import OutputLines
from hvdtrain.tools.bench import launch
from hvdtrain.tools.bench.launch import BenchError, LaunchOutcome, parse_hosts, run_ranks

# What Open MPI's mpirun printed of two ranks, the line of rank 0 in two pieces.
TAGGED = (
    "--- a banner\n"
    "[1,0]<stdout>:MARK:{\"a\": [1[1,1]<stdout>:MARK:{}\n"
    "[1,0]<stderr>:warning\n"
    "[1,0]<stdout>:, 2]}\n"
)  # fmt: skip


def test_without_hosts_ranks_run_here() -> None:
    assert parse_hosts(None, ranks=2, cores=2) == LaunchSpec(ranks=2, hosts={})
    assert parse_hosts(None, ranks=8, cores=2).hosts == {}


def test_hosts_and_slots_are_read_as_horovodrun_writes_them() -> None:
    hosts = parse_hosts("a:2, b:4", ranks=6, cores=1)
    assert hosts.hosts == {"a": 2, "b": 4}
    assert parse_hosts("localhost:64", ranks=64, cores=1).hosts == {"localhost": 64}


@pytest.mark.parametrize(
    ("text", "ranks", "said"),
    [
        (None, 0, "-np must be a whole number, at least 1. Received: -np 0"),
        (None, -3, "-np must be a whole number, at least 1. Received: -np -3"),
        (None, 9, "-np 9 is more than 4 ranks for each of the 2 cores here. Use fewer, or insist with -H localhost:9"),
        ("a:2,b:2", 5, "-np 5 is more than the 4 slots of a:2,b:2"),
        ("a:0", 1, "-H must be like host1:2,host2:2"),
        ("", 1, "-H must be like"),
        (":2", 1, "-H must be like"),
        ("a:-1", 1, "-H must be like"),
        ("a:²", 1, "-H must be like"),
    ],
)
def test_hosts_that_cannot_be_are_refused_in_one_line(text: str | None, ranks: int, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as error:
        parse_hosts(text, ranks=ranks, cores=2)
    assert "\n" not in str(error.value)


def test_a_host_that_cannot_be_reached_is_named_before_anything_is_started(
    as_ranks: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\necho 'ssh: no route' >&2; exit 255\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(BenchError, match=r"^host 198\.51\.100\.1 cannot be reached by ssh: no route$"):
        run_ranks(LaunchSpec(ranks=1, hosts={"198.51.100.1": 1}), [], environment={}, timeout_s=50, mark="M", answers=1)


def ended(status: int, output: str) -> LaunchOutcome:
    lines = OutputLines()
    return LaunchOutcome(status, [*lines.feed(output.encode()), *lines.end()])


def test_marked_lines_are_found_by_rank_though_the_launcher_cut_them_in_two() -> None:
    outcome = ended(0, TAGGED)
    assert outcome.marked("MARK:") == {0: '{"a": [1, 2]}', 1: "{}"}
    assert (None, "--- a banner") in outcome.lines


def test_the_last_words_name_the_rank_and_its_first_error() -> None:
    output = (
        "[1,0]<stderr>:fine\n[1,1]<stderr>:Traceback (most recent call last):\n[1,1]<stderr>:  File x\n"
        "[1,1]<stderr>:ValueError: boom.\n[1,1]<stdout>:HVDTRAIN_STEP_TIMES:{}\nmpirun: status 1\n"
    )
    words = ended(1, output).last_words()
    assert words.splitlines()[0] == "rank 1 raised ValueError: boom. The end of what it printed:"
    assert "HVDTRAIN_STEP_TIMES" not in words


def test_the_last_words_without_an_error_are_the_launchers() -> None:
    assert ended(1, "no such host").last_words() == (
        "the last words are those of the launcher. The end of what it printed:\n  no such host"
    )


@pytest.fixture
def as_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let run_ranks start the program itself in place of horovodrun."""
    monkeypatch.setattr(launch, "_horovodrun", lambda hosts: ["/usr/bin/env"])


@pytest.mark.usefixtures("as_ranks")
def test_a_run_that_does_not_end_is_ended_at_its_limit() -> None:
    began = time.monotonic()
    outcome = run_ranks(
        LaunchSpec(ranks=1, hosts={}),
        ["-c", "import time; time.sleep(60)"],
        environment={},
        timeout_s=0.5,
        mark="M",
        answers=1,
    )
    assert outcome.status is None
    assert time.monotonic() - began < 20


@pytest.mark.usefixtures("as_ranks")
def test_ranks_that_have_answered_get_a_while_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_EXIT_GRACE_S", 0.3)
    code = "import time; print('[0]<stdout>:M 1', flush=True); time.sleep(60)"
    began = time.monotonic()
    outcome = run_ranks(LaunchSpec(ranks=1, hosts={}), ["-c", code], environment={}, timeout_s=50, mark="M", answers=1)
    assert outcome.status is None
    assert time.monotonic() - began < 20
    assert outcome.marked("M") == {0: " 1"}


@pytest.mark.usefixtures("as_ranks")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_ended_from_outside_leaves_no_rank_behind(tmp_path: Path, number: signal.Signals) -> None:
    told, before = tmp_path / "pid", signal.signal(number, signal.SIG_DFL)
    code = f"import os, time; open({str(told)!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(60)"

    def end_this_process() -> None:
        while not (told.exists() and told.read_text().endswith("\n")):
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=end_this_process, daemon=True).start()
    try:
        with pytest.raises(SystemExit) as info:
            run_ranks(LaunchSpec(ranks=1, hosts={}), ["-c", code], environment={}, timeout_s=50, mark="M", answers=1)
        assert info.value.code == 128 + number
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)


@pytest.mark.usefixtures("as_ranks")
def test_ranks_do_not_inherit_another_launchs_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_RANK", "7")
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "2")
    code = "import os, sys; print('[0]<stdout>:', 'HOROVOD_RANK' in os.environ, os.environ['HOROVOD_CYCLE_TIME'])"
    outcome = run_ranks(
        LaunchSpec(ranks=1, hosts={}), ["-c", code], environment={"A": "b"}, timeout_s=50, mark="M", answers=1
    )
    assert outcome.marked("") == {0: " False 2"}
    assert outcome.status == 0


def test_the_launcher_is_that_of_this_environment() -> None:
    line = launch._horovodrun(LaunchSpec(ranks=3, hosts={"a": 2, "b": 1}))
    assert line[-4:] == ["-np", "3", "-H", "a:2,b:1"]
    assert Path(line[0]).parent == Path(sys.executable).parent
    assert launch._horovodrun(LaunchSpec(ranks=2, hosts={}))[-1] == "localhost:2"
