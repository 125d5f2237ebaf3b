"""One process is one rank; several silent copies are refused; importing costs nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from hvdtrain.distributed import launch_environment, tuning, world
from hvdtrain.errors import EngineConflictError, HorovodMismatchError, HorovodMissingError, HvdTrainError, LaunchError
from hvdtrain.horovod_build import installed

YIELD = "OMPI_MCA_mpi_yield_when_idle"
LAUNCHERS = {
    "horovodrun": {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"},
    "mpirun": {"OMPI_COMM_WORLD_SIZE": "2"},
    "mpiexec": {"PMI_SIZE": "2"},
    "Slurm": {"SLURM_NTASKS": "2"},
    "srun": {"SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "8"},
    "torchrun": {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"},
}


@pytest.fixture(autouse=True)
def nothing_launched(monkeypatch):
    """A clean environment and a fresh process state."""
    monkeypatch.setenv(tuning.KEEP_MEMORY, "0")  # this process goes on to run other tests
    for name in (
        "HOROVOD_RANK",
        "PMIX_RANK",
        "HVDTRAIN_SOLO",
        tuning.FUSION,
        *(name for each in LAUNCHERS.values() for name in each),
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(world, "_world", None)
    monkeypatch.setattr(world, "_loaded", {})


@pytest.fixture
def no_horovod(monkeypatch):
    find = world.importlib.util.find_spec
    monkeypatch.setattr(world.importlib.util, "find_spec", lambda name: None if name == "horovod" else find(name))


def test_importing_hvdtrain_imports_no_framework_and_no_horovod():
    code = "import sys, hvdtrain; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"torch", "tensorflow", "keras", "jax", "horovod", "numpy", "rich", "typer", "safetensors"}
    assert not heavy & set(modules)


def test_one_process_without_horovod_is_rank_0_of_1(no_horovod):
    alone = world.init("torch")
    assert (alone.rank, alone.size, alone.is_root, alone.engine) == (0, 1, True, "solo")
    assert world.current() is alone is world.init("torch")


@pytest.mark.parametrize("name", LAUNCHERS)
def test_several_processes_without_horovod_are_refused(name, monkeypatch, no_horovod):
    for variable, value in LAUNCHERS[name].items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(HorovodMissingError, match=rf"{name} .*2.*hvdtrain build"):
        world.init("torch")


def test_horovod_built_for_another_version_is_refused_under_a_launcher(monkeypatch, caplog):
    monkeypatch.setattr(installed, "built_for", lambda: {"torch": "1.0"})
    monkeypatch.setattr(installed, "framework_version", lambda framework: "2.13.0")
    monkeypatch.setattr(world.importlib.util, "find_spec", lambda name: object())
    assert world.load_engine("torch") is None
    assert "built for torch 1.0, but torch 2.13.0 is installed" in caplog.text
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(HorovodMismatchError, match=r"torch 1\.0.*torch 2\.13\.0.*hvdtrain build"):
        world.load_engine("torch")
    with pytest.raises(HorovodMismatchError, match="built without tensorflow"):
        world.load_engine("tensorflow")


def test_horovod_built_for_another_cpu_is_refused_before_it_is_loaded(monkeypatch, caplog):
    monkeypatch.setattr(installed, "mismatch", lambda framework: None)
    monkeypatch.setattr(installed, "record", lambda: {"cpu": "avx amx9"})
    monkeypatch.setattr(world.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(world.importlib, "import_module", lambda name: pytest.fail("an illegal instruction"))
    assert world.load_engine("torch") is None
    assert "built for CPUs with " in caplog.text
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(HorovodMismatchError, match=r"amx9.*which this host's CPU lacks.*hvdtrain build"):
        world.load_engine("torch")


class FakeHorovod:
    """Sees one rank, whatever was launched."""

    def __init__(self, initialized=False):
        self.initialized = initialized

    def is_initialized(self):
        return self.initialized

    def init(self):
        pass

    def shutdown(self):
        pass

    def size(self):
        return 1

    def rank(self):
        return 0

    def local_size(self):
        return 1

    def nccl_built(self):
        return 0

    def mpi_built(self):
        return True

    def cuda_built(self):
        return False

    def local_rank(self):
        return 0


class TestGpu:
    """A rank that would compute on a GPU needs a Horovod that can."""

    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch):
        torch = pytest.importorskip("torch")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
        monkeypatch.setattr(world, "_world", None)
        monkeypatch.setitem(world._loaded, "torch", FakeHorovod())

    def test_a_rank_with_a_gpu_is_refused_a_horovod_without_gpu_operations(self, monkeypatch):
        monkeypatch.setenv("HOROVOD_SIZE", "4")
        monkeypatch.setenv("HOROVOD_RANK", "3")
        monkeypatch.setattr(FakeHorovod, "init", None)  # before it waits for the others
        with pytest.raises(HorovodMismatchError, match=r"^rank 3: .*NVIDIA H100.*hvdtrain build.*CUDA_VISIBLE_DEVICES"):
            world.init("torch")

    @pytest.mark.parametrize("why", ["alone", "GPU operations", "a script of Horovod's own words", "JAX"])
    def test_who_sends_no_tensor_from_a_gpu_or_may_is_not(self, why, monkeypatch):
        if why != "alone":
            monkeypatch.setenv("HOROVOD_SIZE", "1")
            monkeypatch.setenv("HOROVOD_ELASTIC", "1")  # more may come
        if why == "GPU operations":
            monkeypatch.setattr(FakeHorovod, "cuda_built", lambda self: True)
        if why == "a script of Horovod's own words":
            assert world.init_engine("torch").size() == 1
        elif why == "JAX":
            pytest.importorskip("jax")
            assert world.init("jax").size == 1
        else:
            assert world.init("torch").device == "cuda:0"

    def test_torch_for_amd_gpus_is_refused(self, monkeypatch):
        monkeypatch.setattr("torch.version.hip", "7.0")
        monkeypatch.setenv("HOROVOD_SIZE", "2")
        with pytest.raises(HorovodMismatchError, match=r"AMD GPUs \(ROCm 7\.0\).*hvdtrain build"):
            world.init("torch")


def test_a_launcher_that_announces_more_ranks_than_horovod_sees_is_refused(monkeypatch):
    monkeypatch.setitem(world._loaded, "torch", FakeHorovod())
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.raises(LaunchError, match=r"4 ranks.*sees 1 rank.*horovodrun"):
        world.init_engine("torch")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert world.init_engine("torch").size() == 1


def test_srun_without_pmix_is_refused_before_mpi_ends_the_process(monkeypatch):
    monkeypatch.setitem(world._loaded, "torch", FakeHorovod())
    monkeypatch.setattr(FakeHorovod, "init", None)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(LaunchError, match=r"srun \(SLURM_STEP_NUM_TASKS=2.*srun --mpi=pmix"):
        world.init_engine("torch")


def test_srun_with_pmix_reaches_horovod(monkeypatch):
    monkeypatch.setitem(world._loaded, "torch", FakeHorovod())
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("PMIX_RANK", "0")
    with pytest.raises(LaunchError, match=r"sees 1 rank"):
        world.init_engine("torch")


def test_a_second_init_decides_nothing_and_needs_no_other_rank(monkeypatch):
    monkeypatch.setitem(world._loaded, "torch", FakeHorovod(initialized=True))
    monkeypatch.setattr(tuning, "prepare", None)
    monkeypatch.setattr(tuning, "share_cores", None)
    assert world.init_engine("torch").size() == 1


def test_one_process_on_purpose_is_allowed_under_a_launcher(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("HVDTRAIN_SOLO", "1")
    assert world.init("torch").size == 1


def test_two_engines_in_one_process_are_refused(monkeypatch):
    monkeypatch.setitem(world._loaded, "torch", FakeHorovod())
    with pytest.raises(EngineConflictError, match=r"Horovod for torch.*request for tensorflow"):
        world.load_engine("tensorflow")


def test_yielding_waits_are_the_default_and_the_users_choice_wins(monkeypatch):
    monkeypatch.setitem(world._loaded, "torch", FakeHorovod())
    monkeypatch.delenv(YIELD, raising=False)
    world.init_engine("torch")
    assert os.environ[YIELD] == "1"
    monkeypatch.setenv(YIELD, "0")
    world.init_engine("torch")
    assert os.environ[YIELD] == "0"


def test_the_world_before_init_is_an_error_that_says_what_to_call():
    with pytest.raises(HvdTrainError, match=r"hvdtrain\.init\(\)"):
        world.current()


def test_horovodrun_inside_slurm_is_horovodruns(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    assert launch_environment.detect().name == "horovodrun"
    assert launch_environment.detect().size == 2


@pytest.mark.parametrize(("framework", "engine"), [("torch", "torch"), ("tensorflow", "tensorflow"), ("jax", "torch")])
def test_each_framework_has_its_engine(framework, engine):
    assert launch_environment.engine_for(framework) == engine


def test_an_unknown_framework_is_an_error_that_names_the_known():
    with pytest.raises(ValueError, match=r"torch.*keras.*'mxnet'"):
        world.init("mxnet")


def test_collectives_of_one_rank_return_what_they_were_given():
    alone = world.SoloWorld()
    array = np.arange(3.0)
    for result in (alone.allreduce(array), alone.allgather(array), alone.broadcast(array)):
        assert result.tolist() == [0, 1, 2]
        assert result is not array
    assert alone.allgather_object({"a": [1]}) == [{"a": [1]}]
    assert alone.broadcast_object(None) is None
    alone.barrier()
    with pytest.raises(ValueError, match="root=1"):
        alone.broadcast(array, root=1)
    for dtype in ("bool", "uint8", "int16", "uint64"):  # as on several ranks, where Horovod has no sum of these
        with pytest.raises(ValueError, match=f"Received: {dtype} on rank 0. Convert it"):
            alone.allreduce(np.ones(2, dtype))


def test_jax_is_known_by_its_name_though_horovod_imports_torch(monkeypatch):
    """Its memory is kept in another way than torch's: taken for torch, an MLP's step took twice as long."""
    pytest.importorskip("torch")  # as Horovod's library does, before anything is decided
    monkeypatch.setitem(world._loaded, "torch", FakeHorovod())
    monkeypatch.setattr(world, "_world", None)
    monkeypatch.delitem(sys.modules, "keras", raising=False)

    class Asked(Exception):  # noqa: N818
        pass

    def prepare(*_, on_jax, **__):
        raise Asked(on_jax)

    monkeypatch.setattr(tuning, "prepare", prepare)
    for framework, expected in (("jax", True), ("torch", False)):
        with pytest.raises(Asked, match=str(expected)):
            world.init(framework)


def test_a_horovod_that_another_hvdtrain_built_is_reported_once_a_process(monkeypatch, caplog):
    world._warn_of_other_changes.cache_clear()
    monkeypatch.setattr(installed, "has_other_changes", lambda: True)
    for _ in range(3):  # the rounds of an elastic job
        world._warn_of_other_changes()
    assert len(caplog.records) == 1
    world._warn_of_other_changes.cache_clear()
