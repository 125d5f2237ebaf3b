"""kill -9 of a rank while it trains: what `hvdtrain run` starts again ends as a run that nobody touched."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("training.py")
STEPS = 3 * 16  # of the script
LIMIT_S = 150


def command(folder, framework, *words, ranks=2, restarts=0, step_s=0.0):
    base = [sys.executable, "-m", "hvdtrain.cli", "run", "-np", str(ranks), "--max-restarts", str(restarts)]
    return [*base, sys.executable, str(SCRIPT), framework, str(folder), str(step_s), *words]


def environment(backend=None):
    given = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"} | ({"KERAS_BACKEND": backend} if backend else {})
    return os.environ | given


def run(folder, framework, *words, backend=None, **options):
    folder.mkdir(exist_ok=True)
    start = command(folder, framework, *words, **options)
    done = subprocess.run(start, env=environment(backend), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads((folder / "end.json").read_text())


@contextlib.contextmanager
def started(folder, framework, *words, hold="hold", backend=None, **options):
    """Start a run in a new folder, held up where the script looks for the file `hold`; end it at the latest after."""
    folder.mkdir()
    (folder / hold).touch()
    process = subprocess.Popen(
        command(folder, framework, *words, **options),
        env=environment(backend),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()


def steps_of(folder, rank):
    with contextlib.suppress(OSError, ValueError):
        return int((folder / f"step-{rank}").read_text())
    return 0


def wait_for(condition, process, *, limit_s, what):
    limit = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, process.stdout.read()[-4000:]
        assert time.monotonic() < limit, what
        time.sleep(0.002)


def kill_at(folder, rank, step, process):
    """Kill a rank once it has come to a step; return the moment and all ranks' processes."""
    wait_for(
        lambda: steps_of(folder, rank) >= step, process, limit_s=LIMIT_S, what=f"rank {rank} never came to step {step}"
    )
    pids = pids_of(folder)
    os.kill(pids[rank], signal.SIGKILL)
    return time.monotonic(), pids


def pids_of(folder):
    return [int(path.read_text() or 0) for path in sorted(folder.glob("pid-*"))]


def seconds_until_training(folder, killed, process):
    """Return how long after a kill every rank, another process now, has taken a step."""
    since, before = killed

    def training():
        pids, steps = ([path.stat().st_mtime_ns for path in sorted(folder.glob(f"{n}-*"))] for n in ("pid", "step"))
        anew = all(old != new for old, new in zip(before, pids_of(folder), strict=True))
        return anew and all(step > begun for step, begun in zip(steps, pids, strict=True))

    wait_for(training, process, limit_s=60, what="not training again a minute after a kill")
    return time.monotonic() - since


def moments(rng, kills):
    """Return steps to kill at, far enough apart for each start to come further than the one before."""
    gap = 4
    return np.sort(rng.choice(np.arange(3, STEPS - gap * kills), kills, replace=False)) + gap * np.arange(kills)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("framework", "backend", "times"),
    [
        ("torch", None, 2),
        # What Keras resumes from, tests/ranks/training/test_resume.py proves on each backend; a kill is the same.
        pytest.param("keras", "tensorflow", 1, marks=pytest.mark.long),
        pytest.param("keras", "torch", 1, marks=pytest.mark.long),
    ],
)
def test_a_run_that_is_killed_ends_bit_for_bit_as_one_that_is_not(framework, backend, times, tmp_path, rng, row, scale):
    straight = run(tmp_path / "straight", framework, backend=backend)
    again = []
    for number in range(1 if scale == 1 else 4):
        folder = tmp_path / f"killed-{number}"
        with started(folder, framework, backend=backend, restarts=times, step_s=0.03) as process:
            for step in moments(rng, times).tolist():
                step = max(step, steps_of(folder, 0) + 2)  # of the start before: this one is to come further
                if step > STEPS - 3:
                    break
                killed = kill_at(folder, int(rng.integers(2)), step, process)
                again.append(seconds_until_training(folder, killed, process))
            (folder / "hold").unlink()
            output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, output[-4000:]
        end = json.loads((folder / "end.json").read_text())
        assert end["sha256"] == straight["sha256"]
        assert end["history"] == straight["history"]
    name = framework if backend is None else f"Keras on {backend}"
    row(f"kill -9 of a rank, {name}", len(again), f"same bits; training again after at most {max(again):.1f} s")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "word",
    ["LocalSGD", *[pytest.param(each, marks=pytest.mark.long) for each in ("DiLoCo", "Delayed", "unequal")]],
)
def test_a_run_with_a_strategy_that_is_killed_ends_bit_for_bit_as_one_that_is_not(word, tmp_path, row):
    """Steps since the last synchronization are lost with those since the last checkpoint, and taken again."""
    straight = run(tmp_path / "straight", "torch", word)
    folder = tmp_path / "killed"
    with started(folder, "torch", word, restarts=1, step_s=0.03) as process:
        took_s = seconds_until_training(folder, kill_at(folder, 1, 18, process), process)
        (folder / "hold").unlink()
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output[-4000:]
    end = json.loads((folder / "end.json").read_text())
    assert end["sha256"] == straight["sha256"]
    assert end["history"] == straight["history"]
    row(f"kill -9 of a rank, {word}", 1, f"same bits; training again after {took_s:.1f} s")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_record_of_a_killed_run_with_a_cutoff_repeats_it_bit_for_bit(tmp_path, row):
    """Cut-off samples depend on time. So a run that nobody kills takes the steps that the killed one recorded."""
    folder, again = tmp_path / "killed", tmp_path / "again"
    with started(folder, "torch", "cutoff", restarts=1, step_s=0.03) as process:
        took_s = seconds_until_training(folder, kill_at(folder, 1, 18, process), process)
        (folder / "hold").unlink()
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output[-4000:]
    end = json.loads((folder / "end.json").read_text())
    again.mkdir()
    (again / "record.json").write_text(json.dumps(end["cutoffs"]))
    straight = run(again, "torch", "cutoff")
    for what in ("cutoffs", "sha256", "history"):
        assert end[what] == straight[what]
    cut = len(end["cutoffs"])
    assert cut
    row(f"kill -9 of a rank, cutoff ({cut} steps cut)", 1, f"same bits as its record; training after {took_s:.1f} s")


# tests/ranks/training/test_budgets.py proves it with an exception for the kill.
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_during_validation_within_an_epoch_ends_bit_for_bit_as_none(rank, tmp_path, row):
    straight = run(tmp_path / "straight", "torch", "validating")
    folder = tmp_path / "killed"
    with started(folder, "torch", "validating", hold="hold-validation", restarts=1) as process:
        validating = folder / f"validating-{rank}"
        wait_for(validating.exists, process, limit_s=LIMIT_S, what=f"rank {rank} never came to the validation")
        os.kill(pids_of(folder)[rank], signal.SIGKILL)
        (folder / "hold-validation").unlink()
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output[-4000:]
    assert "restart 1 of 1" in output
    assert [each["global_step"] for each in straight["validations"]] == list(range(5, STEPS, 5))
    end = json.loads((folder / "end.json").read_text())
    for what in ("sha256", "history", "validations"):
        assert end[what] == straight[what]
    row(f"kill -9 of rank {rank} during a validation within an epoch", 1, "same bits")


@pytest.mark.timeout(300)
def test_a_run_goes_on_on_fewer_ranks_with_the_same_global_batch(tmp_path, rng, row):
    straight = run(tmp_path / "straight", "torch", "fixed")
    folder = tmp_path / "killed"
    with started(folder, "torch", "fixed", step_s=0.03) as process:
        kill_at(folder, 1, int(rng.integers(18, 30)), process)
        process.communicate(timeout=LIMIT_S)
    (folder / "hold").unlink()
    assert process.returncode != 0
    end = run(folder, "torch", "fixed", ranks=1)
    for name, weights in straight["weights"].items():
        np.testing.assert_allclose(end["weights"][name], weights, atol=1e-5, err_msg=name)
    for name, values in straight["history"].items():
        np.testing.assert_allclose(end["history"][name], values, atol=1e-5, err_msg=name)
    row("kill -9, then one rank instead of two", 1, "equal to rounding")
