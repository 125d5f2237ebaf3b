"""A script that has not called `init` learns of it, loudly only where it matters."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from hvdtrain.distributed import world


@pytest.mark.parametrize(("device", "level"), [("cpu", logging.INFO), ("cuda:0", logging.WARNING)])
@pytest.mark.parametrize("size", [1, 2])
def test_a_trainer_that_initializes_on_gpus_warns(monkeypatch, caplog, device, level, size):
    ranks = SimpleNamespace(size=size, is_root=True, device=device)
    monkeypatch.setattr(world, "init", lambda framework: ranks)
    monkeypatch.setattr(world, "_world", None)
    with caplog.at_level(logging.INFO, "hvdtrain"):
        assert world.init_if_missing("torch") is ranks
        monkeypatch.setattr(world, "_world", ranks)
        world.init_if_missing("torch")  # the script, or another Trainer, has called it
    assert [record.levelno for record in caplog.records] == ([level] if size > 1 else [])
