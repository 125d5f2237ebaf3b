"""The benchmark's command as a person types it: that it runs, and that its peers train the same; never how fast."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.tooling,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        importlib.util.find_spec("horovod") is None, reason="needs Horovod: install it with hvdtrain build"
    ),
]


def benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m benchmarks` in the repository's root."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_quick_run_writes_what_it_measured_of_peers_that_train_the_same(tmp_path: Path) -> None:
    finished = benchmarks("--quick", "--out", str(tmp_path))
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    result = json.loads((tmp_path / "lenet.json").read_text())
    assert (result["kind"], result["workload"], result["ranks"]) == ("steps", "lenet", 2)
    assert result["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert result["versions"]["torch"]
    assert set(result["peers"]) == {"ddp", "trainer"}
    for peer in result["peers"].values():
        assert peer["status"] == "ok"
        assert len(peer["block_ms"]) == 2
        assert peer["step_ms"] > 0
        assert peer["samples_per_s"] > 0
        assert peer["peak_mib"] > 50
        # Ranks are bitwise equal, and equal one process over both ranks' batches.
        assert peer["check"]["ranks_equal"] is True
        assert peer["check"]["update_error"] < 1e-3
    assert set(result["ratios"]) == {"ddp/ddp", "trainer/ddp"}
    assert set(result["ratios"]["trainer/ddp"]) == {"median", "low", "high"}
    losses = [peer["check"]["loss"] for peer in result["peers"].values()]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert "lenet: trainer / DDP, step time" in finished.stdout
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "steps.png").stat().st_size > 1000


def test_a_peer_that_ends_is_reported_with_its_last_words_and_the_others_go_on(tmp_path: Path) -> None:
    script = (
        "import sys; from dataclasses import replace; from benchmarks import catalog, steps; "
        "from benchmarks.workloads import WORKLOADS; "
        "single = catalog.TORCH[0]; broken = replace(single, name='broken', script='none'); "
        "plan = steps.Plan(rounds=1, launches=1, seconds=0.05); "
        "peers = steps.measure(WORKLOADS['lenet'], [broken, single], plan, say=print)['peers']; "
        "print(peers['broken']['status'], peers['single']['status'])"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "No module named benchmarks.peers.torch_none" in finished.stdout
    assert finished.stdout.splitlines()[-1] == "failed ok"


def test_an_unknown_workload_is_one_line() -> None:
    finished = benchmarks("--workload", "resnet18")
    assert finished.returncode == 1
    assert finished.stderr.startswith("benchmarks: no workload is called 'resnet18'. There are: lenet, mlp")
    assert finished.stderr.count("\n") == 1


def processes_with(mark: str) -> list[int]:
    """Return the processes whose environment holds BENCH_MARK=mark."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it may have ended, or be another user's
            if entry.name.isdigit() and f"BENCH_MARK={mark}\0".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def test_an_interrupted_run_leaves_no_process_behind_stopped_ones_included(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "--section",
        "steps",
        "--workload",
        "lenet",
        "--peer",
        "alone,trainer",
    ]
    runner = subprocess.Popen(
        [*command, "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "BENCH_MARK": mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        limit = time.monotonic() + 120
        while len(processes_with(mark)) < 6 and time.monotonic() < limit:  # itself, two copies, launcher, two ranks
            time.sleep(0.2)
        assert len(processes_with(mark)) >= 6
        runner.terminate()
        assert runner.wait(40) == 128 + signal.SIGTERM
        limit = time.monotonic() + 10  # what was killed takes a moment to go
        while processes_with(mark) and time.monotonic() < limit:
            time.sleep(0.1)
        assert processes_with(mark) == []
    finally:
        runner.kill()


@pytest.mark.long  # tests/unit/benchmarks takes a step of each of its models
def test_the_gpu_set_runs_in_small_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_GPU_TRIAL", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    few = ("--workload", "gpu-transformer", "--rounds", "1", "--launches", "1", "--seconds", "0.05")
    finished = benchmarks("--gpu", *few, "--out", str(tmp_path))
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    result = json.loads((tmp_path / "gpu-transformer.json").read_text())
    assert "a trial" in result["title"]
    assert result["machine"]["gpus"] == []
    assert {name: peer["status"] for name, peer in result["peers"].items()} == dict.fromkeys(
        ("single", "ddp", "hvdtrain", "trainer", "hvdtrain-async", "trainer-async"), "ok"
    )
    assert "one rank on a GPU" not in finished.stdout  # what no GPU has run meets no target
