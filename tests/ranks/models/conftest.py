"""One World a process, and no look at the Hugging Face Hub: every model here has random weights."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

import hvdtrain


@pytest.fixture(scope="session")
def world():
    return hvdtrain.init("torch")
