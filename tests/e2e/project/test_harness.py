"""The promises of tests/ranks/run.py, each proven by running it on tests that break them."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent.parent
HEADER = """
import os, sys, time
from pathlib import Path
import pytest
RANK = int(os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
two = pytest.mark.world_size(2)
"""
HOROVOD = """
import torch
import horovod.torch as hvd
hvd.init()
"""

pytestmark = [
    pytest.mark.tooling,
    pytest.mark.skipif(
        importlib.util.find_spec("horovod") is None, reason="needs Horovod: install it with hvdtrain build"
    ),
]


class Harness:
    """A copy of the harness with throw-away tests in place of the project's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "tests" / "ranks" / "torch"
        self.folder.mkdir(parents=True)
        shutil.copy(TESTS / "conftest.py", root / "tests")
        for name in ("conftest.py", "run.py", "launch.py", "worker.py"):
            shutil.copy(TESTS / "ranks" / name, root / "tests" / "ranks")
        (root / "pytest.ini").write_text("[pytest]\n")

    def write(self, text: str, *, horovod: bool = False) -> None:
        header = HEADER + (HOROVOD if horovod else "")
        (self.folder / "test_sample.py").write_text(header + textwrap.dedent(text))

    def run(
        self, *arguments: str, only: str = "torch", sizes: tuple[int, ...] = (2,), env: dict[str, str] | None = None
    ) -> tuple[int, str]:
        temporary = self.root / "tmp"
        temporary.mkdir(exist_ok=True)
        command = [sys.executable, "-X", "dev", str(self.root / "tests/ranks/run.py"), "--only", only]
        for size in sizes:
            command += ["--np", str(size)]
        result = subprocess.run(
            [*command, *arguments],
            capture_output=True,
            text=True,
            timeout=100,
            env={**os.environ, "TMPDIR": str(temporary), **(env or {})},
        )
        assert "ResourceWarning" not in result.stderr, result.stderr
        return result.returncode, result.stdout + result.stderr

    def processes(self) -> list[str]:
        """Return the command lines of processes that still run out of this copy."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(self.root) in line:
                found.append(line)
        return found


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def last_line(output: str) -> str:
    return output.rstrip().splitlines()[-1]


def test_the_core_is_of_files_that_exist_and_a_missing_one_is_a_failure(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(TESTS / "ranks"))
    core = runpy.run_path(str(TESTS / "ranks" / "run.py"))["CORE"]
    files = [TESTS / "ranks" / folder / name for folder, names in core.items() for name in names]
    assert [file for file in files if not file.is_file()] == []

    status, output = harness.run("--core")
    assert status == 1
    assert f"FAILED torch np=2: there is no {harness.folder / core['torch'][0]}" in output


def test_green_run_ends_with_its_counts_and_leaves_nothing_behind(harness: Harness) -> None:
    harness.write(
        """
        @two
        def test_sums(): assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2

        @pytest.mark.world_size(2, 3)
        def test_shared(shared_tmp_path):
            (shared_tmp_path / str(RANK)).write_text("x")
            hvd.allreduce(torch.ones(1))
            assert sorted(path.name for path in shared_tmp_path.iterdir()) == [str(rank) for rank in range(hvd.size())]
        """,
        horovod=True,
    )
    status, output = harness.run(sizes=(2, 3))
    assert status == 0, output
    assert re.search(r"^torch np=2: 2 passed in \d+ s$", output, re.M), output
    assert re.search(r"^torch np=3: 1 passed in \d+ s$", output, re.M), output
    assert last_line(output) == "3 passed, 0 failed"
    assert list((harness.root / "tmp").glob("hvdtrain-ranks-*")) == []
    assert harness.processes() == []


def test_failing_rank_is_named_with_its_traceback_once_and_the_rest_still_runs(harness: Harness) -> None:
    harness.write(
        """
        @two
        def test_a_passes(): hvd.allreduce(torch.ones(1))

        @two
        def test_b_fails_on_rank_1():
            if RANK == 1:
                raise ValueError("only here")
            hvd.allreduce(torch.ones(1))

        @two
        def test_c_passes(): hvd.allreduce(torch.ones(1))
        """,
        horovod=True,
    )
    started = time.monotonic()
    status, output = harness.run()
    assert status == 1, output
    assert time.monotonic() - started < 60, "the rank in the collective was left hanging"
    assert output.count("raise ValueError") == 1, output
    assert re.search(r"FAILED torch np=2: \S+::test_b_fails_on_rank_1 \(rank 1\)", output), output
    assert "(rank 0 was in" in output
    assert "::test_b_fails_on_rank_1)" in output
    assert last_line(output) == "2 passed, 1 failed"
    assert harness.processes() == []


def test_same_failure_on_every_rank_is_printed_once(harness: Harness) -> None:
    harness.write("@two\ndef test_fails(): assert 1 == 2\n")
    status, output = harness.run()
    assert status == 1
    assert output.count("assert 1 == 2") == 2, output  # its source line, and pytest's "E" line
    assert "(rank 0, 1)" in output
    assert last_line(output) == "0 passed, 1 failed"


def test_teardown_failure_is_a_failure(harness: Harness) -> None:
    harness.write(
        """
        @pytest.fixture
        def bad():
            yield
            raise OSError("in teardown")

        @two
        def test_fine(bad): pass
        """
    )
    status, output = harness.run()
    assert status == 1, output
    assert "in teardown" in output, output
    assert last_line(output) == "0 passed, 1 failed"


def test_hang_ends_at_the_limit_with_the_stacks_of_every_rank(harness: Harness) -> None:
    harness.write(
        """
        def wait_for_ever(): hvd.allreduce(torch.ones(1))

        @two
        def test_hangs():
            if RANK == 0:
                wait_for_ever()
            else:
                time.sleep(1000)

        @two
        def test_next(): hvd.allreduce(torch.ones(1))
        """,
        horovod=True,
    )
    status, output = harness.run("--test-limit", "3")
    assert status == 1, output
    assert re.search(r"was still in \S+::test_hangs after 3 s", output), output
    assert "in wait_for_ever" in output
    assert "rank 1: stacks" in output
    assert last_line(output) == "1 passed, 1 failed"
    assert harness.processes() == []


def test_a_tests_own_limit_replaces_the_default(harness: Harness) -> None:
    harness.write("@two\n@pytest.mark.timeout(2)\ndef test_slow(): time.sleep(1000)\n")
    status, output = harness.run()
    assert status == 1, output
    assert "after 2 s" in output, output


def test_group_limit_ends_ranks_that_make_progress_for_too_long(harness: Harness) -> None:
    harness.write("@two\n@pytest.mark.parametrize('i', range(1000))\ndef test_slow(i): time.sleep(1)\n")
    status, output = harness.run("--group-limit", "8")
    assert status == 1, output
    assert "the group was not through after 8 s" in output, output
    assert harness.processes() == []


def test_hang_at_import_ends_at_the_start_limit(harness: Harness) -> None:
    harness.write("if RANK == 1: time.sleep(1000)\n@two\ndef test_fine(): pass\n")
    status, output = harness.run("--start-limit", "15")
    assert status == 1, output
    assert "rank 1 had not collected its tests after 15 s" in output, output
    assert "test_sample.py" in output, "the stack does not show where"


def test_killed_rank_fails_the_run_and_is_shown(harness: Harness) -> None:
    harness.write(
        """
        @two
        def test_dies():
            if RANK == 1:
                print("about to go", flush=True)
                os.kill(os.getpid(), 9)
            time.sleep(20)
        """
    )
    status, output = harness.run("--", "-s")
    assert status == 1, output
    assert "rank 1 ended without a report" in output, output
    assert "about to go" in output, output
    assert last_line(output) == "0 passed, 1 failed"


@pytest.mark.parametrize(
    "text",
    ["@pytest.mark.world_size(3)\ndef test_other_size(): pass\n", "@two\ndef test_s(): pytest.skip('no reason')\n"],
    ids=["all deselected", "all skipped"],
)
def test_zero_tests_run_is_a_failure(harness: Harness, text: str) -> None:
    harness.write(text)
    status, output = harness.run()
    assert status == 1, output
    assert "torch np=2: no test ran" in output, output
    assert last_line(output) == "0 passed, 1 failed"


def test_missing_folder_is_a_failure(harness: Harness) -> None:
    status, output = harness.run(only="trainer-torch")
    assert status == 1
    assert "there is no" in output
    assert last_line(output) == "0 passed, 1 failed"


def test_different_tests_on_ranks_fail_before_any_runs(harness: Harness) -> None:
    harness.write("@two\n@pytest.mark.parametrize('i', range(1 + RANK))\ndef test_i(i): pass\n")
    status, output = harness.run()
    assert status == 1, output
    assert "would run different tests" in output, output
    assert "test_i[1]" in output, output
    assert last_line(output) == "0 passed, 1 failed"


def test_skip_on_one_rank_only_is_a_failure(harness: Harness) -> None:
    harness.write("@two\ndef test_s():\n    if RANK: pytest.skip('here')\n@two\ndef test_t(): pass\n")
    status, output = harness.run()
    assert status == 1, output
    assert "was skipped on ranks [1] of 2 only" in output, output


def test_unmarked_test_is_an_error(harness: Harness) -> None:
    harness.write("def test_unmarked(): pass\n@two\ndef test_marked(): pass\n")
    status, output = harness.run()
    assert status == 1, output
    assert "test_unmarked does not say at which world sizes it runs" in output, output


def test_import_error_on_one_rank_is_shown_once(harness: Harness) -> None:
    harness.write("if RANK == 1: import no_such_module\n@two\ndef test_fine(): pass\n")
    status, output = harness.run()
    assert status == 1, output
    assert output.count("No module named 'no_such_module'") == 1, output


def test_gpu_mark_skips_without_the_switch_and_fails_on_a_skip_with_it(harness: Harness) -> None:
    harness.write("@two\n@pytest.mark.gpu\ndef test_gpu(): pytest.skip('none here')\n@two\ndef test_cpu(): pass\n")
    status, output = harness.run()
    assert status == 0, output
    assert "HVDTRAIN_TEST_GPU=1" in output, output
    status, output = harness.run(env={"HVDTRAIN_TEST_GPU": "1"})
    assert status == 1, output
    assert "did not run although HVDTRAIN_TEST_GPU=1" in output, output
    assert "none here" in output, output


def test_arguments_after_two_dashes_reach_pytest(harness: Harness) -> None:
    harness.write("@two\ndef test_yes(): pass\n@two\ndef test_no(): assert False\n")
    status, output = harness.run("--", "-k", "yes")
    assert status == 0, output
    assert last_line(output) == "1 passed, 0 failed", output


def test_one_process_leaves_the_rank_tests_out(harness: Harness) -> None:
    harness.write("@two\ndef test_fine(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(harness.root / "tests")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=harness.root, env=environment)
    assert result.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, result.stdout
