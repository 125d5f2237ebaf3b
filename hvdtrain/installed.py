"""Which Horovod is installed, and for which framework versions it was built; read from files, nothing is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path

# Horovod's metadata.json calls PyTorch "pytorch"; TensorFlow comes as several distributions of one version.
_METADATA_KEYS = {"torch": "pytorch", "tensorflow": "tensorflow"}
_DISTRIBUTIONS = {
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-rocm"),
}


def framework_version(framework: str) -> str | None:
    """Return the installed version of "torch" or "tensorflow"; None where it is not installed."""
    for distribution in _DISTRIBUTIONS[framework]:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def built_for() -> dict[str, str]:
    """Return {framework: version} that the installed Horovod was compiled for; empty where there is no Horovod."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or not spec.submodule_search_locations:
        return {}
    path = Path(next(iter(spec.submodule_search_locations))) / "metadata.json"
    if not path.is_file():
        return {}
    # Horovod writes a trailing comma before the closing brace.
    metadata = json.loads(path.read_text().replace(",\n}", "\n}"))
    return {name: metadata[key] for name, key in _METADATA_KEYS.items() if key in metadata}


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
