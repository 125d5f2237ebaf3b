"""The parts of a launcher's output that are left out, and the parts that are not."""

from __future__ import annotations

from hvdtrain.launch.shortened import Shortened

RULE = b"-" * 74
MARK = b"[1,0]<stderr>:"
STALL = b"[2026-11-25 13:05:30.544224: W /tmp/x/horovod/common/stall_inspector.cc:107] One or more tensors wait"


def shown(*lines: bytes) -> list[bytes]:
    shortened = Shortened()
    pairs = [(MARK, line.removeprefix(MARK)) if line.startswith(MARK) else (b"", line) for line in lines]
    return [*shortened.feed(pairs, now=0.0), *shortened.end()]


def test_mpiruns_two_blocks_about_a_rank_that_ended_are_left_out() -> None:
    first = [RULE, b"Primary job  terminated normally, but 1 process returned", b"a non-zero exit code.", RULE]
    second = [
        RULE,
        b"mpirun detected that one or more processes exited with non-zero status, thus",
        b"  Exit code: 1",
        RULE,
    ]
    assert shown(b"before", *first, *second, b"after") == [b"before", b"after"]


def test_mpiruns_block_about_a_killed_rank_is_left_out() -> None:
    assert (
        shown(RULE, b"mpirun noticed that process rank 1 with PID 0 on node h exited on signal 9 (Killed).", RULE) == []
    )


def test_what_horovodrun_prints_over_gloo_about_ranks_that_ended_is_left_out() -> None:
    mark = b"[0]<stderr>:"
    lost = (
        b"[2026-11-25 15:09:45.732694: E /tmp/x/horovod/common/operations.cc:716] [0]: Horovod background loop "
        b"uncaught exception: [/tmp/x/gloo/transport/tcp/pair.cc:622] Connection closed by peer [127.0.0.1]:35498"
    )
    lines = [
        *((mark, text) for text in (b"mine", lost, b"Terminated", b"Terminated by me")),
        (b"[0]<stdout>:", b"Terminated"),
        *(
            (b"", text)
            for text in (
                b"Process 1 exit with status code 1.",
                b"Terminating remaining workers after failure of Process 1.",
                b"Process 0 exit with status code -9.",
                b"Horovod detected that one or more processes exited with non-zero status, thus causing the job to be",
                b"Process name: 1",
                b"Exit code: 1",
                b"",
                b"after",
                b"",
            )
        ),
    ]
    assert Shortened().feed(lines, now=0.0) == [
        mark + b"mine",
        mark + b"Terminated by me",
        b"[0]<stdout>:Terminated",
        b"after",
        b"",
    ]


def test_other_blocks_and_rules_of_ranks_are_shown_whole() -> None:
    block = [RULE, b"There are not enough slots available in the system", RULE]
    of_a_rank = [MARK + RULE, MARK + b"Primary job  terminated normally, but", MARK + RULE]
    lines = [*block, *block, b"words", *of_a_rank, RULE]
    assert shown(*lines) == lines


def test_horovods_warning_comes_without_a_path_and_once_for_each_set_of_tensors() -> None:
    shortened = Shortened()

    def warn(*missing: bytes, now: float) -> list[bytes]:
        texts = (STALL, b"Missing ranks:", *missing)
        return [line.removeprefix(MARK) for line in shortened.feed([(MARK, text) for text in texts], now=now)]

    heading = [b"Horovod: One or more tensors wait", b"Missing ranks:"]
    assert warn(b"1: [a]", now=0.0) == [*heading, b"1: [a]"]
    assert warn(b"1: [a]", now=60.0) == []
    assert warn(b"1: [a]", b"0: [b]", now=120.0) == [*heading, b"0: [b]"]
    assert warn(b"1: [a]", now=900.0) == [*heading, b"1: [a]"]  # another stall
    assert shortened.feed([(MARK, b"1: [a]"), (MARK, b"words")], now=901.0) == [MARK + b"words"]
    assert shortened.feed([(MARK, b"1: [a]")], now=902.0) == [MARK + b"1: [a]"]
