"""`hvdtrain.run` on real ranks. The functions are defined in the tests: they travel by value, as a notebook's do."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest

import hvdtrain
from hvdtrain.distributed import tuning
from hvdtrain.errors import RankFailedError
from hvdtrain.launch import job_folder

MARK = "HVDTRAIN_TEST_MARK"


class Cell(io.StringIO):
    """A notebook's standard output: no file descriptor. Calls `on_line` for each line as it comes."""

    def __init__(self, on_line: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self._on_line = on_line

    def write(self, text: str) -> int:
        written = super().write(text)
        if self._on_line is not None:
            self._on_line(text)
        return written

    def lines(self) -> list[str]:
        return self.getvalue().splitlines()

    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")


def family(mark: str) -> list[psutil.Process]:
    """Return the living processes that were started with `mark`."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Mark all that is started; nothing of it, no folder and no child of this process may be left."""
    monkeypatch.setenv(MARK, str(tmp_path))
    make, made, before = job_folder.make, [], psutil.Process().children()

    def make_folder(ranks: int) -> tuple[Path, str]:
        folder, said = make(ranks)
        made.append(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
        return folder, said

    monkeypatch.setattr(job_folder, "make", make_folder)
    yield
    assert [process.cmdline() for process in family(str(tmp_path))] == []
    assert [child for child in psutil.Process().children() if child not in before] == []
    assert [folder for folder in made if folder.exists()] == []


def _make_rank() -> Callable[[], int]:
    # Not a function of this file's own: ranks cannot import it.
    return lambda: int(os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])


rank = _make_rank()


@pytest.mark.parametrize(("options", "thread"), [((), False), (("--gloo",), True)])
def test_a_cell_sees_each_rank_live_and_gets_what_it_returns_in_order(
    options: Any, thread: bool, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"

    def fn(base: int, *, factor: int) -> int:
        print("ready", base)
        print("and this", file=sys.stderr)
        until = time.monotonic() + 60
        while not seen.exists():  # until the caller has shown the line
            assert time.monotonic() < until
            time.sleep(0.01)
        return base + factor * rank()

    def on_line(line: str) -> None:
        if "ready" in line:
            seen.touch()

    async def cell() -> list[int]:  # in a notebook an event loop runs already
        run = functools.partial(hvdtrain.run, fn, (10,), {"factor": 3}, np=2, options=options)
        return await asyncio.to_thread(run) if thread else run()

    shown = Cell(on_line)
    with contextlib.redirect_stdout(shown):
        assert asyncio.run(cell()) == [10, 13]
    assert sorted(shown.lines()) == ["[0] and this", "[0] ready 10", "[1] and this", "[1] ready 10"]


def test_results_of_a_hundred_megabytes_come_back_whole_and_rank_0_can_be_shown_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fn(given: Any) -> Any:
        print(f"rank {rank()}")
        return {"weights": given + rank(), "history": [rank()]}

    monkeypatch.setattr(tuning, "usable_cores", lambda: 1)
    given = numpy.random.default_rng(0).random(100_000_000 // 8)
    shown = Cell()
    with contextlib.redirect_stdout(shown):
        results = hvdtrain.run(fn, (given,), np=2, output="root")
    for number, result in enumerate(results):
        assert numpy.array_equal(result["weights"], given + number)
        assert result["history"] == [number]
    assert shown.lines() == ["hvdtrain.run: 2 ranks share 1 core", "rank 0"]


def test_the_first_ranks_exception_is_raised_as_it_is_with_its_traceback_once() -> None:
    class OddError(Exception):
        def __init__(self, reason: str, number: int) -> None:
            super().__init__(reason, number)
            self.number = number

    def fn() -> None:
        if rank() == 1:
            raise OddError("no luck", 7)
        time.sleep(1000)

    shown = Cell()
    with contextlib.redirect_stdout(shown), pytest.raises(OddError, match="no luck") as info:
        hvdtrain.run(fn, np=2)
    assert info.value.number == 7
    where = info.value.__cause__
    assert isinstance(where, RankFailedError)
    assert where.rank == 1
    first, second, *frames, last = str(where).splitlines()
    assert first.startswith("rank 1 on host ")
    assert second == "Traceback (most recent call last):"
    assert 'raise OddError("no luck", 7)' in "\n".join(frames)
    assert "hvdtrain/launch" not in "\n".join(frames)
    assert last.endswith("OddError: ('no luck', 7)")
    assert "OddError" not in shown.getvalue()


def test_an_exception_that_cannot_be_made_again_is_told_in_words() -> None:
    class PickyError(Exception):
        def __init__(self, *, why: str) -> None:  # unpickling calls it with positional arguments
            super().__init__(why)

    def fn() -> None:
        raise PickyError(why="picky")

    with contextlib.redirect_stdout(Cell()), pytest.raises(RankFailedError, match="PickyError: picky") as info:
        hvdtrain.run(fn, np=1)
    assert info.value.rank == 0


def test_a_function_of_a_module_that_ranks_cannot_import_is_refused_in_those_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("only_here")
    exec("def fn(): ...", module.__dict__)  # noqa: S102
    monkeypatch.setitem(sys.modules, "only_here", module)
    with contextlib.redirect_stdout(Cell()), pytest.raises(ModuleNotFoundError, match="only_here") as info:
        hvdtrain.run(module.fn, np=1)
    assert " could not load the function:\n" in str(info.value.__cause__)


def test_a_result_that_cannot_be_sent_back_is_named() -> None:
    def fn() -> Any:
        import threading

        return {"model": 1, "locks": [threading.Lock()]}

    with contextlib.redirect_stdout(Cell()), pytest.raises(TypeError) as info:
        hvdtrain.run(fn, np=1)
    assert str(info.value).startswith("what it returned['locks'][0], a _thread.lock, cannot be sent back")
    assert str(info.value.__cause__).startswith("rank 0 on host ")


@pytest.mark.parametrize("options", [(), ("--gloo",)])
def test_a_killed_rank_is_named_with_its_signal(options: Any) -> None:
    def fn() -> None:
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)

    with (
        contextlib.redirect_stdout(Cell()),
        pytest.raises(RankFailedError, match=r"rank 1 .* killed by signal 9") as info,
    ):
        hvdtrain.run(fn, np=2, options=options)
    assert info.value.rank == 1
    assert str(info.value).endswith("before the function had returned")


@pytest.mark.parametrize(("code", "said"), [(0, "rank 1 ended by itself, with status 0"), (3, "ended with status 3")])
def test_a_rank_that_leaves_without_a_result_is_named_with_its_last_words(code: int, said: str) -> None:
    def fn() -> None:
        if rank() == 1:
            print("last words")
            sys.exit(code)

    with contextlib.redirect_stdout(Cell()), pytest.raises(RankFailedError, match=said) as info:
        hvdtrain.run(fn, np=2, output="root")
    assert info.value.rank == 1
    assert str(info.value).endswith("before the function had returned; the end of what it printed:\nlast words")


def test_an_interrupt_ends_all_and_is_raised_again_and_a_second_one_waits_for_nobody(tmp_path: Path) -> None:
    def fn() -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # deaf to requests
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print("deaf")
        while True:
            time.sleep(1)

    def on_line(line: str) -> None:
        # Both ranks run by then: one that still starts would be refused, and say so last of all.
        both = "deaf" in line and shown.getvalue().count("deaf") == 2
        if both or "asking the ranks to stop" in line:
            os.kill(os.getpid(), signal.SIGINT)

    mine = subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True)
    try:
        shown = Cell(on_line)
        with contextlib.redirect_stdout(shown), pytest.raises(KeyboardInterrupt):
            hvdtrain.run(fn, np=2)
        assert shown.lines()[-1] == "hvdtrain run: second Ctrl-C: ending everything at once"
        assert mine.poll() is None  # another child of the caller's
        assert family(str(tmp_path)) == []
    finally:
        mine.kill()
        mine.wait()


SCRIPT = """
import sys, time
import hvdtrain

def fn():
    print("here")
    time.sleep(1000)

if __name__ == "__main__":
    hvdtrain.run(fn, np=2)
"""


def test_a_caller_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() in (b"[0] here\n", b"[1] here\n")
        started = family(str(tmp_path))
        assert len(started) >= 5  # it, the process between, horovodrun, two ranks
        folder = next(p.environ()["HVDTRAIN_RUN_DIR"] for p in started if "HVDTRAIN_RUN_DIR" in p.environ())
        process.kill()
        process.wait()
    until = time.monotonic() + 15
    while family(str(tmp_path)) or Path(folder).exists():
        assert time.monotonic() < until
        time.sleep(0.05)


FIPS = """
import hashlib, hmac

def without_md5(make, place):
    def checked(*args, usedforsecurity=True, **kwargs):
        if usedforsecurity and (place is None or args[place:place + 1] in (("md5",), (hashlib.md5,))):
            raise ValueError("[digital envelope routines] unsupported")
        return make(*args, **kwargs)
    return checked

hmac.new = without_md5(hmac.new, 2)
hashlib.new = without_md5(hashlib.new, 0)
hashlib.md5 = without_md5(hashlib.md5, None)
"""


def test_a_machine_that_refuses_md5_runs_functions(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FIPS)
    script = tmp_path / "train.py"
    script.write_text("import hvdtrain\nif __name__ == '__main__':\n    print(hvdtrain.run(divmod, (7, 2), np=2))\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.returncode) == ("[(3, 1), (3, 1)]\n", 0), done.stderr
    # What ranks on several hosts are told apart by.
    name = [sys.executable, "-c", "from horovod.runner.common.util.host_hash import host_hash; print(host_hash())"]
    done = subprocess.run(name, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(os.uname().nodename.split(".")[0]), done.stderr
