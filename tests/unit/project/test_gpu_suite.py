"""tests/gpu on a machine without a GPU: a skip with its reason, and a failure where a skip is forbidden."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.tooling]

TESTS = Path(__file__).resolve().parent.parent.parent
PLAIN = "def test_plain(device): assert device == 'cpu'\n"
CUDA_ONLY = "import pytest\n@pytest.mark.cuda_only\ndef test_cuda(): pass\n"
ABSENT = "import pytest\n@pytest.mark.needs('no_such_package')\ndef test_absent(): pass\n"


def run(root: Path, text: str, switch: str = "") -> tuple[int, str]:
    """Run pytest on a copy of tests/gpu that holds one file of `text`, on a machine that shows no GPU."""
    folder = root / "tests" / "gpu"
    folder.mkdir(parents=True)
    shutil.copy(TESTS / "conftest.py", root / "tests")
    shutil.copy(TESTS / "gpu" / "conftest.py", folder)
    (root / "pytest.ini").write_text("[pytest]\naddopts = -ra --strict-markers --import-mode=importlib\n")
    (folder / "test_sample.py").write_text(text)
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    environment |= {"HVDTRAIN_TEST_GPU": switch, "HVDTRAIN_TEST_INSTALLED": "", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "tests/gpu"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=root, env=environment)
    return result.returncode, result.stdout + result.stderr


def test_without_the_switch_everything_skips_and_says_why(tmp_path: Path) -> None:
    status, output = run(tmp_path, PLAIN)
    assert status == 0, output
    assert "1 skipped" in output
    assert "needs a GPU: set HVDTRAIN_TEST_GPU=1 on a machine that has one" in output


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (PLAIN, "did not run although HVDTRAIN_TEST_GPU=1. Skipped: no GPU: torch sees no CUDA device"),
        (ABSENT, "no test of tests/gpu has passed although HVDTRAIN_TEST_GPU=1"),
        ("", "no tests ran"),
    ],
    ids=["a skip", "only what is not installed", "nothing"],
)
def test_with_the_switch_a_run_that_proves_nothing_fails(tmp_path: Path, text: str, why: str) -> None:
    status, output = run(tmp_path, text, "1")
    assert status != 0, output
    assert why in output


def test_on_the_cpu_what_needs_a_gpu_is_left_out_and_the_rest_runs(tmp_path: Path) -> None:
    status, output = run(tmp_path, PLAIN + CUDA_ONLY + ABSENT, "cpu")
    assert status == 0, output
    assert "1 passed, 2 skipped" in output
    assert "not installed: no_such_package" in output
