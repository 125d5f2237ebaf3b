"""doctor and its live allreduce on this machine, as installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from hvdtrain.horovod_build import probe

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="needs Horovod: install it with hvdtrain build"
)


@pytest.mark.long  # `hvdtrain build` proves itself by the same live allreduces: test_build.py
@pytest.mark.timeout(400)  # four live allreduces, each with its own limit of 90 s
def test_doctor_finds_that_training_works_here() -> None:
    command = [sys.executable, "-W", "error", "-m", "hvdtrain.cli", "doctor", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=390)
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads(result.stdout)
    assert document["ok"]
    assert document["allreduce"]
    assert all(row["allreduce_ms"] > 0 for row in document["allreduce"])


def test_probe_gives_up_at_its_limit_and_leaves_no_process() -> None:
    result = probe.allreduce("torch", "gloo", timeout_s=0.5)
    assert not result.ok
    assert "no answer within 0.5 s" in result.error
    assert result.start_s < 30


def test_probe_tells_the_ranks_own_error() -> None:
    result = probe.allreduce("no_such_framework", "gloo")
    assert not result.ok
    assert "no_such_framework" in result.error
