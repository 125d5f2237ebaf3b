"""Checks of the Dockerfile's text; `make docker-test` builds its images and runs them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCKERFILE = (Path(__file__).resolve().parents[3] / "Dockerfile").read_text(encoding="utf-8")
STAGES = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM|\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("stage", ["cpu-builder", "cpu", "gpu-builder", "gpu"])
def test_path_is_the_bases_with_the_environment_before_it(stage: str) -> None:
    assert re.findall(r"PATH=\S+", STAGES[stage]) == ["PATH=/opt/hvdtrain/bin:$PATH"]


@pytest.mark.parametrize("stage", ["cpu-builder", "gpu-builder"])
def test_layer_of_frameworks_has_the_version_that_pyproject_asks_for(stage: str) -> None:
    assert "echo '__version__ = \"0\"' > hvdtrain/__init__.py" in STAGES[stage]


@pytest.mark.parametrize("stage", ["cpu", "gpu"])
def test_health_check_takes_no_gpu_memory_and_the_default_command_proves_the_data_planes(stage: str) -> None:
    assert re.findall(r" CMD (\[.*\])$", STAGES[stage], re.MULTILINE) == ['["hvdtrain", "doctor", "--no-allreduce"]']
    assert re.findall(r"^CMD (\[.*\])$", STAGES[stage], re.MULTILINE) == ['["hvdtrain", "doctor"]']
    assert re.findall(r"^USER (.*)$", STAGES[stage], re.MULTILINE) == ["hvdtrain"]


def test_the_gpu_image_needs_no_base_with_cuda_and_asks_for_the_hosts_driver() -> None:
    bases = re.findall(r"^FROM (\S+) AS", DOCKERFILE, re.MULTILINE)
    assert set(bases) == {"${DEBIAN_IMAGE}"}
    (extras,) = re.findall(r"^ARG EXTRAS=(\S+)$", STAGES["gpu-builder"], re.MULTILINE)
    assert {"torch", "jax-cuda", "gpu-build"} <= set(extras.split(","))
    assert "HVDTRAIN_GPU=1" in STAGES["gpu-builder"]
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in STAGES["gpu"]


@pytest.mark.parametrize("stage", ["cpu", "gpu"])
def test_runtime_stage_installs_of_build_tools_what_torch_compile_needs(stage: str) -> None:
    installed = set(STAGES[stage].split())
    assert not {"make", "cmake", "build-essential", "libopenmpi-dev", "python3-dev"} & installed
    assert {"g++", "libpython3-dev"} <= installed
    assert {"openmpi-bin", "openssh-server", "openssh-client", "--no-install-recommends"} <= installed


def test_no_package_source_is_named_so_that_the_users_own_configuration_decides() -> None:
    assert not re.search(r"https?://|index-url", DOCKERFILE)
