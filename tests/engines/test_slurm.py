"""The sbatch script that is shipped, srun and hvdtrain run, on a real Slurm of two nodes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import slurm

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing() or "-")]

SCRIPT = Path(__file__).parents[2] / "docs" / "pages" / "engines" / "files" / "train.sbatch"
SMALL = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")

# Slow until the job is started anew.
TRAIN = """
import os, time
import torch, hvdtrain
from hvdtrain.callbacks import Callback

world = hvdtrain.init()
print(f"rank {world.rank} of {world.size}, {world.local_size} here", flush=True)
torch.manual_seed(0)
x = torch.rand(256, 4)
model = torch.nn.Linear(4, 1)


class Slow(Callback):
    def on_step_end(self, trainer, step):
        time.sleep(0 if os.environ.get("SLURM_RESTART_COUNT") else 0.05)


trainer = hvdtrain.Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=torch.nn.MSELoss())
history = trainer.fit((x, x.sum(1, keepdim=True)), epochs=60, batch_size=32, checkpoint_dir="kept", callbacks=[Slow()])
if world.is_root:
    print("epochs", len(history["loss"]), "steps", trainer.global_step, flush=True)
"""

# No framework: who starts the ranks, and where, is the same.
LIGHT = """
import os
print("rank", os.environ["OMPI_COMM_WORLD_RANK"], "on", os.environ["SLURMD_NODENAME"], flush=True)
"""

THREADS = """
import os, torch, hvdtrain
world = hvdtrain.init("torch")
cores = sorted(os.sched_getaffinity(0))
both = world.allgather_object([cores, torch.get_num_threads()])
if world.is_root:
    print(*both)
"""


STAGES = """
import torch, hvdtrain, hvdtrain.torch
from torch import nn

world = hvdtrain.init()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
if world.size > 1:
    model = hvdtrain.torch.Grid(stages=2).pipeline(model, micro_batches=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = hvdtrain.Trainer(model, optimizer=optimizer, loss=nn.CrossEntropyLoss())
x = torch.rand(50, 4)
history = trainer.fit((x, (x[:, 0] > x[:, 1]).long()), epochs=3, batch_size=16)
if world.is_root:
    print(f"last of {world.size}: {history['loss'][-1]:.6f}", flush=True)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    cluster = slurm.Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


class Job:
    """One sbatch of the shipped script."""

    def __init__(self, cluster: slurm.Cluster, folder: Path, program: str, **variables: str) -> None:
        self.cluster, self.folder = cluster, folder
        (folder / "train.py").write_text(program)
        self.id = cluster.run("sbatch", "--parsable", *SMALL, str(SCRIPT), cwd=folder, **variables).strip()

    def output(self) -> str:
        file = self.folder / f"train-{self.id}.out"
        return file.read_text() if file.exists() else ""

    def wait_for(self, text: str, times: int = 1) -> None:
        self.cluster.wait_for(lambda: len(re.findall(text, self.output())) >= times)

    def wait_for_state(self, state: str) -> None:
        self.cluster.wait_for(lambda: self.cluster.state(self.id) == state)


def test_a_job_whose_time_is_up_keeps_a_checkpoint_and_the_requeued_one_goes_on_from_it(
    cluster: slurm.Cluster, tmp_path: Path
) -> None:
    job = Job(cluster, tmp_path, TRAIN, HVDTRAIN_RUNS="runs")
    job.wait_for(r"epoch 2/60")
    cluster.run("scancel", "--batch", "--signal=USR1", job.id)  # as --signal=B:USR1@120 does it
    job.wait_for(r"epochs 60 steps 240")
    job.wait_for_state("COMPLETED")
    output = job.output()
    assert output.count("rank 0 of 2, 1 here") == output.count("rank 1 of 2, 1 here") == 2
    assert "stopped on request after" in output
    for epoch in range(1, 61):
        assert output.count(f"epoch {epoch}/60 ") == 1, epoch
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [f"train-{job.id}"]


def test_a_job_that_is_cancelled_keeps_a_checkpoint_and_stays_cancelled(cluster: slurm.Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, TRAIN)
    job.wait_for(r"epoch 1/60")
    cluster.run("scancel", job.id)
    job.wait_for_state("CANCELLED")
    assert "a checkpoint is written" in job.output()


def test_a_job_that_another_one_preempts_keeps_a_checkpoint_and_goes_on_after_it(
    cluster: slurm.Cluster, tmp_path: Path
) -> None:
    job = Job(cluster, tmp_path, TRAIN)
    job.wait_for(r"epoch 2/60")
    cluster.run("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    job.wait_for(r"epochs 60 steps 240")
    job.wait_for_state("COMPLETED")
    output = job.output()
    assert "a checkpoint is written" in output
    for epoch in range(1, 61):
        assert output.count(f"epoch {epoch}/60 ") == 1, epoch


def test_hvdtrain_run_starts_a_rank_on_every_node_of_a_job(cluster: slurm.Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, LIGHT, HVDTRAIN_LAUNCHER="run")
    job.wait_for_state("COMPLETED")
    ranks = sorted(re.findall("rank . on .*", job.output()))
    assert ranks == ["rank 0 on hvdtrain-n1", "rank 1 on hvdtrain-n2"], job.output()


def test_more_ranks_than_a_job_has_tasks_are_refused(cluster: slurm.Cluster, tmp_path: Path) -> None:
    output = cluster.run("salloc", *SMALL, "hvdtrain", "run", "-np", "3", "--launcher", "mpirun", "true", check=False)
    assert "hvdtrain run: -np 3 is more than the 2 tasks of this Slurm job on hvdtrain-n1:1,hvdtrain-n2:1" in output


def test_one_node_that_was_asked_for_elsewhere_is_where_the_ranks_start(cluster: slurm.Cluster, tmp_path: Path) -> None:
    (tmp_path / "light.py").write_text(LIGHT)
    one = ("salloc", "--nodes=1", "--nodelist=hvdtrain-n2", "--ntasks=1", "hvdtrain", "run", "--launcher", "mpirun")
    output = cluster.run(*one, "-np", "1", "light.py", cwd=tmp_path)
    assert "rank 0 on hvdtrain-n2" in output
    output = cluster.run(*one, "-np", "2", "light.py", cwd=tmp_path, check=False)
    assert "-np 2 is more than the 1 tasks of this Slurm job on hvdtrain-n2:1" in output


def test_ranks_that_slurm_binds_to_a_core_each_compute_with_one_thread_there(cluster: slurm.Cluster) -> None:
    output = cluster.run("srun", "--mpi=pmix", "-N1", "-n2", sys.executable, "-c", THREADS)
    cores = re.findall(r"\[\[(\d+)\], 1\]", output)
    assert sorted(cores) == ["0", "1"], output


def test_srun_without_pmix_is_told_what_to_type(cluster: slurm.Cluster) -> None:
    script = 'import hvdtrain; hvdtrain.init("torch")'
    output = cluster.run("srun", "--mpi=none", "-N1", "-n2", sys.executable, "-c", script, check=False)
    assert "Launch with `srun --mpi=pmix python script.py`" in output


@pytest.mark.parametrize("launcher", ["srun", "run"])
def test_two_nodes_are_the_stages_of_one_model(launcher: str, cluster: slurm.Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, STAGES, HVDTRAIN_LAUNCHER=launcher)
    alone = cluster.run(sys.executable, "train.py", cwd=tmp_path)
    job.wait_for_state("COMPLETED")
    both = re.findall(r"last of (\d): (.*)", alone + job.output())
    assert both == [("1", both[0][1]), ("2", both[0][1])], job.output()
