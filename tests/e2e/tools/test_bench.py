"""`hvdtrain bench` as a person types it; what it finds is checked for its structure, never for speed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(200),
    pytest.mark.skipif(
        importlib.util.find_spec("horovod") is None, reason="needs Horovod: install it with hvdtrain build"
    ),
]

LOADER = """
import time
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import default_collate

def slowly(items):
    time.sleep(0.05)
    return default_collate(items)

def loader(x, y):
    return DataLoader(TensorDataset(x, y), batch_size=8, collate_fn=slowly)
"""
TORCH_DROP_IN = """
import sys, torch
import hvdtrain.torch as hvd
from own_loader import loader
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
print("arguments", sys.argv[1:])
for epoch in range(100):
    for x, y in loader(torch.rand(160, 16), torch.rand(160, 1)):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
"""
TORCH_TRAINER = """
import torch, hvdtrain
world = hvdtrain.init()
torch.manual_seed(0)
x = torch.rand(640, 16)
y = x.sum(1, keepdim=True)
model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.MSELoss())
trainer.fit((x, y), epochs=2, batch_size=32)
"""
TORCH_KEEPING = (
    TORCH_TRAINER.rpartition("trainer.fit")[0]
    + """
from hvdtrain.callbacks import Checkpoint, CSVLogger, RunFolder
trainer.fit((x, y), epochs=1, batch_size=32)
hooks = [Checkpoint("kept"), CSVLogger("log/log.csv"), RunFolder("mine")]
trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.MSELoss())
trainer.fit((x, y), epochs=1, batch_size=32, callbacks=hooks)
trainer.save("model")
hvdtrain.Trainer.load("kept/epoch-000001", model, optimizer=optimizer, loss=torch.nn.MSELoss())
"""
)
TORCH_OWN_LOOP = """
import torch, hvdtrain
from own_loader import loader
hvdtrain.init()
torch.manual_seed(0)
model = torch.nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer, batches = hvdtrain.prepare(model, optimizer, loader(torch.rand(160, 16), torch.rand(160, 1)))
for x, y in batches:
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
"""
KERAS_DROP_IN = """
import keras, numpy as np, time
import hvdtrain.keras as hvd
hvd.init()

class Slow(keras.utils.PyDataset):
    def __len__(self):
        return 20
    def __getitem__(self, index):
        time.sleep(0.02)
        return np.ones((8, 16), np.float32), np.ones((8, 1), np.float32)

model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.001)), loss="mse")
model.fit(Slow(), epochs=2, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""
KERAS_TRAINER = """
import keras, hvdtrain, numpy as np
hvdtrain.init()
x = np.random.default_rng(0).random((320, 16), np.float32)
model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])
trainer = hvdtrain.Trainer(model, optimizer=keras.optimizers.SGD(0.001), loss="mse")
trainer.fit((x, x.sum(1, keepdims=True)), epochs=1, batch_size=8)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own_loader.py").write_text(LOADER)
    return tmp_path


def bench(folder: Path, *arguments: str, limit_s: float = 150, **environment: str) -> tuple[int, str, str]:
    """Run the command and return (exit status, what it printed, what it said on the side)."""
    prefixes = ("HOROVOD_", "OMPI_", "PMI_", "PMIX_", "KERAS_", "HVDTRAIN_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    process = subprocess.Popen(
        [str(Path(sys.executable).parent / "hvdtrain"), "bench", *arguments],
        cwd=folder,
        env={**kept, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, said = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"hvdtrain bench {' '.join(arguments)} did not end within {limit_s:g} s")
    return process.returncode, output, said


def measured(folder: Path, *arguments: str, ranks: int = 2, **environment: str) -> dict[str, Any]:
    """Return the JSON of a run that must succeed, after checking what is true of all of them."""
    status, output, said = bench(folder, "-np", str(ranks), "--json", *arguments, **environment)
    assert status == 0, said
    told: dict[str, Any] = json.loads(output)
    assert told["ranks"] == ranks
    assert [each["rank"] for each in told["steps"]] == list(range(ranks))
    for each in told["steps"]:
        parts = [each[name] for name in ("compute_s", "communication_s", "data_s")]
        assert all(part >= 0 for part in parts), each
        assert sum(parts) == pytest.approx(each["step_s"]["median"])
        assert each["step_s"]["low"] <= each["step_s"]["median"] <= each["step_s"]["high"]
        assert each["facts"]["reduced"] is (ranks > 1)
        assert (each["communication_s"] > 0) is (ranks > 1), each
        memory = each["facts"]["memory"]
        assert memory["weights"] == memory["gradients"] > 0  # no model here has other weights
        assert memory["activations"] is None or memory["activations"] >= 0
    assert told["plan_input"]["step_s"] > 0
    return told


def of_script(folder: Path, text: str, *arguments: str, **environment: str) -> dict[str, Any]:
    (folder / "train.py").write_text(text)
    return measured(folder, "--script", "train.py", *arguments, **environment)


def check_sweep(told: dict[str, Any]) -> None:
    assert [point["bytes"] for point in told["allreduce"]] == [4, 16, 64, 256, 1024]
    for point in told["allreduce"]:
        assert 0 < point["time_s"]["low"] <= point["time_s"]["median"] <= point["time_s"]["high"]
        assert point["bus_bytes_per_s"] == pytest.approx(point["bytes"] / point["time_s"]["median"])
        assert point["copy_bytes_per_s"]["median"] > 0
        assert point["floor_share"] == pytest.approx(point["floor_s"] / point["time_s"]["median"])
    assert told["fit"]["alpha_s"] >= 0
    # 784-256-256-10 and its biases, float32.
    assert told["plan_input"]["gradient_bytes"] == 4 * (785 * 256 + 257 * 256 + 257 * 10)
    assert told["plan_input"]["samples_per_step"] == 64
    assert told["plan_input"]["overhead_s"] == told["fit"]["alpha_s"]


def test_bench_measures_torch(folder: Path) -> None:
    told = measured(folder, "--quick", "--max-bytes", "1024", "--framework", "torch")
    check_sweep(told)
    assert 0 < told["plan_input"]["backward_share"] < 1
    assert {each["steps"] for each in told["steps"]} == {8}


@pytest.mark.long  # tests/unit/telemetry finds a step of each backend; the sweep and the report are those of torch
@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_bench_measures_keras(folder: Path, backend: str) -> None:
    told = measured(folder, "--quick", "--max-bytes", "1024", "--framework", "keras", KERAS_BACKEND=backend)
    check_sweep(told)
    assert told["plan_input"]["framework"] == f"keras/{backend}"


def test_bench_of_one_rank_measures_steps_alone(folder: Path) -> None:
    told = measured(folder, "--quick", ranks=1)
    assert told["allreduce"] == []
    assert told["notes"][0] == "One rank sends nothing: no allreduce was measured."


def test_bench_prints_tables(folder: Path) -> None:
    status, output, said = bench(folder, "--quick", "--max-bytes", "64", "--link", "25Gb/s")
    assert status == 0, said
    assert "floor/median" in output
    assert "Slowest: rank" in output
    assert "Floor: 2(N-1)/N * bytes / the link's 3.12 GB/s" in output


def test_a_drop_in_torch_script_ends_after_the_steps_asked_for(folder: Path) -> None:
    told = of_script(folder, TORCH_DROP_IN, "--steps", "10", "--", "--lr", "1")
    assert {each["steps"] for each in told["steps"]} == {10}
    assert told["plan_input"]["samples_per_step"] == 8
    assert told["plan_input"]["gradient_bytes"] == 17 * 4
    # The loader sleeps 50 ms a batch, which can only be data wait. The summary scales it to the median step, which is
    # shorter than the mean where another process had the core for some steps.
    assert all(each["data_s"] >= 0.03 for each in told["steps"])
    assert "waits-for-data" in told["advice"]


def test_a_trainer_script_is_measured_until_its_end(folder: Path) -> None:
    told = of_script(folder, TORCH_TRAINER, "--steps", "0")
    assert {each["steps"] for each in told["steps"]} == {2 * 10 - 3}
    assert told["plan_input"]["samples_per_step"] == 32


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    found = {path: path.stat() for path in sorted(folder.rglob("*"))}
    return {str(path.relative_to(folder)): (each.st_ino, each.st_mtime_ns) for path, each in found.items()}


def test_a_scripts_checkpoints_runs_and_logs_are_neither_read_nor_written(folder: Path) -> None:
    temporary = folder / "temporary"
    temporary.mkdir()
    (folder / "train.py").write_text(TORCH_KEEPING)
    environment = {**os.environ, "HVDTRAIN_RUNS": "runs"}
    subprocess.run([sys.executable, "train.py"], cwd=folder, env=environment, check=True, timeout=100)
    kept = [folder / name for name in ("kept", "runs", "mine", "log", "model")]
    before = [snapshot(each) for each in kept]
    assert all(before)
    told = of_script(folder, TORCH_KEEPING, "--steps", "0", TMPDIR=str(temporary), HVDTRAIN_RUNS="runs")
    assert {each["steps"] for each in told["steps"]} == {2 * 10 - 3}  # from the beginning, though that run is complete
    assert [snapshot(each) for each in kept] == before
    assert not list(temporary.glob("hvdtrain-bench-*"))


def test_a_prepared_loop_is_measured(folder: Path) -> None:
    told = of_script(folder, TORCH_OWN_LOOP)
    assert {each["steps"] for each in told["steps"]} == {10 - 3}
    assert all(each["data_s"] >= 0.03 for each in told["steps"])


@pytest.mark.long  # tests/unit/telemetry finds a step of such a script on each backend
@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_a_drop_in_keras_script_is_measured(folder: Path, backend: str) -> None:
    told = of_script(folder, KERAS_DROP_IN, "--steps", "12", KERAS_BACKEND=backend)
    assert {each["steps"] for each in told["steps"]} == {12}
    assert told["plan_input"]["gradient_bytes"] == (17 * 8 + 9) * 4
    assert told["plan_input"]["samples_per_step"] == 8
    # tf.data fetches ahead, but not faster than the dataset sleeps. A rank whose batch came first waits for the others
    # in the reduction.
    assert max(each["data_s"] for each in told["steps"]) >= 0.01
    assert all(each["data_s"] + each["communication_s"] >= 0.01 for each in told["steps"])


@pytest.mark.long  # the Trainer marks its steps on torch above, and Keras its own in a drop-in script
@pytest.mark.parametrize("backend", ["tensorflow", "torch", "jax"])
def test_a_keras_trainer_script_is_measured(folder: Path, backend: str) -> None:
    told = of_script(folder, KERAS_TRAINER, KERAS_BACKEND=backend)
    assert {each["steps"] for each in told["steps"]} == {20 - 3}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ValueError('boom')", "train.py failed, horovodrun's exit status is"),
        ("print('hello')", "train.py ended without using hvdtrain.Trainer"),
        ("import hvdtrain.torch as hvd; hvd.init()", "train.py never took a step on rank 0"),
        ("import time; time.sleep(100)", "train.py was ended after 6 s (--timeout)"),
    ],
)
def test_a_script_without_steps_gets_a_clear_word(folder: Path, text: str, said: str) -> None:
    (folder / "train.py").write_text(text)
    status, output, error = bench(folder, "--script", "train.py", "--timeout", "6" if "sleep" in text else "60")
    assert status == 1
    assert output == ""
    found = [line for line in error.splitlines() if line.startswith("hvdtrain bench: ")][1:]  # after what it will do
    assert len(found) == 1, error
    assert said in found[0]
    assert ("raised ValueError: boom" in found[0]) is ("boom" in text), error
