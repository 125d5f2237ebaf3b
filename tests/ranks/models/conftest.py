"""One World a process, and no look at the Hugging Face Hub: every model here has random weights."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

import hvdtrain

sys.path.insert(0, str(Path(__file__).parent))  # for transformers_kit.py beside this file


@pytest.fixture(scope="session")
def world():
    return hvdtrain.init("torch")
