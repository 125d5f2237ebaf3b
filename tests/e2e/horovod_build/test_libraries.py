"""The libraries that the installed Horovod needs, and the folders where it looks for them, read from the files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hvdtrain.horovod_build import find, installed
from hvdtrain.horovod_build.find import find_torch

NCCL_WHEEL = "$ORIGIN/../../nvidia/nccl/lib"


def libraries() -> list[Path]:
    folder = installed.package_folder("horovod")
    assert folder, "Horovod is not installed: hvdtrain build"
    found = sorted(folder.glob("*/mpi_lib*.so"))
    assert found
    return found


def dynamic(library: Path, tag: str) -> list[str]:
    """The values of one tag of an ELF file's dynamic section: NEEDED, RUNPATH."""
    text = subprocess.run(["readelf", "-d", "-W", library], capture_output=True, text=True, check=True).stdout
    return re.findall(rf"\({tag}\).*\[(.*)\]", text)


def searched(library: Path) -> list[str]:
    assert not dynamic(library, "RPATH"), "an RPATH comes before LD_LIBRARY_PATH"
    return [folder for entry in dynamic(library, "RUNPATH") for folder in entry.split(":")]


def test_libraries_look_for_others_beside_themselves_and_where_the_system_keeps_its_own() -> None:
    builders = [sys.prefix, tempfile.gettempdir(), str(Path.home())]
    for library in libraries():
        for folder in searched(library):
            assert folder.startswith(("$ORIGIN/", "/")), f"{library}: {folder!r}"
            assert not any(Path(folder).is_relative_to(own) for own in builders), f"{library}: {folder}"
            assert "site-packages" not in folder, f"{library}: {folder}, an environment's"


@pytest.fixture
def torch_library() -> Path:
    torch = find_torch()
    if torch is None or not torch.cuda:
        pytest.skip("torch is a CPU build")
    if not installed.record().get("nccl"):
        pytest.skip("Horovod was built without NCCL, as beside TensorFlow's CPU build")
    (library,) = [library for library in libraries() if library.parent.name == "torch"]
    return library


@pytest.mark.nccl
def test_nccl_is_called_and_comes_from_the_wheel_that_torch_itself_runs_on(torch_library: Path) -> None:
    undefined = subprocess.run(["nm", "-D", "-u", torch_library], capture_output=True, text=True, check=True).stdout
    assert {"ncclAllReduce", "ncclBroadcast", "ncclCommInitRank"} <= set(undefined.split())
    assert "libnccl.so.2" in dynamic(torch_library, "NEEDED")
    assert NCCL_WHEEL in searched(torch_library)
    env = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    loaded = subprocess.run(["ldd", torch_library], capture_output=True, text=True, check=True, env=env).stdout
    (path,) = re.findall(r"libnccl\.so\.2 => (\S+)", loaded)
    wheel = find.find_nccl()
    assert wheel is not None
    assert Path(path).resolve() == wheel.library.resolve()


@pytest.mark.nccl
def test_kernels_are_compiled_in_for_the_architectures_that_were_asked_for(torch_library: Path) -> None:
    # nvcc's own section; without a GPU here, A100's and H100's.
    sections = subprocess.run(["readelf", "-S", "-W", torch_library], capture_output=True, text=True, check=True).stdout
    assert ".nv_fatbin" in sections
    assert installed.record()["cuda"].split(".")[0] == (find_torch() or pytest.fail("no torch")).cuda.split(".")[0]


@pytest.mark.nccl
def test_a_build_with_nccl_works_on_a_machine_without_a_driver(torch_library: Path, tmp_path: Path) -> None:
    assert not [needed for needed in dynamic(torch_library, "NEEDED") if needed.startswith("libcuda.so")]
    code = (
        "import torch, hvdtrain\n"
        "world = hvdtrain.init('torch')\n"
        "import horovod.torch as hvd\n"
        "assert hvd.nccl_built() and hvd.cuda_built(), 'built without NCCL'\n"
        "assert hvd.allreduce(torch.ones(3)).tolist() == [1, 1, 1]\n"
        "print('done')\n"
    )
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "done"
