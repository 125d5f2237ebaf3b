"""`hvdtrain plan` as a person types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

VGG = ["--step", "416ms", "--gradients", "553MB", "--batch-size", "64"]
LINK = ["--link", "25Gb/s", "--ranks-per-host", "4", "--intra", "10GB/s"]
MEMORY = ["--memory", "--parameters", "1.3B", "--ranks", "8", "--activations", "8GB", "--batch-size", "32"]
GRID = [*VGG, *LINK, "--ranks", "8", "--stages", "4", "--boundary", "3MB"]


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "hvdtrain.cli", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_forecast_is_a_table_that_fits_a_page() -> None:
    result = plan(*VGG, *LINK, "--price", "1.5", "--spread", "2ms")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines[2:15]] == [str(2**power) for power in range(13)]
    assert "Adding ranks" in result.stdout


def test_what_bench_measured_is_read(tmp_path: Path) -> None:
    # The keys that hvdtrain bench writes, beside much else.
    values = {"step_s": 0.11, "gradient_bytes": 80e6, "samples_per_step": 64, "overhead_s": 2e-4, "ranks": 2}
    (tmp_path / "bench.json").write_text(json.dumps({"steps": [], "plan_input": values}))
    result = plan("--measured", str(tmp_path / "bench.json"), "--link", "10Gb/s", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["forecast"][0]["step_s"] == 0.11
    assert len(document["forecast"]) == 13


def test_bad_input_is_told_in_one_line_and_no_traceback() -> None:
    result = plan(*VGG, "--link", "-25Gb/s")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == "hvdtrain plan: --link: a data rate cannot be negative. Received: '-25Gb/s'\n"
    assert "Traceback" not in result.stderr


def test_a_forecast_of_memory_is_a_table_that_fits_a_page() -> None:
    result = plan(*MEMORY, "--limit", "13GB")
    assert (result.returncode, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert [line.split()[0] for line in result.stdout.splitlines()[2:4]] == ["none", "micro_batch=1"]
    assert 'micro_batch=4, shard="optimizer"' in " ".join(result.stdout.split())


def test_a_forecast_of_stages_is_a_table_that_fits_a_page() -> None:
    result = plan(*GRID, "--activations", "8GB", "--limit", "13GB")
    assert (result.returncode, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert result.stdout.startswith("on 8 ranks")


@pytest.mark.parametrize("arguments", [[*VGG, *LINK], MEMORY, GRID], ids=["speed", "memory", "grid"])
def test_no_framework_is_needed(arguments: list[str]) -> None:
    code = (
        "import sys; sys.argv = ['hvdtrain', 'plan', *sys.argv[1:]]\n"
        "from hvdtrain.cli import program as cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'tensorflow', 'keras', 'jax', 'horovod'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
