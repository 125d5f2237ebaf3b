"""One process without Horovod: every test here runs on the stand-in, whether or not Horovod is installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import hvdtrain.torch as hvdtrain_torch
from hvdtrain.distributed import world
from hvdtrain.torch import engine


@pytest.fixture
def hvd(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("HVDTRAIN_SOLO", "1")
    monkeypatch.setattr(world, "_loaded", {})
    monkeypatch.setattr(engine, "_module", None)
    hvdtrain_torch.init()
    yield hvdtrain_torch
    hvdtrain_torch.shutdown()
