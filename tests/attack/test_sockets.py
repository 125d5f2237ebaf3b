"""The sockets that a job opens, and where: as every other user of the host can see them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvdtrain.horovod_build import installed

sys.path.insert(0, str(Path(__file__).parent))
import sockets

LOOPBACK = {"127.0.0.1", "::1"}
RANK = """
import os, pathlib, sys, time
import horovod.torch as hvd
hvd.init()
pathlib.Path(sys.argv[1], f"rank-{hvd.rank()}").touch()
time.sleep(100)
"""
GRID = """
import pathlib, sys, time
import torch, torch.distributed as dist
import hvdtrain, hvdtrain.torch
world = hvdtrain.init()
grid = hvdtrain.torch.Grid(stages=2)
dist.all_reduce(torch.ones(2))
dist.barrier(grid.group("stage"))
pathlib.Path(sys.argv[1], f"rank-{world.rank}").touch()
time.sleep(100)
"""
HVDTRAIN = "import sys; from hvdtrain.cli.program import main; sys.argv[0] = 'hvdtrain'; main()"
COMMANDS = {
    "horovodrun": ["-m", "horovod.runner.launch", "-np", "2", "--mpi"],
    "hvdtrain run": ["-c", HVDTRAIN, "run", "-np", "2", "--mpi"],
    "hvdtrain run --launcher mpirun": ["-c", HVDTRAIN, "run", "-np", "2", "--launcher", "mpirun"],
}

# What a script does, alone, before it writes that it is done.
TORCH_TRAINER = """
import torch, hvdtrain
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss())
trainer.fit((torch.ones(64, 4).numpy(), torch.zeros(64, dtype=torch.int64).numpy()), epochs=1, batch_size=16)
"""
KERAS_TRAINER = """
import numpy, keras, hvdtrain
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
trainer = hvdtrain.Trainer(model, optimizer=keras.optimizers.SGD(0.1), loss=loss)
trainer.fit((numpy.ones((64, 4), "float32"), numpy.zeros(64, "int64")), epochs=1, batch_size=16)
"""
TORCH_DROP_IN = """
import torch, hvdtrain.torch as hvd
hvd.init()
model = torch.nn.Linear(4, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
model(torch.ones(4, 4)).sum().backward()
optimizer.step()
"""
KERAS_DROP_IN = """
import keras, hvdtrain.keras as hvd
hvd.init()
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
"""
OWN_LOOP = """
import torch, hvdtrain
world = hvdtrain.init("torch", seed=0)
"""
HOROVODS_OWN = """
import torch, horovod.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(4))
"""
ALONE = {
    "Trainer, torch": (TORCH_TRAINER, "torch"),
    "Trainer, Keras": (KERAS_TRAINER, "tensorflow"),
    "drop-in, torch": (TORCH_DROP_IN, "torch"),
    "drop-in, Keras": (KERAS_DROP_IN, "tensorflow"),
    "init": (OWN_LOOP, "torch"),
    "Horovod's own, torch": (HOROVODS_OWN, "torch"),
}

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment whose path LD_PRELOAD cannot hold, with a Horovod of its own."""
    horovod = installed.package_folder("horovod")
    if horovod is None or "mpi" not in installed.record().get("data_planes", ""):
        pytest.skip("Horovod was built without MPI")
    prefix = tmp_path_factory.mktemp("attack") / "my own: env"
    # venv refuses a colon: it comes with the new name.
    made = prefix.with_name("my own env")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True)
    packages = next(made.glob("lib/python*/site-packages"))
    root = Path(__file__).resolve().parents[2]
    (packages / "over.pth").write_text(
        f"{root}\n{horovod.parent}\n" + "".join(f"{p}\n" for p in sys.path if "site-" in p)
    )
    shutil.copytree(horovod, packages / "horovod")
    made.rename(prefix)
    return prefix / "bin" / "python"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start Python on a job, and end all of it after the test."""
    processes: list[subprocess.Popen[str]] = []

    def starts(python: Path, *words: str, **env: str) -> subprocess.Popen[str]:
        # The Open MPI of an environment: Horovod's libraries look for it beside themselves, in `spaced`.
        found = {"LD_LIBRARY_PATH": f"{sys.prefix}/lib", "HVDTRAIN_TEST_MARK": str(tmp_path), **env}
        process = subprocess.Popen(
            [python, *words], cwd=tmp_path, env={**os.environ, **found}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        processes.append(process)
        return process

    yield starts
    for process in processes:
        process.terminate()
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    for pid in sockets.marked(str(tmp_path)):
        os.kill(pid, 9)


def check_lives(process: subprocess.Popen[str], deadline: float) -> None:
    if process.poll() is not None or time.monotonic() > deadline:
        process.kill()
        pytest.fail(process.communicate(timeout=10)[0][-3000:])


def wait_for(process: subprocess.Popen[str], *paths: Path) -> None:
    deadline = time.monotonic() + 120
    while not all(path.exists() for path in paths):
        check_lives(process, deadline)
        time.sleep(0.05)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_job_of_one_host_listens_on_loopback_alone_whatever_its_environments_path_holds(
    command: str, spaced: Path, start: Start, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANK)
    process = start(spaced, *COMMANDS[command], str(spaced), str(script), str(tmp_path))
    wait_for(process, tmp_path / "rank-0", tmp_path / "rank-1")
    found = sockets.network(sockets.marked(str(tmp_path)))
    assert found, "mpirun listens"
    assert found <= LOOPBACK


@pytest.mark.parametrize("command", [*COMMANDS, "gloo"])
def test_torch_distributed_on_the_jobs_horovod_opens_no_socket_that_others_reach(
    command: str, start: Start, tmp_path: Path
) -> None:
    words = COMMANDS.get(command, ["-m", "horovod.runner.launch", "-np", "2", "--gloo"])
    (tmp_path / "train.py").write_text(GRID)
    process = start(Path(sys.executable), *words, sys.executable, "train.py", str(tmp_path))
    wait_for(process, tmp_path / "rank-0", tmp_path / "rank-1")
    found = sockets.network(sockets.marked(str(tmp_path)))
    assert found, "the launcher listens"
    assert found <= LOOPBACK


@pytest.mark.parametrize("command", COMMANDS)
def test_a_job_of_one_host_does_not_start_where_loopback_cannot_be_held(
    command: str, spaced: Path, start: Start, tmp_path: Path
) -> None:
    (library,) = spaced.parents[1].glob("lib/python*/site-packages/horovod/runner/libhvdtrain_listen.so")
    away = library.rename(library.with_suffix(".away"))
    try:
        process = start(spaced, *COMMANDS[command], str(spaced), "-c", "print('started')")
        output = process.communicate(timeout=100)[0]
        accepted = start(spaced, *COMMANDS[command], str(spaced), "-c", "print('started')", HVDTRAIN_LOOPBACK="0")
        said = accepted.communicate(timeout=100)[0]
    finally:
        away.rename(library)
    assert process.returncode != 0
    assert "<stdout>:" not in output
    (line,) = [line for line in output.splitlines() if "loopback" in line and "is missing" in line]
    assert "HVDTRAIN_LOOPBACK=0" in line
    assert "Traceback" not in output
    assert accepted.returncode == 0, said
    # Two ranks' lines may become one.
    assert sum(line.count("started") for line in said.splitlines() if "<stdout>:" in line) == 2


@pytest.mark.parametrize("script", ALONE)
def test_a_script_that_no_launcher_started_opens_no_socket(script: str, start: Start, tmp_path: Path) -> None:
    code, engine = ALONE[script]
    if installed.framework_version(engine) is None:
        pytest.skip(f"{engine} is not installed")
    ends = "\nimport os, pathlib, time\npathlib.Path('done').touch()\ntime.sleep(100)\n"
    (tmp_path / "train.py").write_text(code + ends)
    process = start(Path(sys.executable), "train.py", KERAS_BACKEND="tensorflow")
    seen: set[str] = set()
    deadline = time.monotonic() + 100
    done = False
    while not done:
        check_lives(process, deadline)
        time.sleep(0.02)
        done = (tmp_path / "done").exists()  # before the look, so that there is one after it
        pids = sockets.marked(str(tmp_path))
        seen |= sockets.network(pids, listening=False) | sockets.unix(pids)
    assert seen == set()
    assert sockets.marked(str(tmp_path)) == {process.pid}, "no process but its own, such as MPI's daemon"
