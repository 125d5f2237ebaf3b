"""This host's C++ compiler, Python headers and GPU driver.

This file may import the standard library only: `scripts/bootstrap.py` reads it before anything is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

OLDEST_DRIVER = 580  # NVIDIA's for programs built for CUDA 13, as torch and JAX are
_OLDEST_DRIVERS = {"12": 525, "13": OLDEST_DRIVER}  # for programs of a CUDA major version
_STANDARD_DATES = {17: 201703, 20: 202002, 23: 202302}  # __cplusplus in a compiler that knows a standard


def compiler_command() -> str | None:
    """Return the C++ compiler as it is called: CXX, else the first on PATH; None where there is none."""
    return os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)


def lacks_standard(compiler: str, standard: int) -> str:
    """Compile a few lines by a C++ standard; return the compiler's first error, "" where it knows the standard."""
    command = [*compiler.split(), f"-std=c++{standard}", "-fsyntax-only", "-x", "c++", "-"]
    date = _STANDARD_DATES.get(standard, 0)
    text = f"#include <string>\n#if __cplusplus < {date}L\n#error no C++{standard}\n#endif\n"  # as headers ask
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    errors = [line.strip() for line in done.stderr.splitlines() if "error" in line]
    return [*errors, f"exit status {done.returncode}"][0]


def missing_python_header() -> str:
    """Return the message for a Python that came without its C headers, "" where they are there."""
    # Some distributions' Pythons name another folder than that of their package.
    places = (sysconfig.get_path("include"), sysconfig.get_config_var("INCLUDEPY") or "")
    header = Path(places[0], "Python.h")
    if header.is_file() or Path(places[1], "Python.h").is_file():
        return ""
    name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return (
        f"Python's C headers are missing: {header}. Install them (Debian, Ubuntu: apt-get install {name}-dev; Fedora: "
        f"dnf install {name}-devel)."
    )


def old_driver(driver: str, cuda: str) -> int:
    """Return the oldest NVIDIA driver for programs of a CUDA version, where `driver` is older; else 0."""
    major, oldest = driver.partition(".")[0], _OLDEST_DRIVERS.get(cuda.partition(".")[0], 0)
    return oldest if major.isdigit() and int(major) < oldest else 0


def gpu_drivers() -> tuple[list[str], str]:
    """Return the driver's version once for each GPU, and why there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return [], "no GPU: no nvidia-smi, which comes with the driver"
    except subprocess.TimeoutExpired:
        return [], "no GPU: nvidia-smi did not answer within 30 s"
    versions = [line.strip() for line in done.stdout.splitlines() if line.strip()[:1].isdigit()]
    if done.returncode != 0 or not versions:
        said = (done.stdout + done.stderr).strip().splitlines()
        return [], f"no GPU: nvidia-smi says {said[0] if said else 'nothing'}"
    return versions, ""
