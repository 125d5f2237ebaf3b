"""One World a process, and the same model in the framework under test."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

import hvdtrain

sys.path.insert(0, str(Path(__file__).parent))  # for the kits beside this file

FRAMEWORK = os.environ.get("HVDTRAIN_TEST_FRAMEWORK", "torch")


@pytest.fixture(scope="session")
def world():
    os.environ.setdefault("HOROVOD_TIMELINE", "DYNAMIC")  # read once, by init; a test counts what travels
    return hvdtrain.init(FRAMEWORK)


@pytest.fixture
def kit(world):
    """What a test needs of a framework: see torch_kit.py and keras_kit.py, which offer the same functions."""
    return importlib.import_module(f"{FRAMEWORK}_kit")
