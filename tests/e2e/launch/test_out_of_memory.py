"""Memory runs out for real, by limits of the process and of its cgroup: one is told what took it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
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


# The same without a Trainer.
DROP_IN = """
import resource
import numpy as np
import hvdtrain.{framework} as hvd

hvd.init()
{model}
x = np.ones((65536, 64), np.float32)
fit(x[:8])
if hvd.rank() == hvd.size() - 1:
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 300_000_000,) * 2)
fit(x)
"""
DROP_IN_TORCH = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 64))
optimizer = torch.optim.Adam(model.parameters())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

def fit(x):
    x = torch.from_numpy(x)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), x).backward()
    optimizer.step()
"""
DROP_IN_KERAS = """
import keras
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(4096, "relu"), keras.layers.Dense(64)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")

def fit(x):
    model.fit(x, x, batch_size=len(x), verbose=0)
"""


def drop_in(framework: str, model: str) -> str:
    return DROP_IN.format(framework=framework, model=model)


def run(folder: Path, program: str, *launcher: str, **environment: str) -> tuple[int, str]:
    (folder / "train.py").write_text(program)
    result = subprocess.run(
        [*launcher, sys.executable, "train.py"],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=150, check=False,
    )  # fmt: skip
    return result.returncode, result.stdout


def test_the_rank_whose_memory_ran_out_says_so_under_hvdtrain_run(tmp_path: Path) -> None:
    hvdtrain = str(Path(sys.executable).parent / "hvdtrain")
    status, output = run(tmp_path, LIMITED.format(model=TORCH), hvdtrain, "run", "-np", "2", "--max-restarts", "0")
    assert status == 1, output
    assert re.search(r"allocate memory: you tried to allocate \d+ bytes", output), output
    note = r"hvdtrain: memory of rank 1: activations [\d.]+ [GM]B, optimizer state 4.23 MB, .*"
    assert re.search(note + 'The largest is activations: micro_batch="auto" computes a batch in parts', output), output
    assert "memory of rank 0: " not in output


@pytest.mark.parametrize("backend", ["torch", pytest.param("jax", marks=pytest.mark.long)])
def test_a_keras_model_says_so_too(tmp_path: Path, backend: str) -> None:
    status, output = run(tmp_path, LIMITED.format(model=KERAS), KERAS_BACKEND=backend, HVDTRAIN_SOLO="1")
    assert status == 1, output
    note = r"hvdtrain: memory of rank 0: activations [\d.]+ [GM]B, optimizer state 4.23 MB, .*"
    assert re.search(note + "The largest is activations: a smaller batch_size, with accumulate,", output), output


def test_a_script_without_a_trainer_says_so_with_its_own_options(tmp_path: Path) -> None:
    hvdtrain = str(Path(sys.executable).parent / "hvdtrain")
    launcher = [hvdtrain, "run", "-np", "2", "--max-restarts", "0"]
    status, output = run(tmp_path, drop_in("torch", DROP_IN_TORCH), *launcher)
    assert status == 1, output
    note = r"hvdtrain: memory of rank 1: activations [\d.]+ [GM]B, optimizer state 4.23 MB, .*"
    way = "a smaller batch, with backward_passes_per_step, computes a batch in parts, or torch.utils.checkpoint"
    assert re.search(f"{note}The largest is activations: {way}", output), output
    assert re.search(r"hvdtrain run: the first error, of rank 1 on .*allocate memory", output), output


@pytest.mark.parametrize(
    "backend", ["tensorflow", *(pytest.param(each, marks=pytest.mark.long) for each in ("torch", "jax"))]
)
def test_kerass_own_fit_says_so_with_its_own_options(tmp_path: Path, backend: str) -> None:
    # Without memory, oneDNN's operations crash TensorFlow 2.21, which uses them on CPUs with instructions for them.
    environment = {"KERAS_BACKEND": backend, "TF_ENABLE_ONEDNN_OPTS": "0"}
    status, output = run(tmp_path, drop_in("keras", DROP_IN_KERAS), HVDTRAIN_SOLO="1", **environment)
    assert status == 1, output
    note = r"hvdtrain: memory of rank 0: activations [\d.]+ [GM]B, optimizer state 4.23 MB, .*"
    way = "a smaller batch_size, with backward_passes_per_step, computes a batch in parts, or keras.remat"
    assert re.search(f"{note}The largest is activations: {way}", output), output


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
# The same without a Trainer; the second step comes once the rank has said what it holds.
GROWING_DROP_IN = """
import time
import torch
import hvdtrain.torch as hvd

hvd.init()
net = torch.nn.Linear(512, 512)
optimizer = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters()), net.named_parameters())
x, saved = torch.ones(8, 512), []
for step in range(100):
    if hvd.rank() == 1:
        saved.extend(torch.ones(75_000_000) for _ in range(COUNT))
    net(x).sum().backward()
    optimizer.step()
    time.sleep(0 if step else 3)
"""


def hvdtrain_run(folder: Path, ranks: int, *within: str) -> tuple[int, str]:
    command = [str(Path(sys.executable).parent / "hvdtrain"), "run", "-np", str(ranks), "--max-restarts", "0"]
    result = subprocess.run(
        [*within, *command, sys.executable, "train.py"], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=150, check=False,
    )  # fmt: skip
    return result.returncode, result.stdout


@pytest.mark.parametrize(
    ("program", "count", "held", "way"),
    [
        (GROWING, 20, "in its first step up to activations", 'micro_batch="auto" computes a batch in parts'),
        pytest.param(GROWING, 1, "activations", 'micro_batch="auto" computes a batch in parts', marks=pytest.mark.long),
        pytest.param(
            GROWING_DROP_IN,
            20,
            "in its first step up to activations",
            "a smaller batch, with backward_passes_per_step,",
            marks=pytest.mark.long,
        ),
        (GROWING_DROP_IN, 1, "activations", "a smaller batch, with backward_passes_per_step,"),
    ],
    ids=["first", "later", "script-first", "script-later"],
)
def test_the_oom_killer_is_named_with_what_the_rank_held(
    tmp_path: Path, cgroup: Path, program: str, count: int, held: str, way: str
) -> None:
    (tmp_path / "train.py").write_text(program.replace("COUNT", str(count)))
    enter = f'echo $$ > {cgroup}/cgroup.procs && exec "$@"'
    status, output = hvdtrain_run(tmp_path, 2, "bash", "-c", enter, "bash")
    assert status == 137, output
    (line,) = [line for line in output.splitlines() if "memory ran out" in line]
    limited = "memory ran out on this host, which is limited to 2 GB, so the kernel ended rank 1 on host "
    assert line.startswith(f"hvdtrain run: {limited}"), line
    assert f"; it held {held} " in line, line
    assert "optimizer state 2.1 MB, weights 1.05 MB, gradients 1.05 MB" in line
    assert f"The largest is activations: {way}" in line


def test_a_kill_that_is_not_the_kernels_is_not_blamed_on_memory(tmp_path: Path) -> None:
    kill = "import os, signal, hvdtrain\nhvdtrain.init('torch')\nos.kill(os.getpid(), signal.SIGKILL)"
    (tmp_path / "train.py").write_text(kill)
    status, output = hvdtrain_run(tmp_path, 1)
    assert status == 137, output
    assert "memory ran out" not in output
