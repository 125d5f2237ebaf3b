"""Memory runs out for real, by limits of the process and of its cgroup: one is told what took it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(200),
    pytest.mark.skipif(
        importlib.util.find_spec("horovod") is None, reason="needs Horovod: install it with hvdtrain build"
    ),
]

# A first fit takes what a framework takes once. The second one's batch needs 1 GB, beside 300 MB that are left.
LIMITED = """
import resource
import numpy as np
import hvdtrain

world = hvdtrain.init()
{model}
x = np.ones((65536 * world.size, 64), np.float32)
first = x[: 8 * world.size]
trainer.fit((first, first), batch_size=8, progress=False, run_dir=None)
if world.rank == world.size - 1:
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 300_000_000,) * 2)
trainer.fit((x, x), batch_size=65536, progress=False, run_dir=None)
"""
TORCH = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 64))
trainer = hvdtrain.Trainer(model, optimizer=torch.optim.Adam(model.parameters()), loss=torch.nn.MSELoss())
"""
KERAS = """
import keras
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(4096, "relu"), keras.layers.Dense(64)])
trainer = hvdtrain.Trainer(model, optimizer="adam", loss="mse")
"""


def run(folder: Path, model: str, *launcher: str, **environment: str) -> tuple[int, str]:
    (folder / "train.py").write_text(LIMITED.format(model=model))
    result = subprocess.run(
        [*launcher, sys.executable, "train.py"],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=150, check=False,
    )  # fmt: skip
    return result.returncode, result.stdout


def test_the_rank_whose_memory_ran_out_says_so_under_hvdtrain_run(tmp_path: Path) -> None:
    hvdtrain = str(Path(sys.executable).parent / "hvdtrain")
    status, output = run(tmp_path, TORCH, hvdtrain, "run", "-np", "2", "--max-restarts", "0")
    assert status == 1, output
    assert re.search(r"allocate memory: you tried to allocate \d+ bytes", output), output
    note = r"hvdtrain: memory of rank 1: activations [\d.]+ [GM]B, optimizer state 4.23 MB, .*"
    assert re.search(note + 'The largest is activations: micro_batch="auto" computes a batch in parts', output), output
    assert "memory of rank 0: " not in output


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.long)])
def test_a_keras_model_says_so_too(tmp_path: Path, backend: str) -> None:
    status, output = run(tmp_path, KERAS, KERAS_BACKEND=backend, HVDTRAIN_SOLO="1")
    assert status == 1, output
    note = r"hvdtrain: memory of rank 0: activations [\d.]+ [GM]B, optimizer state 4.23 MB, .*"
    assert re.search(note + "The largest is activations: a smaller batch_size, with accumulate,", output), output


# A step takes COUNT times 300 MB, which are not freed: the kernel gives them up to the cgroup's limit.
GROWING = """
import torch
import hvdtrain

world = hvdtrain.init()
saved = []

class Net(torch.nn.Linear):
    def forward(self, x):
        if world.rank == 1:
            saved.extend(torch.ones(75_000_000) for _ in range(COUNT))
        return super().forward(x)

net = Net(512, 512)
trainer = hvdtrain.Trainer(net, optimizer=torch.optim.Adam(net.parameters()), loss=torch.nn.MSELoss())
x = torch.ones(2048, 512)
trainer.fit((x, x), batch_size=8, progress=False, run_dir=None)
"""
LIMIT = 2_000_000_000


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """Make a cgroup with a limit below this process's own; skip where that is not allowed."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        name = {"": "memory.max", "memory": "memory.limit_in_bytes"}.get(controllers, "")
        folder = Path("/sys/fs/cgroup", controllers, path.lstrip("/"), f"hvdtrain-test-{os.getpid()}")
        with contextlib.suppress(OSError):
            folder.mkdir()
            with contextlib.ExitStack() as stack:
                stack.callback(_remove, folder)
                (folder / name).write_text(str(LIMIT))
                yield folder
                return
    pytest.skip("no cgroup with a limit can be made here: needs root, and a memory controller")


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + 10  # until its last process is gone
    while folder.is_dir() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            folder.rmdir()
        time.sleep(0.1)


def hvdtrain_run(folder: Path, ranks: int, *within: str) -> tuple[int, str]:
    command = [str(Path(sys.executable).parent / "hvdtrain"), "run", "-np", str(ranks), "--max-restarts", "0"]
    result = subprocess.run(
        [*within, *command, sys.executable, "train.py"], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=150, check=False,
    )  # fmt: skip
    return result.returncode, result.stdout


@pytest.mark.parametrize(
    ("count", "held"), [(20, "in its first step up to activations"), (1, "activations")], ids=["first", "later"]
)
def test_the_oom_killer_is_named_with_what_the_rank_held(tmp_path: Path, cgroup: Path, count: int, held: str) -> None:
    (tmp_path / "train.py").write_text(GROWING.replace("COUNT", str(count)))
    enter = f'echo $$ > {cgroup}/cgroup.procs && exec "$@"'
    status, output = hvdtrain_run(tmp_path, 2, "bash", "-c", enter, "bash")
    assert status == 137, output
    (line,) = [line for line in output.splitlines() if "memory ran out" in line]
    limited = "memory ran out on this host, which is limited to 2 GB, so the kernel ended rank 1 on host "
    assert line.startswith(f"hvdtrain run: {limited}"), line
    assert f"; it held {held} " in line, line
    assert "optimizer state 2.1 MB, weights 1.05 MB, gradients 1.05 MB" in line
    assert 'The largest is activations: micro_batch="auto" computes a batch in parts' in line


def test_a_kill_that_is_not_the_kernels_is_not_blamed_on_memory(tmp_path: Path) -> None:
    kill = "import os, signal, hvdtrain\nhvdtrain.init('torch')\nos.kill(os.getpid(), signal.SIGKILL)"
    (tmp_path / "train.py").write_text(kill)
    status, output = hvdtrain_run(tmp_path, 1)
    assert status == 137, output
    assert "memory ran out" not in output
