"""JAX is bound to the local rank's GPU before it starts; GPUs are faked here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("keras")
jax = pytest.importorskip("jax")

from hvdtrain.distributed import launch_environment, world  # noqa: E402
from hvdtrain.errors import HvdTrainError  # noqa: E402
from hvdtrain.keras import basics, jax_device  # noqa: E402


@pytest.fixture
def updates(monkeypatch):
    """A JAX that has not started and would find the GPUs of CUDA_VISIBLE_DEVICES; returns what is set in it."""
    seen = {}
    config = SimpleNamespace(jax_platforms=None, update=seen.__setitem__)
    monkeypatch.setattr(jax_device, "jax", SimpleNamespace(config=config))
    monkeypatch.setattr(jax_device, "_started", lambda: False)
    monkeypatch.setattr(jax_device.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("HOROVOD_SIZE", "4")
    monkeypatch.setattr(jax_device.gpus.toolchain, "gpu_drivers", lambda: (["580.65.06"], ""))
    monkeypatch.setattr(jax_device.gpus, "lost", lambda: "")
    return seen


def test_jax_sees_the_local_ranks_gpu_alone(updates):
    assert jax_device.pick_device(1) == "cuda:1"
    assert updates == {"jax_cuda_visible_devices": "1"}


def test_a_gpu_that_the_launcher_chose_is_kept(updates, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert jax_device.pick_device(3) == "cuda:0"


@pytest.mark.parametrize(
    ("visible", "local_rank", "index"),
    [("4,5", 2, 0), ("GPU-aa,GPU-bb", 1, 1), ("MIG-1,MIG-2", 1, 0), ("0,-1,1", 1, 0)],
    ids=["two a rank", "UUIDs", "CUDA shows one MIG instance", "CUDA stops at -1"],
)
def test_gpus_that_the_launcher_names_are_counted_as_cuda_does(updates, monkeypatch, visible, local_rank, index):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert jax_device.pick_device(local_rank) == f"cuda:{index}"
    assert updates == {"jax_cuda_visible_devices": str(index)}


def test_more_local_ranks_than_gpus_are_refused(updates, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(jax_device.Path, "glob", lambda self, pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    with pytest.raises(RuntimeError, match="local rank 2 has no GPU: this host shows 2"):
        jax_device.pick_device(2)


def test_a_driver_too_old_for_jax_is_an_error_before_jax_falls_back_to_the_host(updates, monkeypatch):
    monkeypatch.setattr(jax_device.gpus.toolchain, "gpu_drivers", lambda: (["515.1"], ""))
    with pytest.raises(HvdTrainError, match=r"local rank 1: the NVIDIA driver is 515\.1, and CUDA 13 needs"):
        jax_device.pick_device(1)
    assert updates == {}


def test_a_lost_gpu_ends_ranks_of_jax_unless_the_launcher_chose_theirs(updates, monkeypatch):
    monkeypatch.setattr(jax_device.gpus, "lost", lambda: "a GPU no longer answers")
    assert jax_device.pick_device(1) == "cuda:1"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(jax_device.Path, "glob", lambda self, pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    with pytest.raises(HvdTrainError, match="local rank 1: a GPU no longer answers"):
        jax_device.pick_device(1)


@pytest.mark.parametrize("how", ["platform", "hidden"])
def test_without_gpus_nothing_is_set(updates, monkeypatch, how):
    if how == "platform":
        monkeypatch.setattr(jax_device.jax.config, "jax_platforms", "cpu")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert jax_device.pick_device(1) == "cpu"
    assert updates == {}


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_jax_that_already_took_several_gpus_is_refused(updates, monkeypatch, count):
    gpus = [SimpleNamespace(platform="gpu", id=index) for index in range(count)]
    monkeypatch.setattr(jax_device, "_started", lambda: True)
    monkeypatch.setattr(jax_device.jax, "local_devices", lambda: gpus, raising=False)
    if count < 2:
        assert jax_device.pick_device(1) == ("cuda:0" if count else "cpu")
        return
    with pytest.raises(HvdTrainError, match=r"Call hvdtrain.init\(\) first.*Received: 2 GPUs"):
        jax_device.pick_device(1)


def test_one_process_alone_keeps_all_gpus(updates, monkeypatch):
    monkeypatch.delenv("HOROVOD_SIZE")
    assert jax_device.pick_device(0) == "cuda:0"
    assert updates == {}


@pytest.mark.parametrize("arguments", [{}, {"comm": [0, 1]}])
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_init_binds_jax_where_keras_runs_on_it(monkeypatch, backend, arguments):
    bound = []

    class Horovod:
        nccl_built = mpi_built = rank = staticmethod(lambda: 0)
        size = local_size = staticmethod(lambda: 1)
        local_rank = staticmethod(lambda: 1)
        is_initialized = staticmethod(lambda: False)
        init = staticmethod(lambda **given: bound.append(given))

    monkeypatch.setattr(world, "_world", None)
    monkeypatch.setitem(world._loaded, "torch", Horovod)
    monkeypatch.setattr(launch_environment, "keras_backend", lambda: backend)
    monkeypatch.setattr(jax_device, "pick_device", lambda local_rank: f"cuda:{local_rank}")
    basics.init(**arguments)
    assert bound == [arguments]
    assert world.current().device == ("cuda:1" if backend == "jax" else "cpu")
