"""A rank's lines arrive in one piece, also with PYTHONUNBUFFERED=1."""

from __future__ import annotations

import io
import sys

import pytest

from hvdtrain.system import whole_lines


class Pipe(io.RawIOBase):
    """The data that a launcher reads, write by write."""

    def __init__(self):
        self.pieces = []

    def writable(self):
        return True

    def write(self, data):
        self.pieces.append(bytes(data))
        return len(data)


@pytest.mark.parametrize(("launched", "pieces"), [(True, [b"loss 0.5\n"]), (False, [b"loss", b" ", b"0.5", b"\n"])])
def test_a_rank_prints_whole_lines_and_a_process_alone_as_it_did(monkeypatch, launched, pieces):
    pipe = Pipe()
    for name in whole_lines.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if launched:
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(pipe, write_through=True))
    whole_lines.begin()
    print("loss", 0.5)
    assert pipe.pieces == pieces


def test_a_stream_that_is_none_or_another_is_left_alone(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    whole_lines.begin()
