"""Find the installed Horovod, and the framework versions it was built for, from files; nothing is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any, Literal

Plane = Literal["mpi", "gloo", "nccl"]  # what carries the bytes between ranks

# Horovod's metadata.json calls PyTorch "pytorch"; TensorFlow comes as several distributions of one version.
_METADATA_KEYS = {"torch": "pytorch", "tensorflow": "tensorflow"}
_DISTRIBUTIONS = {
    "torch": ("torch",),
    "tensorflow": (
        "tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-rocm", "tensorflow-cpu-aws", "tf-nightly",
    ),
}  # fmt: skip


# [first, last): releases that the tests ran on. Widen after a test run, not before.
TESTED = {"torch": ("2.11", "2.16"), "tensorflow": ("2.21", "2.22")}


def command_for_tested(name: str) -> str:
    """Return the command that installs the newest release of a framework that the tests ran on."""
    first, last = TESTED[name]
    return f"pip install '{name}>={first},<{last}'"


def how_to_build() -> str:
    """Return the command that builds Horovod here. Where JAX is alone, the command installs torch first."""
    if any(map(framework_version, TESTED)):
        return "hvdtrain build"
    return f"{command_for_tested('torch')} && hvdtrain build"


def version_of(distribution: str) -> str:
    """Return an installed distribution's version; "" where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def framework_pin(framework: str) -> tuple[str, str] | None:
    """Return the distribution of "torch" or "tensorflow" and its version; None where it is not installed."""
    return next(((name, version) for name in _DISTRIBUTIONS[framework] if (version := version_of(name))), None)


def framework_version(framework: str) -> str | None:
    """Return the installed version of "torch" or "tensorflow"; None where it is not installed."""
    found = framework_pin(framework)
    return found[1] if found else None


def package_folders(name: str) -> list[Path]:
    """Return the folders of an importable package without importing it: several of a namespace's, as `nvidia` is."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    return [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]


def package_folder(name: str) -> Path | None:
    """Return the folder of an importable package without importing it."""
    return next(iter(package_folders(name)), None)


def metadata() -> dict[str, Any]:
    """Return what Horovod's build wrote about itself; {} where there is none, or it cannot be read."""
    folder = package_folder("horovod")
    try:
        text = (folder / "metadata.json").read_text(encoding="utf-8") if folder else "{}"
        # Horovod may leave a comma before the closing brace, which JSON does not allow.
        found = json.loads(re.sub(r",\s*}", "}", text))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def record() -> dict[str, Any]:
    """Return what `hvdtrain build` wrote into Horovod's metadata; {} where another build made it, or there is none."""
    found = metadata().get("hvdtrain")
    return found if isinstance(found, dict) else {}


def mark_as_proven() -> None:
    """Write into the installed Horovod's metadata that `hvdtrain build` proved it in this environment."""
    folder, found = package_folder("horovod"), metadata()
    if folder is None or "hvdtrain" not in found:
        return
    found["hvdtrain"]["proven"] = True
    part = folder / f"metadata.json.{os.getpid()}"
    part.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    os.replace(part, folder / "metadata.json")


def built_for() -> dict[str, str]:
    """Return {framework: version} that the installed Horovod was compiled for; empty where there is no Horovod."""
    found = metadata()
    return {name: str(found[key]) for name, key in _METADATA_KEYS.items() if key in found}


def has_these_changes() -> bool:
    """Return whether the installed Horovod was built with the changes that this version of hvdtrain makes."""
    from hvdtrain.horovod_build import changes

    # The record's name for them is older than the patches; versions of hvdtrain compare by it.
    return bool(record().get("edits") == changes.fingerprint())


def has_other_changes() -> bool:
    """Return whether another version of hvdtrain built the installed Horovod, with other changes than this one."""
    return bool(record()) and not has_these_changes()


def mismatch(framework: str) -> str | None:
    """Say in a sentence why the installed Horovod cannot serve `framework`; None where it can."""
    built, installed = built_for().get(framework), framework_version(framework)
    if built is None:
        return f"The installed Horovod was built without {framework}."
    # The index's CUDA build of torch calls itself 2.13.0+cu130 but is distributed as 2.13.0.
    if installed is not None and "+" not in installed:
        built = built.partition("+")[0]
    if installed is not None and built != installed:
        return f"The installed Horovod was built for {framework} {built}, but {framework} {installed} is installed."
    return None
