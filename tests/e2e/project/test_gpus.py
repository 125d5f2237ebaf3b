"""All of `make gpus` but the build, on CPUs: the first hour on a machine with GPUs must not end at a typo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.tooling, pytest.mark.timeout(900)]


def test_all_steps_run_on_cpus_and_their_results_are_in_one_file(tmp_path: Path) -> None:
    out = tmp_path / "gpus.json"
    command = [sys.executable, "scripts/gpus.py", "--out", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "HVDTRAIN_TEST_GPU": "cpu"}, capture_output=True, text=True, timeout=850
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["device"] == "cpu"
    steps = found["steps"]
    assert {step: each["ok"] for step, each in steps.items()} == {"prove": True, "ranks": True, "compare": True}
    assert steps["prove"]["proof"]["device"] == "cpu"
    assert " passed, 0 failed" in steps["ranks"]["np=2"]
    for name in ("gpus-gpt-compiled-bf16-2", "gpus-resnet50-fp32-2"):
        for peer in ("hvdtrain", "hvdtrain-async"):
            assert steps["compare"][name][peer]["step / DDP"]["median"] > 0
