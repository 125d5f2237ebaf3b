"""Elastic state of models, optimizers and samplers."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hvdtrain.distributed.elastic import ShardedObjectState
from hvdtrain.torch.elastic.sampler import ElasticSampler
from hvdtrain.torch.ops import engine
from hvdtrain.torch.ops.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvdtrain.torch.reduction.shard_commits import commits_of
from hvdtrain.torch.reduction.sharded import Shards


class TorchState(ShardedObjectState):
    """The state of a training run, to be committed, restored and synchronized.

    Each argument becomes an attribute. What has a state_dict, such as a model, an optimizer (plain or distributed), a
    sampler, a learning-rate scheduler or a GradScaler, is saved by it, and anything else as a Python object.

    If an optimizer's state is in shards, `save`, `commit` and `sync` are collectives: each rank keeps its parts, and a
    copy of those of a rank on another host. `sync` then raises LostShardError, on every rank, if no rank has a part.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        kwargs.update(model=model, optimizer=optimizer)
        handlers = {name: handler for name, value in kwargs.items() if (handler := _handler(value)) is not None}
        self._handlers, self._parts = handlers, handlers.values()
        for name, handler in handlers.items():
            setattr(self, name, handler.value)
        others = {name: value for name, value in kwargs.items() if name not in handlers}
        super().__init__(
            commits_of(lambda: _shards(handlers.values())),
            bcast_object=broadcast_object, get_rank=lambda: int(engine.native().rank()), **others,
        )  # fmt: skip

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers and hasattr(self, name):
            handlers[name].set_value(value)
        super().__setattr__(name, value)


class StateHandler:
    """Saves one object of a `TorchState`."""

    def __init__(self, value: Any) -> None:
        self.set_value(value)

    def save(self) -> None:
        """Keep a copy of the object's state."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Restore the copy."""
        # A copy again: an optimizer uses the tensors that it is given, and changes them.
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        """Give every rank the root's state."""
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), 0))

    def reset(self) -> None:
        """Prepare for other ranks."""

    def set_value(self, value: Any) -> None:
        """Keep another object from now on."""
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    """Saves a model."""

    def sync(self) -> None:
        """Broadcast parameters and buffers."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)


class OptimizerStateHandler(StateHandler):
    """Saves an optimizer; of one whose state is in shards only the options, because `TorchState` saves the shards."""

    def save(self) -> None:
        """Keep a copy of the state and options."""
        with _without_shards(self.value):
            super().save()

    def restore(self) -> None:
        """Restore the copy."""
        with _without_shards(self.value):
            super().restore()

    def sync(self) -> None:
        """Broadcast state and options."""
        broadcast_optimizer_state(self.value, root_rank=0)


class SamplerStateHandler(StateHandler):
    """Saves a sampler; `sync` loads the root's, whose indices its weights have learned from: others may be ahead."""

    def save(self) -> None:
        """Keep a copy of the sampler's state."""
        self._saved = self.value.state_dict()  # a fresh list of numbers: deepcopy would take seconds over a million

    def reset(self) -> None:
        """Share what is left among the ranks there are now."""
        self.value.reset()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return the handler of each class."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replace the handler of each class."""
    global _registry
    _registry = registry


def _shards(handlers: Iterable[StateHandler]) -> list[Shards]:
    """Return the sharded states of optimizers."""
    optimizers = [each.value for each in handlers if isinstance(each, OptimizerStateHandler)]
    return [each._hvd_shards for each in optimizers if getattr(each, "_hvd_shards", None) is not None]


def _without_shards(optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    shards: Shards | None = getattr(optimizer, "_hvd_shards", None)
    return nullcontext() if shards is None else shards.set_aside()


def _handler(value: Any) -> StateHandler | None:
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return StateHandler(value)
    return None
