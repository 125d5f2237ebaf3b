"""JAX is bound to the local rank's GPU before it starts; GPUs are faked here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("keras")
jax = pytest.importorskip("jax")

from hvdtrain import launcher, world  # noqa: E402
from hvdtrain.errors import HvdTrainError  # noqa: E402
from hvdtrain.keras import jax_device  # noqa: E402


@pytest.fixture
def updates(monkeypatch):
    """A JAX that has not started and would find the GPUs of CUDA_VISIBLE_DEVICES; returns what it is told."""
    seen = {}
    config = SimpleNamespace(jax_platforms=None, update=seen.__setitem__)
    monkeypatch.setattr(jax_device, "jax", SimpleNamespace(config=config))
    monkeypatch.setattr(jax_device, "_started", lambda: False)
    monkeypatch.setattr(jax_device.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    return seen


def test_jax_sees_the_local_ranks_gpu_alone(updates):
    assert jax_device.bind(1) == "cuda:1"
    assert updates == {"jax_cuda_visible_devices": "1"}


def test_a_gpu_that_the_launcher_chose_is_kept(updates, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert jax_device.bind(3) == "cuda:0"


def test_more_local_ranks_than_gpus_are_refused(updates):
    with pytest.raises(RuntimeError, match="local rank 2 has no GPU: this host shows 2"):
        jax_device.bind(2)


@pytest.mark.parametrize("how", ["platform", "hidden"])
def test_without_gpus_nothing_is_set(updates, monkeypatch, how):
    if how == "platform":
        monkeypatch.setattr(jax_device.jax.config, "jax_platforms", "cpu")
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert jax_device.bind(1) == "cpu"
    assert updates == {}


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_jax_that_already_took_several_gpus_is_refused(updates, monkeypatch, count):
    gpus = [SimpleNamespace(platform="gpu", id=index) for index in range(count)]
    monkeypatch.setattr(jax_device, "_started", lambda: True)
    monkeypatch.setattr(jax_device.jax, "local_devices", lambda: gpus, raising=False)
    if count < 2:
        assert jax_device.bind(1) == ("cuda:0" if count else "cpu")
        return
    with pytest.raises(HvdTrainError, match=r"Call hvdtrain.init\(\) first.*Received: 2 GPUs"):
        jax_device.bind(1)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_init_binds_jax_where_keras_runs_on_it(monkeypatch, backend):
    bound = []

    class TwoRanks(world.SoloWorld):
        engine, size, local_rank = "torch", 2, 1

    monkeypatch.setattr(world, "_world", None)
    monkeypatch.setattr(world, "init_engine", lambda engine, on_jax: object())
    monkeypatch.setattr(world, "HorovodWorld", lambda engine, module: TwoRanks())
    monkeypatch.setattr(launcher, "keras_backend", lambda: backend)
    monkeypatch.setattr(jax_device, "bind", bound.append)
    world.init("keras")
    assert bound == ([1] if backend == "jax" else [])
