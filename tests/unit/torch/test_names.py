"""hvdtrain.torch has horovod.torch's names, and importing it needs no Horovod."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys

import pytest
import torch

import hvdtrain.torch as drop_in
from hvdtrain.errors import NotInitializedError
from hvdtrain.torch.ops import engine, solo

# All public names of horovod.torch 0.28.1, so that the claim is tested where Horovod is not installed too.
_NAMES = """
Adasum Average Compression DistributedOptimizer HorovodInternalError Max Min ProcessSet Product Sum SyncBatchNorm
add_process_set allgather allgather_async allgather_object allreduce allreduce_ allreduce_async allreduce_async_
alltoall alltoall_async barrier broadcast broadcast_ broadcast_async broadcast_async_ broadcast_object
broadcast_optimizer_state broadcast_parameters ccl_built check_extension compression cross_rank cross_size cuda_built
ddl_built elastic functions global_process_set gloo_built gloo_enabled grouped_allgather grouped_allgather_async
grouped_allreduce grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_ grouped_reducescatter
grouped_reducescatter_async init is_initialized join local_rank local_size mpi_built mpi_enabled mpi_lib_v2 mpi_ops
mpi_threads_supported nccl_built optimizer poll rank reducescatter reducescatter_async remove_process_set rocm_built
shutdown size sparse_allreduce_async start_timeline stop_timeline sync_batch_norm synchronize
"""
HOROVODS_NAMES = _NAMES.split()
has_horovod = importlib.util.find_spec("horovod") is not None
needs_horovod = pytest.mark.skipif(not has_horovod, reason="compares with Horovod, which is not installed here")


def test_every_public_name_of_horovod_is_here():
    assert set(HOROVODS_NAMES) <= set(dir(drop_in))
    assert {"ElasticSampler", "TorchState", "run", "init", "shutdown", "run_fn", "state", "sampler"} <= set(
        dir(drop_in.elastic)
    )


def test_every_name_leads_somewhere_without_horovod(hvd):
    for name in set(HOROVODS_NAMES) - {"check_extension", "mpi_lib_v2"}:
        assert getattr(hvd, name) is not None
        assert getattr(hvd.mpi_ops, name) is not None
    with pytest.raises(AttributeError, match="not installed"):
        _ = hvd.mpi_lib_v2
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = hvd.nonsense


def test_a_rank_before_init_says_what_to_do(hvd):
    hvd.shutdown()
    with pytest.raises(NotInitializedError, match=r"Call hvd\.init\(\) at the beginning"):
        hvd.rank()
    with pytest.raises(ValueError, match="not initialised"):  # Horovod's type, which scripts may catch
        hvd.local_size()


NEEDS_INIT = {
    "rank": lambda hvd: hvd.rank(),
    "is_homogeneous": lambda hvd: hvd.is_homogeneous(),  # Horovod's own ends the process
    "start_timeline": lambda hvd: hvd.start_timeline("x.json"),
    "add_process_set": lambda hvd: hvd.add_process_set([0]),
    "allreduce": lambda hvd: hvd.allreduce(torch.ones(2)),
    "allreduce_async_": lambda hvd: hvd.allreduce_async_(torch.ones(2)),
    "grouped_allgather": lambda hvd: hvd.grouped_allgather([torch.ones(2)]),
    "alltoall": lambda hvd: hvd.alltoall(torch.ones(2)),
    "broadcast_object": lambda hvd: hvd.broadcast_object(1),
    "broadcast_parameters": lambda hvd: hvd.broadcast_parameters(torch.nn.Linear(2, 2).state_dict()),
    "barrier": lambda hvd: hvd.barrier(),
    "join": lambda hvd: hvd.join(),
    "DistributedOptimizer": lambda hvd: hvd.DistributedOptimizer(torch.optim.SGD([torch.ones(1)], lr=0.1)),
}


@needs_horovod
@pytest.mark.parametrize("call", NEEDS_INIT.values(), ids=NEEDS_INIT)
def test_what_needs_init_says_the_same_with_horovod(monkeypatch, call):
    horovod = pytest.importorskip("horovod.torch", exc_type=ImportError)
    monkeypatch.setattr(engine, "_module", horovod)
    with pytest.raises(NotInitializedError):
        call(drop_in)


@needs_horovod
def test_the_list_of_names_and_the_numbers_are_horovods():
    horovod = pytest.importorskip("horovod.torch", exc_type=ImportError)
    assert {name for name in dir(horovod) if not name.startswith("_")} <= set(HOROVODS_NAMES)
    for name in ("Average", "Sum", "Adasum", "Min", "Max", "Product"):
        assert getattr(drop_in, name) == getattr(horovod, name)


@needs_horovod
def test_arguments_are_horovods_in_its_order():
    horovod = pytest.importorskip("horovod.torch", exc_type=ImportError)
    for name in HOROVODS_NAMES:
        theirs = getattr(horovod, name)
        if not inspect.isfunction(theirs) or name in ("init", "shutdown", "check_extension"):
            continue
        ours = list(inspect.signature(getattr(drop_in, name)).parameters)
        wanted = list(inspect.signature(theirs).parameters)
        assert ours[: len(wanted)] == wanted, name
    for name in ("init", "shutdown", "size", "rank", "is_initialized"):
        assert callable(getattr(solo, name))
    assert engine.Average == 0


CODE = """
import importlib.abc, json, sys
class NoHorovod(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "horovod":
            raise ModuleNotFoundError("No module named 'horovod'", name="horovod")
sys.meta_path.insert(0, NoHorovod())
import torch, hvdtrain.torch as hvd
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD", "OMPI", "PMI", "SLURM", "HVDTRAIN"))}
    return subprocess.run(
        [sys.executable, "-c", CODE + code], capture_output=True, text=True, timeout=100, env={**clean, **environment}
    )


@pytest.mark.slow
def test_a_script_runs_without_horovod():
    done = run("""
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name.startswith("horovod") else find(name, *a)
hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
state = hvd.elastic.TorchState(model, optimizer, epoch=3)
got = hvd.elastic.run(lambda state: state.epoch)(state)
state.commit()
print(json.dumps([hvd.size(), hvd.rank(), got, "horovod.torch" in sys.modules]))
""")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1, 0, 3, False]


@pytest.mark.slow
def test_importing_is_fine_but_starting_is_refused_under_a_launcher_without_horovod():
    done = run(
        """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name.startswith("horovod") else find(name, *a)
print("imported")
hvd.init()
""",
        OMPI_COMM_WORLD_SIZE="2",
    )
    assert done.stdout.strip() == "imported"
    assert done.returncode != 0
    assert "HorovodMissingError" in done.stderr


def test_what_is_reduced_in_place_shows_its_own_result_and_the_arguments_of_the_other_form():
    for name, other in (("allreduce_", "allreduce_async"), ("grouped_allreduce_", "grouped_allreduce_async")):
        ours, theirs = (inspect.signature(getattr(drop_in, each)) for each in (name, other))
        assert ours.parameters == theirs.parameters
        assert ours.return_annotation == "Any"
