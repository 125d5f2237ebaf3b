"""Undo what a step has changed before its gradient was known."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn

from hvdtrain.distributed import rank_state
from hvdtrain.torch.steps import training_state
from hvdtrain.torch.steps.metrics import Totals


class Attempt:
    """Undoes a step: restores the model's buffers and what metrics have counted; `repeat` also restores random states.

    Used for steps that `nan_policy` refuses, that run out of memory, or that are cut off.
    """

    def __init__(self, model: nn.Module, totals: Totals) -> None:
        self._totals = totals
        self._by_name = [module._buffers for module in model.modules() if module._buffers]
        self._tensors: list[torch.Tensor] = []
        self._saved: list[torch.Tensor] = []
        self._random: dict[str, NDArray[Any]] = {}

    @torch.no_grad()
    def begin(self, *, draws: bool = False) -> None:
        """Save the state before a step, with `draws` also random states, for `repeat`."""
        self._random = rank_state.random_states() | training_state.random_states() if draws else {}
        # By name too: `self.mean = 0.9 * self.mean + ...` in forward puts another tensor in the buffer's place.
        self._names = [dict(held) for held in self._by_name]
        tensors = [each for named in self._names for each in named.values() if each is not None]
        tensors.append(self._totals.sums)
        memory = dict(zip(map(id, self._tensors), self._saved, strict=True))
        self._saved = [memory[id(t)].copy_(t) if id(t) in memory else t.detach().clone() for t in tensors]
        self._tensors = tensors
        self._counts = list(self._totals.counts)
        self._undo = self._totals.stateful.snapshot()

    def repeat(self) -> None:
        """Restore that state and the random states: the same step draws the same numbers again."""
        self.undo()
        rank_state.set_random_states(self._random)
        training_state.set_random_states(self._random)

    @torch.no_grad()
    def undo(self) -> None:
        """Restore that state, except for the random states."""
        for held, named in zip(self._by_name, self._names, strict=True):
            held.update(named)
        for saved, tensor in zip(self._saved, self._tensors, strict=True):
            tensor.copy_(saved)
        self._totals.counts = list(self._counts)
        self._undo()
