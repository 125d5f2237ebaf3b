"""The process between mpirun and streams whose readers may close them, tried on a process that is not mpirun."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("horovod.runner.common.util.mpirun_output") is None,
    reason="Horovod was built by another version of hvdtrain",
)

# Runs its arguments as horovodrun runs mpirun.
RUN = """
import os, signal, subprocess, sys
from horovod.runner.common.util import mpirun_output
printed = mpirun_output.Output()
print(printed.stdout is None, printed.stderr is None, printed.stdout == printed.stderr, file=open("streams", "w"))
process = subprocess.Popen(sys.argv[1:], stdout=printed.stdout, stderr=printed.stderr)
printed.start()
status = process.wait()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(status))
print("ended", file=open("ended", "w"))
printed.finish()
sys.exit(status)
"""
# Prints a line to both streams, 2000 times, and ends with status 3.
PRINT = "import os\nfor n in range(2000):\n os.write(1, b'o%04d\\n' % n); os.write(2, b'e%04d\\n' % n)\nos._exit(3)"


def shell(line: str, folder: Path) -> str:
    """Run a line of bash in which $RUN is what runs, and $PRINT what prints; return its output."""
    given = {"RUN": RUN, "PRINT": PRINT, "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=os.environ | given, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


JOB = '"$PYTHON" -c "$RUN" "$PYTHON" -c "$PRINT"'


def test_a_process_does_not_hear_that_its_reader_has_left(tmp_path: Path) -> None:
    shell(f"{{ {JOB} 2>err; echo $? >status; }} | true", tmp_path)
    assert (tmp_path / "status").read_text() == "3\n"
    assert (tmp_path / "err").read_text().splitlines() == [f"e{n:04}" for n in range(2000)]
    shell(f"{{ {JOB} 2>&1; echo $? >status; }} | true", tmp_path)
    assert (tmp_path / "status").read_text() == "3\n"


@pytest.mark.parametrize("blocks", [True, False])
def test_a_slow_reader_gets_every_line_in_order(blocks: bool, tmp_path: Path) -> None:
    unblock = "" if blocks else '"$PYTHON" -c "import os; os.set_blocking(1, False)"; '
    read = shell(f"{{ {unblock}{JOB} 2>&1; }} | (while [ ! -e ended ]; do sleep 0.1; done; cat)", tmp_path).split()
    assert (tmp_path / "streams").read_text() == "False False True\n"
    assert read == [f"{stream}{n:04}" for n in range(2000) for stream in "oe"]


def test_two_pipes_stay_two(tmp_path: Path) -> None:
    shell(f"{{ {JOB} 2>&3 | cat >out; }} 3>&1 | cat >err", tmp_path)
    assert (tmp_path / "streams").read_text() == "False False False\n"
    for stream in ("out", "err"):
        assert (tmp_path / stream).read_text().split() == [f"{stream[0]}{n:04}" for n in range(2000)]


@pytest.mark.parametrize("streams", [">out 2>err", ">&- 2>&-", ">/dev/null 2>/dev/null"])
def test_what_is_no_pipe_is_inherited(streams: str, tmp_path: Path) -> None:
    shell(f"{JOB} {streams} || true", tmp_path)
    assert (tmp_path / "streams").read_text() == "True True True\n"
    if "out" in streams:
        assert (tmp_path / "out").read_text().split() == [f"o{n:04}" for n in range(2000)]


def test_who_holds_the_pipe_for_longer_is_not_waited_for(tmp_path: Path) -> None:
    began = time.monotonic()
    read = shell('"$PYTHON" -c "$RUN" bash -c "sleep 50 & echo \\$! >left; echo said" 2>err | cat', tmp_path)
    os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
    assert read == "said\n"
    assert time.monotonic() - began < 40


def test_a_signal_ends_the_wait_for_a_reader_who_does_not_read(tmp_path: Path) -> None:
    more = PRINT.replace("2000", "16000")  # 100 KB: more than a pipe holds, and less than two of them do
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, sys.executable, "-c", more],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 30
        while not (tmp_path / "ended").exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert process.poll() is None
        process.terminate()
        assert process.wait(20) == 3
    finally:
        process.kill()
        process.communicate()
