"""A rank steps with its own gradients: one process, or a strategy by which ranks average weights later."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.torch.ops.names import parameters_of
from hvdtrain.torch.reduction.exchange import Applied, Exchange, Made


class Alone(Exchange):
    """Scales this rank's gradients for the weights of its own step."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def finish(self, made: Made) -> Applied:
        """Scale the gradients, and add zeros where other ranks have gradients and this one has none."""
        weights, parameters = made.weights, parameters_of(self._optimizer)
        weights.correct(parameters)
        self.average(parameters)
        total = weights.weight
        if weights.alone:
            self._fill_gradients()
            total = None  # if nothing counts here, it does on another rank
        return Applied(total == 0, weights.expected / total if total else 1.0)

    def average(self, parameters: list[torch.nn.Parameter]) -> None:
        """Do nothing: the gradients are this rank's own."""

    def _fill_gradients(self) -> None:
        """Give a rank that has no gradient one of zeros: momentum and weight decay change as on the other ranks."""
        parameters = [p for p in parameters_of(self._optimizer) if p.requires_grad]
        if all(p.grad is None for p in parameters):
            known = [p for p in parameters if self._optimizer.state.get(p)]  # others may be trained on no rank
            # SparseAdam refuses dense gradients.
            layout = torch.sparse_coo if isinstance(self._optimizer, torch.optim.SparseAdam) else None
            for parameter in known or parameters:
                parameter.grad = torch.zeros_like(parameter, layout=layout)
