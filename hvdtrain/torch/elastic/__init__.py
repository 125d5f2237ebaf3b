"""Elastic training for PyTorch: continue when ranks leave or join."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdtrain.distributed.elastic import ObjectState, State, run_fn
from hvdtrain.torch.elastic.sampler import ElasticSampler
from hvdtrain.torch.elastic.state import TorchState
from hvdtrain.torch.ops.engine import init, shutdown

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "init", "run", "run_fn", "shutdown"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Make `func(state, ...)` start again, from the last commit, whenever ranks come, go or fail.

    Before each start the state is synchronized from rank 0. Alone, `func` simply runs.
    """
    return run_fn(func, reset)


def reset() -> None:
    """Leave the previous ranks and join the present ones; all of them call it."""
    shutdown()
    init()
