"""`make gpu`: build Horovod for the one GPU of this machine, test and measure on it, without a network.

`carry`, run where there is a network, fills .gpu-carry/ with what the other steps install. `build`, `test` and `bench`
run on the GPU machine. They need a driver, g++, make, a CUDA toolkit with nvcc, and a Python 3.10 to 3.13 that has
NumPy and a CUDA build of torch. That Python's own packages are used, never changed: what is missing goes to build/gpu/.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CARRY = ROOT / ".gpu-carry"
BUILT = ROOT / "build" / "gpu"
PYTHON = BUILT / "venv" / "bin" / "python"
# A second Horovod, which takes CUDA tensors through host memory: NCCL refuses two ranks on one GPU.
THROUGH_HOST = BUILT / "through-host"
SDIST = CARRY / "horovod-0.28.1.tar.gz"

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
LIMIT_MIB = 60
PINNED = ("pytest", "pytest-timeout")
# Not carried: NumPy, 18 MB for each Python, and h5py, 5 MB, with which Keras writes files.
KERAS_NEEDS = ("absl-py", "namex", "optree")
# Of pytest, on Python 3.10: pip judges such conditions by the Python that runs it.
CONDITIONAL = ("exceptiongroup", "tomli")
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux1")


class GpuError(RuntimeError):
    """A step cannot go on; the message says why and what to do next."""


def say(text: str) -> None:
    """Print a line at once."""
    print(f"gpu: {text}", flush=True)


def requirements(python: str) -> tuple[list[str], list[str]]:
    """Return what to install on this Python ("3.10"), as pip takes it: with what it needs itself, and without."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needed = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    own = re.findall(r'^ *"([^"]+)"', needed.group(1), re.MULTILINE) if needed else []
    whole = [*(each for each in own if not each.startswith("numpy")), *KERAS_NEEDS]
    return [*whole, *(_pin(text, name, python) for name in PINNED)], ["ml-dtypes", _pin(text, "keras", python)]


def _pin(text: str, name: str, python: str) -> str:
    """Return the pin of `name` that holds for this Python; pip's markers look at the Python that runs it."""
    minor = int(python.split(".")[1])
    for pin, bound, limit in re.findall(rf"\"({name}==[^\";]+)(?:; python_version (<|>=) '3\.(\d+)')?\"", text):
        if not bound or (minor < int(limit)) == (bound == "<"):
            return str(pin)
    raise GpuError(f"pyproject.toml pins no {name} for Python {python}")


def tools() -> str:
    """Return pip and what builds Horovod as pip's requirements, with their hashes."""
    sys.path.insert(0, str(ROOT))
    from hvdtrain.horovod_build import packages

    return packages.requirement(packages.PIP, packages.PIP_HASHES) + packages.tool_requirements()


def place_tools() -> None:
    """Put what builds Horovod where `hvdtrain build` keeps it: the carried CMake is smaller than that of the hash."""
    sys.path.insert(0, str(ROOT))
    from hvdtrain.horovod_build import packages

    folder = packages.tools_folder(BUILT / "cache")
    if not folder.is_dir():
        command = [PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *packages.BUILD_TOOLS]
        run(command, env=offline(), quiet=True)


def run(command: Sequence[str | Path], *, env: dict[str, str] | None = None, quiet: bool = False) -> str:
    """Run a command; return what it printed if `quiet`.

    Raises:
        GpuError: it failed.
    """
    words = [str(word) for word in command]
    pipe = subprocess.PIPE if quiet else None
    done = subprocess.run(words, env=env, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in ((done.stdout or "") + (done.stderr or "")).splitlines() if line.strip()]
        raise GpuError(f"exit status {done.returncode}: {' '.join(words)}" + "".join(f"\n  {x}" for x in lines[-5:]))
    return done.stdout or ""


def carry() -> None:
    """Fill .gpu-carry/ for every Python, and say how large it is."""
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=".gpu-carry-") as scratch:
        folder = Path(scratch) / "carry"
        pinned = Path(scratch) / "tools.txt"
        pinned.write_text(tools())
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder]
        for python in PYTHONS:
            say(f"wheels for Python {python}")
            tags = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
            tags += [word for each in PLATFORMS for word in ("--platform", f"{each}_{os.uname().machine}")]
            whole, alone = requirements(python)
            run([*download, *tags, *whole, *CONDITIONAL], quiet=True)
            run([*download, *tags, "--no-deps", *alone], quiet=True)
            run([*download, *tags, "--no-deps", "--require-hashes", "--requirement", pinned], quiet=True)
        for wheel in folder.glob("cmake-*.whl"):
            _leave_out(wheel, ("cmake/data/bin/ctest", "cmake/data/bin/cpack"))
        say("Horovod's source")
        from hvdtrain.horovod_build import packages

        cache = Path(scratch) / "cache"
        shutil.copy(packages.fetch(cache, tools=packages.fetch_tools(cache)), folder / SDIST.name)
        size = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
        if size >= LIMIT_MIB:
            raise GpuError(f"what is carried is {size:.1f} MiB, and must stay below {LIMIT_MIB}")
        shutil.rmtree(CARRY, ignore_errors=True)
        folder.rename(CARRY)
    say(f"{CARRY.name}/ is {size:.1f} MiB, for Python {', '.join(PYTHONS)} on {os.uname().machine}")


def _leave_out(wheel: Path, names: Sequence[str]) -> None:
    """Write the wheel anew without these files: two thirds of CMake's are programs that the build does not start."""
    smaller = wheel.with_suffix(".smaller")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as part:
        for entry in whole.infolist():
            if entry.filename not in names:
                part.writestr(entry, whole.read(entry))
    smaller.replace(wheel)


def check_machine() -> None:
    """Raise GpuError where something is missing that cannot be carried."""
    if not SDIST.exists():
        raise GpuError(
            f"{CARRY.name}/ is empty: run `make gpu-carry` where there is a network, and bring that folder along"
        )
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if version not in PYTHONS:
        raise GpuError(
            f"Python {', '.join(PYTHONS)} will do; {sys.executable} is {version}: make gpu PYTHON=python3.12"
        )
    found = base("import json, numpy, torch; print(json.dumps([torch.__version__, torch.version.cuda]))")
    if not found or not json.loads(found)[1]:
        raise GpuError(
            f"{sys.executable} needs NumPy and a CUDA build of torch. Received: {found.strip() or 'neither'}"
        )
    say(f"Python {sys.version.split()[0]}, torch {json.loads(found)[0]} for CUDA {json.loads(found)[1]}")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        raise GpuError(f"no {header}: torch's headers need Python's (Debian, Ubuntu: apt-get install python3-dev)")
    missing = [name for name in ("g++", "make") if shutil.which(name) is None]
    if missing:
        raise GpuError(f"{' and '.join(missing)} not on PATH (Debian, Ubuntu: apt-get install g++ make)")


def check_gpu() -> None:
    """Raise GpuError without a GPU."""
    if shutil.which("nvidia-smi") is None or not (found := shown()):
        raise GpuError(
            "no GPU: nvidia-smi shows none. `make gpu-build HVDTRAIN_GPU_ARCH=90` goes as far as one can without"
        )
    say("; ".join(found))


def shown() -> list[str]:
    """Return name, driver and memory of each GPU of this machine."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def base(code: str) -> str:
    """Return what `code` prints in this Python, in an empty folder; "" where it fails."""
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=empty, check=False)
    return done.stdout if done.returncode == 0 else ""


def offline() -> dict[str, str]:
    """Return the environment of every step on the GPU machine."""
    return {
        **os.environ,
        "PATH": f"{PYTHON.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(CARRY),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "HVDTRAIN_CACHE": str(BUILT / "cache"),
        "HVDTRAIN_MPI": "0",
    }


def make_venv() -> None:
    """Make build/gpu/venv: this Python's packages, and on top what is missing of hvdtrain's needs."""
    done = BUILT / "venv" / "made-with"
    whole, alone = requirements(f"3.{sys.version_info[1]}")
    wanted = f"{sys.executable} {sys.version}\n{whole} {alone}"
    if done.exists() and done.read_text() == wanted:
        return
    # Without ensurepip, which Debian packages apart. Where this Python is itself in a virtual environment,
    # --system-site-packages would show the packages of the Python below it: name this one's folders instead.
    run([sys.executable, "-m", "venv", "--clear", "--without-pip", BUILT / "venv"], quiet=True)
    folders = base("import sys; print(*[p for p in sys.path if p.endswith('-packages')], sep='\\n')").splitlines()
    site = Path(run([PYTHON, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], quiet=True).strip())
    lines = [str(ROOT), *(f"import site; site.addsitedir({folder!r})" for folder in folders)]
    (site / "this-python.pth").write_text("\n".join(lines) + "\n")
    pip = next(CARRY.glob("pip-*.whl"))
    run([PYTHON, pip / "pip", "install", "--quiet", "--no-index", "--ignore-installed", pip], env=offline(), quiet=True)
    for words in (whole, ["--no-deps", *alone]):
        run([PYTHON, "-m", "pip", "install", "--quiet", *words], env=offline(), quiet=True)
    done.write_text(wanted)


def build(*, through_host: bool = True) -> None:
    """Build Horovod with NCCL into build/gpu/venv, and the one through the host beside it."""
    check_machine()
    arch = os.environ.get("HVDTRAIN_GPU_ARCH")
    if not arch:
        check_gpu()
    make_venv()
    place_tools()
    say(f"the environment is in {BUILT.relative_to(ROOT)}")
    command = [PYTHON, "-m", "hvdtrain.cli", "build", "--sdist", SDIST, "--without", "tensorflow"]
    command += ["--cuda-arch", arch] if arch else []
    run(command, env=offline())
    if not through_host:
        return
    wheels = BUILT / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    run([*command, "--through-host", "--no-install", "--wheel-dir", wheels], env=offline())
    shutil.rmtree(THROUGH_HOST, ignore_errors=True)
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        wheel.extractall(THROUGH_HOST)


def test(arguments: Sequence[str]) -> None:
    """Run tests/gpu; a skip is a failure."""
    env = {**offline(), "HVDTRAIN_TEST_GPU": "1", "HVDTRAIN_THROUGH_HOST": str(THROUGH_HOST)}
    run([PYTHON, "-m", "pytest", "tests/gpu", "-p", "no:cacheprovider", *arguments], env=env)


def bench(arguments: Sequence[str]) -> None:
    """Measure, for about three minutes unless something else is asked for; results go into build/gpu/results."""
    results = BUILT / "results"
    arguments = arguments or ["--launches", "1", "--rounds", "4"]
    run([PYTHON, "-m", "benchmarks", "--gpu", "--out", results, *arguments], env=offline())
    say(f"results are in {results.relative_to(ROOT)}")


def main() -> int:
    """Take the steps that were named, and say how long each took."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("steps", nargs="+", choices=("carry", "build", "test", "bench"))
    options, others = parser.parse_known_args()
    if others and options.steps not in (["test"], ["bench"]):
        parser.error(f"{' '.join(others)}: only test and bench alone take further arguments")
    step_of = {"carry": carry, "build": build, "test": lambda: test(others), "bench": lambda: bench(others)}
    failed = []
    try:
        if {"test", "bench"} & set(options.steps):
            check_gpu()
        for step in options.steps:
            begun = time.monotonic()
            try:
                step_of[step]()
            except GpuError as error:
                if step != "test":  # a machine that is lent for minutes still measures
                    raise
                failed.append(f"{step}: {error}")
            say(f"{step}: {time.monotonic() - begun:.0f} s")
    except GpuError as error:
        failed.append(str(error))
    for line in failed:
        print(f"gpu: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
