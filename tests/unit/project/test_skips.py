"""Under HVDTRAIN_TEST_INSTALLED=1 a skip for want of a package is a failure, of a test and of a whole file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
LACKING = """
import pytest

@pytest.mark.skipif(True, reason="no sshd: apt-get install openssh-server")
def test_hosts(): pass

@pytest.mark.skipif(True, reason="needs root")
def test_root(): pass

def test_runs(): pass
"""
ABSENT = 'import pytest\npytest.importorskip("no_such_package")\n\ndef test_it(): pass\n'


def outcome(folder: Path, text: str, installed: str) -> tuple[int, str]:
    shutil.copy(TESTS / "conftest.py", folder)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_sample.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", str(folder)]
    environment = os.environ | {"HVDTRAIN_TEST_INSTALLED": installed, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


def test_elsewhere_a_skip_is_a_skip(tmp_path: Path) -> None:
    status, output = outcome(tmp_path, LACKING, "")
    assert status == 0, output
    assert "1 passed, 2 skipped" in output


def test_where_all_is_installed_a_test_that_lacks_a_package_fails(tmp_path: Path) -> None:
    status, output = outcome(tmp_path, LACKING, "1")
    assert status == pytest.ExitCode.TESTS_FAILED, output
    assert "test_hosts did not run although HVDTRAIN_TEST_INSTALLED=1. Skipped: no sshd" in output
    assert "1 passed, 1 skipped, 1 error" in output


def test_where_all_is_installed_a_file_that_lacks_a_package_fails(tmp_path: Path) -> None:
    status, output = outcome(tmp_path, ABSENT, "1")
    assert status == pytest.ExitCode.INTERRUPTED, output
    assert "test_sample.py did not run although HVDTRAIN_TEST_INSTALLED=1" in output
