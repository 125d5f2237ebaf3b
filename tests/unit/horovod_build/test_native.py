from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from hvdtrain.horovod_build import cache, native
from hvdtrain.horovod_build.errors import CompileError
from hvdtrain.horovod_build.find import Cuda, Found, Framework, Mpi, Nccl
from hvdtrain.horovod_build.native import BuildProgress

CPU = Found((Framework("torch", "2.13.0+cpu"),), "g++ 12", None, None, None, ())
GPU = replace(
    CPU,
    mpi=Mpi("4.1.4", Path("/usr/bin/mpirun")),
    cuda=Cuda("13.0", Path("/usr/local/cuda")),
    nccl=Nccl("2.28.3", Path("/n/include"), Path("/n/lib/libnccl.so.2"), True),
    gpus=("9.0", "8.0", "9.0"),
)


def environment(found: Found, scratch: Path) -> dict[str, str]:
    chosen = native.settings(found)
    return native.environment(found, chosen, tools=Path("/tools"), scratch=scratch, record="{}", jobs=3)


def test_what_is_not_there_is_told_to_horovod_as_left_out(tmp_path: Path) -> None:
    env = environment(CPU, tmp_path)
    for name in ("HOROVOD_WITHOUT_TENSORFLOW", "HOROVOD_WITHOUT_MPI", "HOROVOD_WITHOUT_MXNET", "HOROVOD_WITH_PYTORCH"):
        assert env[name] == "1"
    assert "HOROVOD_GPU_OPERATIONS" not in env
    assert env["MAKEFLAGS"] == "-j3"


def test_the_cpp_standard_reaches_the_build_and_its_key() -> None:
    assert native.settings(CPU)["HVDTRAIN_CXX_STANDARD"] == "17"
    assert native.settings(replace(CPU, cxx_standard=20))["HVDTRAIN_CXX_STANDARD"] == "20"


def test_stray_horovod_variables_do_not_reach_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_GPU_OPERATIONS", "MPI")
    monkeypatch.setenv("HOROVOD_WITHOUT_PYTORCH", "1")
    env = environment(CPU, tmp_path)
    assert "HOROVOD_GPU_OPERATIONS" not in env
    assert "HOROVOD_WITHOUT_PYTORCH" not in env


def test_nccl_of_pip_gets_the_unversioned_link_that_the_linker_asks_for(tmp_path: Path) -> None:
    env = environment(GPU, tmp_path)
    link = Path(env["HOROVOD_NCCL_LIB"]) / "libnccl.so"
    assert link.readlink() == Path("/n/lib/libnccl.so.2")
    assert env["HOROVOD_NCCL_INCLUDE"] == "/n/include"
    assert (env["HOROVOD_GPU_OPERATIONS"], env["HOROVOD_NCCL_LINK"]) == ("NCCL", "SHARED")


def test_the_linker_finds_the_toolkit_of_pips_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "cu13"
    (home / "lib").mkdir(parents=True)
    (home / "lib/libcudart.so.13").touch()
    monkeypatch.setenv("LIBRARY_PATH", "/opt/lib")
    env = environment(replace(GPU, cuda=Cuda("13.0", home)), tmp_path)
    links, *others = env["LIBRARY_PATH"].split(":")
    assert (Path(links) / "libcudart.so").readlink() == home / "lib/libcudart.so.13"
    assert others == [str(home / "lib64"), str(home / "lib"), "/opt/lib"]
    assert env["CMAKE_LIBRARY_PATH"].split(":")[0] == links
    assert env["CUDA_HOME"] == env["HOROVOD_CUDA_HOME"] == str(home)


def test_a_wheel_looks_beside_itself_and_in_mpis_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setenv("LDFLAGS", "-Wl,-O1")
    monkeypatch.setattr(native, "output_of", lambda command: asked.append(command) or "/opt/mpi/lib\n")
    flags = native.settings(GPU)["LDFLAGS"]
    assert flags == "-Wl,-O1 -Wl,-rpath,/opt/mpi/lib -Wl,-rpath,$ORIGIN/../../nvidia/nccl/lib"
    assert asked == [["/usr/bin/mpicxx", "--showme:libdirs"]]
    assert native.settings(CPU)["LDFLAGS"] == "-Wl,-O1"


def test_the_same_toolkit_in_another_environment_makes_the_same_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "output_of", lambda command: None)
    elsewhere = replace(GPU, cuda=Cuda("13.0", Path("/other/site-packages/nvidia/cu13")))
    assert cache.key_parts(GPU, native.settings(GPU)) == cache.key_parts(elsewhere, native.settings(elsewhere))


def test_through_the_host_horovod_knows_of_cuda_and_has_no_gpu_operations(tmp_path: Path) -> None:
    env = environment(replace(GPU, through_host=True), tmp_path)
    assert env["HOROVOD_GPU"] == "CUDA"
    assert "HOROVOD_GPU_OPERATIONS" not in env
    assert native.settings(GPU) != native.settings(replace(GPU, through_host=True))  # two wheels in the cache


@pytest.mark.parametrize(
    ("gpus", "asked", "expected"),
    [(("9.0", "8.0", "9.0"), None, "80,90"), ((), None, "80,90"), (("9.0",), "8.6,12.0", "86,120")],
)
def test_kernels_are_compiled_for_the_gpus_that_are_here(
    gpus: tuple[str, ...], asked: str | None, expected: str
) -> None:
    assert native.settings(replace(GPU, gpus=gpus), cuda_arch=asked)["HOROVOD_BUILD_CUDA_CC_LIST"] == expected


def run(tmp_path: Path, setup_py: str) -> tuple[Path, str]:
    (tmp_path / "setup.py").write_text(setup_py)
    stream = io.StringIO()
    progress = BuildProgress(1, stream)
    env = {"PATH": "/usr/bin:/bin"}
    wheel = native.run(tmp_path, env=env, log=tmp_path / "build.log", progress=progress)
    return wheel, stream.getvalue()


def test_progress_is_makes_percent_with_the_time(tmp_path: Path) -> None:
    wheel, shown = run(
        tmp_path,
        "import pathlib, sys\n"
        "for i in (1, 5, 50, 100): print(f'[{i:3d}%] Building CXX object x.cc.o')\n"
        "out = pathlib.Path(sys.argv[-1]); out.mkdir(); (out / 'horovod-0.28.1-py3.whl').touch()\n",
    )
    assert wheel.name == "horovod-0.28.1-py3.whl"
    assert [line.split("·")[0].strip() for line in shown.splitlines()] == ["1 %", "50 %", "100 %"]
    assert " s" in shown


def test_a_failed_compile_names_the_log_and_its_first_error(tmp_path: Path) -> None:
    with pytest.raises(CompileError) as info:
        run(
            tmp_path,
            "import sys\nprint('fine so far')\nprint('a.cc:7:1: error: no such thing')\n"
            "print('b.cc:9:1: error: a later one')\nsys.exit(2)\n",
        )
    message = str(info.value)
    assert "first error: a.cc:7:1: error: no such thing" in message
    assert str(tmp_path / "build.log") in message
    assert "exit status 2" in message
    assert "fine so far" in (tmp_path / "build.log").read_text()


def test_a_full_disk_is_told_in_the_compilers_words(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="No space left on device"):
        run(tmp_path, "import sys\nprint('/tmp/ccX.s: No space left on device')\nsys.exit(1)\n")


def test_a_build_without_a_wheel_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="did not compile"):
        run(tmp_path, "print('nothing to do')\n")
