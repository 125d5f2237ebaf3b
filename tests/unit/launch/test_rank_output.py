from __future__ import annotations

import pytest

from hvdtrain.launch.rank_output import MarkedLines, OutputLines, split_mark
from hvdtrain.system import open_mpi

OVER_MPI = b"[1,0]<stdout>:one\n[1,1]<stderr>:two\nmpirun: words\n[1,1]<stdout>:[0] not mine\n"
OVER_GLOO = b"[0]<stdout>:one\n[1]<stderr>:two\nmpirun: words\n[1]<stdout>:[0] not mine\n"
EXPECTED = [(0, "one"), (1, "two"), (None, "mpirun: words"), (1, "[0] not mine")]


def test_each_line_has_its_rank_whatever_pieces_it_comes_in() -> None:
    for text in (OVER_MPI, OVER_GLOO):
        for size in (1, 3, 10, 1000):
            lines = OutputLines()
            pieces = [text[i : i + size] for i in range(0, len(text), size)]
            assert [line for piece in pieces for line in lines.feed(piece)] == EXPECTED, size


def test_ranks_that_write_half_lines_are_not_mixed_and_their_characters_stay_whole() -> None:
    lines = OutputLines()
    first, second = "ö".encode()
    text = b"[1,0]<stdout>:half " + bytes([first]) + b"[1,1]<stdout>:other\n[1,0]<stdout>:" + bytes([second]) + b"!\n"
    assert lines.feed(text) == [(1, "other"), (0, "half ö!")]


def test_of_a_progress_bar_its_last_state_is_shown() -> None:
    lines = OutputLines()
    assert lines.feed(b"[0]<stderr>: 10%\r[0]<stderr>: 50%\r[0]<stderr>:100%\r\n") == [(0, "100%")]


def test_what_has_no_end_of_line_comes_at_the_end() -> None:
    lines = OutputLines()
    assert lines.feed(b"[1,0]<stdout>:no end[1,1]<stdout>:line\n[1,1]<stdout>:nor this") == [(1, "line")]
    assert sorted(lines.end()) == [(0, "no end"), (1, "nor this")]
    assert lines.end() == []


def test_the_last_lines_of_each_rank_are_kept() -> None:
    lines = OutputLines()
    lines.feed(b"".join(b"[1,%d]<stdout>:%d\n" % (i % 2, i) for i in range(100)) + b"the launcher\n")
    assert list(lines.tails[1]) == [str(i) for i in range(71, 100, 2)]
    assert list(lines.tails[None]) == ["the launcher"]


def whole(*pieces: bytes) -> list[bytes]:
    lines = MarkedLines()
    return [*(line for piece in pieces for line in lines.feed(piece, now=0.0)), *lines.end()]


def test_lines_for_a_reader_keep_their_marks_and_are_whole() -> None:
    mixed = b"[1,0]<stdout>:<0:1[1,1]<stdout>:<1:1>\n[1,0]<stdout>:2>\nmpirun: words\n"
    expected = [b"[1,1]<stdout>:<1:1>", b"[1,0]<stdout>:<0:12>", b"mpirun: words"]
    assert whole(mixed) == whole(*(mixed[i : i + 1] for i in range(len(mixed)))) == expected
    assert [split_mark(line)[1] for line in expected] == [b"<1:1>", b"<0:12>", b"mpirun: words"]


@pytest.mark.parametrize("tag", ["[1,{}]<stdout>:", "[{}]<stdout>:"])
def test_a_time_before_the_mark_is_no_line_of_its_own(tag: str) -> None:
    def mark(rank: int, second: int) -> str:
        return f"Sat Nov  1 20:05:{second:02} 2026{tag.format(rank)}"

    mixed = f"{mark(0, 9)}rank {mark(1, 9)}rank 1\n{mark(0, 10)}0\n".encode()
    assert whole(mixed) == [f"{mark(1, 9)}rank 1".encode(), f"{mark(0, 10)}rank 0".encode()]
    assert OutputLines().feed(mixed) == [(1, "rank 1"), (0, "rank 0")]
    lines = MarkedLines()
    assert lines.feed(mixed[: mixed.index(b"0\n")], now=5.0) == [f"{mark(1, 9)}rank 1".encode()]
    assert lines.begun() == 5.0


def test_a_time_that_a_rank_prints_is_its_own() -> None:
    time = b"Sat Nov 21 20:05:27 2026"
    mixed = b"[1,0]<stdout>:" + time + b"[1,1]<stdout>:x\n[1,0]<stdout>:!\n"
    assert whole(mixed) == [b"[1,1]<stdout>:x", b"[1,0]<stdout>:" + time + b"!"]
    assert split_mark(b"[1,0]<stdout>:" + time) == (b"[1,0]<stdout>:", time)
    assert split_mark(time + b"[1,0]<stdout>:I0000 a note") == (time + b"[1,0]<stdout>:", b"I0000 a note")


def test_half_a_line_is_shown_once_it_has_waited_and_no_line_loses_its_half_to_another_ranks() -> None:
    lines = MarkedLines()
    assert lines.begun() is None
    assert lines.feed(b"[1,1]<stderr>: 10%\r[1,1]<stderr>: 20%[1,0]<stdout>:one\n", now=5.0) == [b"[1,0]<stdout>:one"]
    assert lines.begun() == 5.0
    assert lines.feed(b"[1,0]<stdout>:tw", now=5.5) == []
    assert lines.late(now=5.9, limit_s=1.0) == []
    assert lines.late(now=6.0, limit_s=1.0) == [b"[1,1]<stderr>: 20%"]
    assert lines.feed(b"o\n", now=6.1) == [b"[1,0]<stdout>:two"]
    assert lines.begun() is None


def test_a_rank_that_writes_all_the_time_has_not_waited() -> None:
    lines = MarkedLines()
    for at in range(10):
        lines.feed(b"one\n[1,0]<stdout>:tw", now=float(at))
        assert lines.late(now=at + 0.5, limit_s=1.0) == []
        assert lines.feed(b"o[1,1]<stdout>:x\n[1,1]<stdout>:y\n[1,0]<stdout>:\n", now=at + 0.6)[-1:] == [
            b"[1,0]<stdout>:two"
        ]


def test_the_space_that_open_mpi_5_puts_behind_a_mark_is_not_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = b"[1,0]<stdout>:   File x\n[1,1]<stdout>: \n[0]<stdout>: by Gloo\n"
    timed = b"[Sat Nov 21 20:05:27 2026][1,0]<stdout>: at once\n"
    for spaces in (True, False):
        monkeypatch.setattr(open_mpi, "spaces_marks", lambda spaces=spaces: spaces)
        indent = " " * (not spaces)
        assert OutputLines().feed(printed) == [(0, f"{indent}  File x"), (1, indent), (0, " by Gloo")]
        assert MarkedLines().feed(printed, now=0)[0] == f"[1,0]<stdout>:{indent}  File x".encode()
        assert OutputLines().feed(timed) == [(0, f"{indent}at once")]
