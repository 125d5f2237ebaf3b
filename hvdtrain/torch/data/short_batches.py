"""The gradients of a prepared loop's short batches: scaled for their samples, in the loader's order."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hvdtrain.data.trees import leaves
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.ops.sync_batch_norm import SyncBatchNorm


@dataclass
class _Batch:
    weight: float
    is_short: bool
    number: int  # counts all batches of the model
    before: int  # the number of the same loader's batch before it
    has_gradient: bool = False


class ShortBatches:
    """Scales the gradients that are computed during a short batch, and raises where a loop has another order.

    A loader cannot know which gradient belongs to which batch. So a gradient is taken to be of the batch that was
    yielded last, and what shows another order is an error: a short batch that passes without a gradient while the model
    trains, as in list(loader); a gradient after the last batch; two loaders at once, as in zip(a, b).

    Args:
        model: what the loop trains.
        rank: this rank, for messages.
    """

    _of_models: weakref.WeakKeyDictionary[torch.nn.Module, ShortBatches] = weakref.WeakKeyDictionary()

    def __init__(self, model: torch.nn.Module, rank: int) -> None:
        self._parameters = [weakref.ref(parameter) for parameter in model.parameters()]
        self._model, self._rank = weakref.ref(model), rank
        self._active: dict[int, _Batch] = {}  # by loader
        self._numbers: dict[int, int] = {}
        # Short batches that have passed without a gradient, by loader, as long as the loop holds them.
        self._without: dict[int, Callable[[], Any]] = {}
        self._has_passed = False  # a short batch with one, and no batch has followed
        self._has_skipped = False  # the batch before a short one had none
        self._hooks: list[Any] = []

    @classmethod
    def of(cls, model: torch.nn.Module, rank: int) -> ShortBatches:
        """Return the one of a model, which all its loaders share."""
        return cls._of_models.setdefault(model, cls(model, rank))

    def begin(self, loader: int, weight: float, *, is_short: bool, is_before: bool) -> None:
        """Take gradients from now on for those of a batch; `is_before` if the next one is short."""
        number = 1 + max(self._numbers.values(), default=0)
        self._active[loader] = _Batch(weight, is_short, number, self._numbers.get(loader, number - 1))
        self._numbers[loader] = number
        self._has_passed = False
        self._has_skipped = self._has_skipped and is_short
        if is_short:
            self._weigh_statistics(weight)
        self._watch(is_short or is_before or bool(self._without))

    def end(self, loader: int, item: Any, *, is_left: bool) -> None:
        """End a batch, `item`: the next one was asked for, or the loop has ended; `is_left` if by break."""
        batch, model = self._active.pop(loader), self._model()
        if batch.is_short:
            self._weigh_statistics(1.0)
        trains = model is not None and model.training and torch.is_grad_enabled()
        held = next((leaf for leaf in leaves(item) if isinstance(leaf, torch.Tensor)), None)
        if batch.is_short and batch.has_gradient:
            self._has_passed = not is_left
        elif batch.is_short and trains and held is not None:
            self._without[loader] = weakref.ref(held)
        elif not batch.has_gradient and self._hooks:
            self._has_skipped = trains
        if is_left:
            self._watch(bool(self._without))

    def restart(self, loader: int) -> None:
        """Forget a loader's batches, because it begins another pass."""
        self._without.pop(loader, None)

    def _weigh_statistics(self, weight: float) -> None:
        """Let layers that exchange statistics and gradients of their inputs know this rank's weight."""
        model = self._model()
        for layer in model.modules() if model is not None else ():
            if isinstance(layer, SyncBatchNorm):
                layer.batch_weight = weight

    def _watch(self, wanted: bool) -> None:
        """Have hooks on the parameters, or have none, which costs nothing."""
        if wanted and not self._hooks:
            parameters = [parameter for ref in self._parameters if (parameter := ref()) is not None]
            self._hooks = [each.register_hook(self._scaled) for each in parameters if each.requires_grad]
        elif not wanted:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def _scaled(self, gradient: torch.Tensor) -> torch.Tensor | None:
        self._without = {loader: held for loader, held in self._without.items() if held() is not None}
        if self._without:
            raise HvdTrainError(self._refusal("a gradient after a short batch has passed without one"))
        if self._has_passed and not self._active:
            raise HvdTrainError(self._refusal("a gradient after the loader's last batch"))
        for batch in self._active.values():
            batch.has_gradient = True
        short = next((batch for batch in self._active.values() if batch.is_short), None)
        if short is None:
            return None
        if any(each is not short and each.number > short.before for each in self._active.values()):
            raise HvdTrainError(self._refusal("a gradient while two prepared loaders yield batches"))
        if self._has_skipped:
            raise HvdTrainError(self._refusal("a short batch's gradient, and none of the batch before it"))
        if short.weight == 1.0:
            return None
        # Write zeros instead of multiplying: a filler's gradient may not be finite.
        return gradient * short.weight if short.weight else torch.zeros_like(gradient)

    def _refusal(self, received: str) -> str:
        return (
            "A prepared loader weighs the gradients of a short batch while it is the batch that was yielded last. "
            f"Received: {received}, on rank {self._rank}. Call backward for each batch before you ask for the next "
            "one, and iterate one prepared loader at a time. With list(loader), prefetching or zip of loaders, use "
            "DataLoader(drop_last=True), or hvdtrain.Trainer."
        )
