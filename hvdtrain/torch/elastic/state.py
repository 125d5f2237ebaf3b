"""Elastic state of models, optimizers and samplers."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hvdtrain.distributed.elastic import ObjectState
from hvdtrain.torch.elastic.sampler import ElasticSampler
from hvdtrain.torch.ops import engine
from hvdtrain.torch.ops.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters


class TorchState(ObjectState):
    """The state of a training run, to be committed, restored and synchronized.

    Each argument becomes an attribute. What has a state_dict, such as a model, an optimizer (plain or distributed), a
    sampler, a learning-rate scheduler or a GradScaler, is saved by it, and anything else as a Python object.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        kwargs.update(model=model, optimizer=optimizer)
        handlers = {name: handler for name, value in kwargs.items() if (handler := _handler(value)) is not None}
        self._handlers, self._parts = handlers, handlers.values()
        for name, handler in handlers.items():
            setattr(self, name, handler.value)
        others = {name: value for name, value in kwargs.items() if name not in handlers}
        super().__init__(bcast_object=broadcast_object, get_rank=lambda: int(engine.native().rank()), **others)

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
    """Saves an optimizer."""

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


def _handler(value: Any) -> StateHandler | None:
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return StateHandler(value)
    return None
