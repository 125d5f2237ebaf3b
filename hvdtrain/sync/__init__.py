"""Synchronize ranks: in every step (the default), or by a strategy; one strategy a file."""

from __future__ import annotations

from typing import Any

from hvdtrain.sync.delayed import Delayed as Delayed
from hvdtrain.sync.diloco import DiLoCo as DiLoCo
from hvdtrain.sync.local_sgd import LocalSGD as LocalSGD
from hvdtrain.sync.strategy import Strategy

STRATEGIES: dict[str, type[Strategy]] = {each.__name__: each for each in (LocalSGD, DiLoCo, Delayed)}


def as_strategy(given: Any) -> Strategy | None:
    """Return what the Trainer's `sync` means: a strategy, its `config` from a checkpoint, or None for every step."""
    if given is None or isinstance(given, Strategy):
        return given
    if isinstance(given, dict) and given.get("strategy") in STRATEGIES:
        options = {name: value for name, value in given.items() if name != "strategy"}
        return STRATEGIES[given["strategy"]](**options)
    examples = "hvdtrain.LocalSGD(every=16), hvdtrain.DiLoCo(every=100), hvdtrain.Delayed()"
    raise TypeError(f"sync must be None or a strategy, such as {examples}. Received: sync={given!r}")
