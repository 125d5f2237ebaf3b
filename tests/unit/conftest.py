"""The common part of tests of one process: a small PyTorch model, a Trainer over it, and no clock in hypothesis."""

from __future__ import annotations

import contextlib
import importlib
import os

import hypothesis
import pytest

from hvdtrain.distributed import world

# A busy machine is no failure of an example.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")

# Of Keras's backends torch starts in half of TensorFlow's time and traces nothing; `make keras-unit` has the others.
os.environ.setdefault("KERAS_BACKEND", "torch")

# Triton, of torch's builds for GPUs, crashes where TensorFlow was loaded before it: both bring LLVM.
with contextlib.suppress(ImportError):
    importlib.import_module("triton")


@pytest.fixture(autouse=True)
def _nobody_starts_horovod(monkeypatch):
    """Fail a test that starts Horovod in this process: MPI starts once, and the next start would end the process."""

    def refuse(*args, **kwargs):
        pytest.fail("this test starts Horovod: use the fixture `alone`, `hvd` or `make`, or a process of its own")

    with contextlib.suppress(ImportError):
        monkeypatch.setattr(importlib.import_module("horovod.common.basics").HorovodBasics, "init", refuse)


@pytest.fixture
def hvd(monkeypatch):
    """hvdtrain.torch on its stand-in for one process, whether or not Horovod is installed."""
    import hvdtrain.torch as hvdtrain_torch
    from hvdtrain.torch.ops import engine

    monkeypatch.setenv("HVDTRAIN_SOLO", "1")
    monkeypatch.setattr(world, "_loaded", {})
    monkeypatch.setattr(engine, "_module", None)
    hvdtrain_torch.init()
    yield hvdtrain_torch
    hvdtrain_torch.shutdown()


@pytest.fixture
def solo(monkeypatch):
    """Let hvdtrain be one process's, whether or not Horovod is installed, without a framework's drop-in."""
    monkeypatch.setenv("HVDTRAIN_SOLO", "1")
    monkeypatch.setattr(world, "_loaded", {})
    monkeypatch.setattr(world, "_world", world.SoloWorld())


@pytest.fixture
def alone(hvd):
    """Let Trainers of a test be one process's: a process whose MPI has ended cannot start Horovod again."""
    world.use(world.SoloWorld())
    yield
    world.use(None)


@pytest.fixture
def net():
    """Return what makes a model of 4 inputs and `outputs` outputs."""
    import torch

    def make(outputs=3):
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, outputs))

    return make


@pytest.fixture
def make(net):
    """Return what makes a Trainer: of a new net with SGD and CrossEntropyLoss, where nothing else is given."""
    import torch

    import hvdtrain

    def trainer(model=None, **options):
        model = model or net()
        if "optimizer" not in options:
            options["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
        options.setdefault("loss", torch.nn.CrossEntropyLoss())
        return hvdtrain.Trainer(model, **options)

    world.use(world.SoloWorld())
    yield trainer
    world.use(None)


@pytest.fixture
def nvidia_smi(monkeypatch, tmp_path):
    """Return what puts an nvidia-smi on PATH that lists these GPUs (-L) and answers each query with these lines.

    The list is text, or a number of H100s.
    """

    def install(listed, queried=""):
        folder = tmp_path / "driver"
        folder.mkdir(exist_ok=True)
        if isinstance(listed, int):
            listed = "".join(f"GPU {n}: NVIDIA H100 (UUID: GPU-{n})\n" for n in range(listed))
        (folder / "listed").write_text(listed)
        (folder / "queried").write_text(queried)
        program = folder / "nvidia-smi"
        program.write_text(f'#!/bin/sh\n[ "$1" = -L ] && exec cat {folder}/listed\nexec cat {folder}/queried\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return install
