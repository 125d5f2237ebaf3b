"""Which frameworks are installed, whether the tests ran on them, and which C++ they need; imports none of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from hvdtrain.horovod_build.errors import BuildError
from hvdtrain.horovod_build.installed import framework_pin, framework_version, package_folder

# [first, last): releases that the tests ran on. Widen after a test run, not before.
TESTED = {"torch": ("2.11", "2.16"), "tensorflow": ("2.21", "2.22")}

# The header that refuses an older C++ standard than its framework was written for.
_ASKS_FOR_A_STANDARD = {"torch": "ATen/ATen.h", "tensorflow": "absl/base/policy_checks.h"}


@dataclass(frozen=True)
class Framework:
    """An installed framework; `cuda` and `rocm` are the versions that it was built for, "" for a CPU build."""

    name: str
    version: str
    cuda: str = ""
    rocm: str = ""


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
    finders: dict[str, Callable[[], Framework | None]] = {"torch": find_torch, "tensorflow": find_tensorflow}
    found = tuple(f for name, find in finders.items() if name not in without and (f := find()) is not None)
    if not found:
        left_out = f" (left out: {', '.join(sorted(without & set(finders)))})" if without & set(finders) else ""
        raise BuildError(
            f"Neither torch nor tensorflow is installed in this environment{left_out}. Horovod is built for them, and "
            "JAX trains through either: install one (pip install torch, or pip install tensorflow), then try again."
        )
    for framework in found:
        if framework.rocm:
            raise BuildError(
                f"{framework.name} {framework.version} is built for AMD GPUs (ROCm {framework.rocm}), which hvdtrain "
                f"does not support. Install its CUDA or CPU build, or leave it out with --without {framework.name}."
            )
        version = _version(framework)
        if not force and version is not None and version < Version(TESTED[framework.name][0]):
            raise BuildError(
                f"{framework.name} {framework.version} is older than all that the tests ran on. Run: "
                f"{command_for_tested(framework.name)}, or try all the same with --force."
            )
    return found


def command_for_tested(name: str) -> str:
    """Return the command that installs the newest release of a framework that the tests ran on."""
    first, last = TESTED[name]
    return f"pip install '{name}>={first},<{last}'"


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
                f"{framework.name} {framework.version} came without its C++ headers: {header} is missing. Install it "
                f"whole: pip install --force-reinstall --no-deps {pin}"
            )
        # `#if __cplusplus < 202002L`, then `#error`: a standard's year and month.
        years = re.findall(r"__cplusplus\s*<\s*20(\d\d)\d\dL", header.read_text(encoding="utf-8", errors="replace"))
        standards += [int(year) for year in years]
    return max(standards)
