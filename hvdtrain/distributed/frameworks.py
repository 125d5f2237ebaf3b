"""Load a framework's part of hvdtrain: the one place where the core imports a framework's folder, by name."""

from __future__ import annotations

import importlib
from typing import Any

FOLDERS = {"torch": "torch", "keras": "keras", "tensorflow": "keras"}


def load(framework: str, part: str) -> Any:
    """Return the module `part` of a framework's folder, which imports the framework.

    Parts: adapter (the Trainer's steps), bench and step_marks (`hvdtrain bench`), collectives (host arrays), elastic,
    gpu_proof (of a host's GPUs), jax_device, prepare (custom loops), profiling, proof (`hvdtrain build`) and sources
    (data).
    """
    return importlib.import_module(f"hvdtrain.{FOLDERS[framework]}.{part}")
