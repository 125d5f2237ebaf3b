"""Compute the loss of a batch in PyTorch, by a loss function of the model's outputs or by the user's own step."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from hvdtrain.adapter import Loss
from hvdtrain.data.sources import Batch
from hvdtrain.data.trees import leaves, rebuild
from hvdtrain.errors import HvdTrainError
from hvdtrain.telemetry.memory import is_out_of_memory
from hvdtrain.torch.steps.loss_check import LossCheck
from hvdtrain.torch.steps.losses import check_shapes

_NAMED = 8  # parts of a batch in a message
ToDevice = Callable[[Any], Any]

_EXAMPLE = """
    def step(model, batch):
        {body}
    trainer = hvdtrain.Trainer(model, optimizer=optimizer, step=step)"""
_RETURN_EXAMPLE = """
    def step(model, batch):
        return hvdtrain.Loss(model(**batch).loss, count=tokens)  # a mean, and what it was divided by"""

_YIELD_EXAMPLE = """
    def step(models, batch):
        yield "d", hvdtrain.Loss(d_loss(models, batch))
        yield "g", hvdtrain.Loss(g_loss(models, batch))"""


class LossStep:
    """Calls the model on a batch's inputs, and the loss on outputs and targets."""

    def __init__(self, model: nn.Module, loss: Any, to_device: ToDevice, rank: int, check: LossCheck) -> None:
        self._model, self._loss, self._to_device, self._rank = model, loss, to_device, rank
        self._checked, self._check = False, check

    def __call__(self, batch: Batch) -> Loss:
        """Return the loss of a batch: its mean is a mean over the batch, unless the loss is a sum."""
        if batch.sample_weight is not None:
            raise ValueError(
                "A torch model takes (inputs, targets): weigh samples in your own loss, or in step=. Received: a third "
                f"item, sample_weight, on rank {self._rank}.{_example(batch.item)}"
            )
        try:
            inputs, targets = self._to_device(batch.inputs), self._to_device(batch.targets)
            outputs = self._model(inputs)
            targets = self._beside(outputs, targets)
            loss = self._compute(outputs, targets)
        except Exception as error:
            is_pair = batch.targets is not None and hasattr(batch.inputs, "shape")
            if self._checked or is_pair or is_out_of_memory(error):
                raise
            raise TypeError(
                "Without step=, a batch is (inputs, targets): the model is called on the inputs, and the loss on its "
                f"outputs and the targets. That raised {type(error).__name__}: {error}. Received: "
                f"{describe(batch.item)} on rank {self._rank}. Give the Trainer a step of your own instead of "
                f"loss=.{_example(batch.item)}"
            ) from error
        return self._seen(outputs, targets, loss, batch)

    def of_outputs(self, outputs: Any, batch: Batch) -> Loss:
        """Return the loss of a batch whose outputs are known, those of a pipeline's last stage."""
        targets = self._to_device(batch.targets)
        return self._seen(outputs, targets, self._compute(outputs, targets), batch)

    def _compute(self, outputs: Any, targets: Any) -> torch.Tensor:
        if not self._checked:
            check_shapes(self._loss, outputs, targets, rank=self._rank)
        loss: torch.Tensor = self._loss(outputs, targets)
        return loss

    def _seen(self, outputs: Any, targets: Any, loss: torch.Tensor, batch: Batch) -> Loss:
        self._checked = True
        self._check.see(outputs, targets, loss, batch.local_count)
        return Loss(loss.mean() if loss.dim() else loss, outputs=outputs, targets=targets)

    def _beside(self, outputs: Any, targets: Any) -> Any:
        """Return the targets on the outputs' device, where a spread model has its last layer; move the loss there."""
        if not (isinstance(outputs, torch.Tensor) and isinstance(targets, torch.Tensor)):
            return targets
        if outputs.device == targets.device:
            return targets
        if isinstance(self._loss, nn.Module):
            self._loss.to(outputs.device)
        return targets.to(outputs.device, non_blocking=True)

    def build(self, batch: Batch) -> None:
        """Call the model on a batch, so that its lazy modules get shapes."""
        self._model(self._to_device(batch.inputs))

    def predict(self, inputs: Any) -> Any:
        """Return the model's outputs."""
        return self._model(self._to_device(inputs))

    def run_empty(self, batch: Batch, *, rows: int) -> torch.Tensor:
        """Run no samples, or so many that do not count, through the model; return a loss of zero."""
        inputs = move(partial(_rows, count=rows), self._to_device(batch.inputs))
        return sum_of_nothing(self._model(inputs))


class OwnStep:
    """Calls the user's `step(model, batch)` on all that the data yields."""

    def __init__(
        self, model: Any, step: Callable[[Any, Any], Any], to_device: ToDevice, rank: int, *, has_metrics: bool
    ) -> None:
        self._model, self._step, self._to_device, self._rank = model, step, to_device, rank
        self._has_metrics = has_metrics

    def __call__(self, batch: Batch) -> Loss:
        """Return what the user's step returns, checked, with its count as a number."""
        found = self._checked(self._step(self._model, self._to_device(batch.item)), batch)
        if self._has_metrics and (found.outputs is None or found.targets is None):
            raise ValueError(self._no_outputs())
        return found

    def _no_outputs(self) -> str:
        return (
            "Metrics take outputs and targets from step: return hvdtrain.Loss(mean, count, outputs=..., targets=...). "
            f"Received: a Loss without them on rank {self._rank}"
        )

    def _checked(self, returned: Any, batch: Batch) -> Loss:
        if not isinstance(returned, Loss):
            raise TypeError(
                f"step must return a hvdtrain.Loss. Received: {describe(returned)} on rank {self._rank}. For "
                f"example:{_RETURN_EXAMPLE}"
            )
        mean = returned.mean
        if not isinstance(mean, torch.Tensor) or mean.numel() != 1:
            raise TypeError(
                "Loss.mean must be a tensor of one element, such as loss.mean(). Received: "
                f"{describe(mean)} on rank {self._rank}"
            )
        # A rank must know that its count is 0 before backward: the gradient of a mean over nothing is NaN.
        count = batch.local_count if returned.count is None else float(returned.count)
        if not 0 <= count < float("inf"):
            raise ValueError(
                "Loss.count must be what the mean was divided by, a finite number >= 0. Received: "
                f"count={returned.count} on rank {self._rank}"
            )
        return Loss(mean.reshape(()) if mean.dim() else mean, count, outputs=returned.outputs, targets=returned.targets)

    def build(self, batch: Batch) -> None:
        """Call the step on a batch, so that lazy modules get shapes; of several optimizers, go through its yields."""
        returned = self._step(self._model, self._to_device(batch.item))
        if isinstance(returned, Iterator):
            collections.deque(returned, maxlen=0)

    def predict(self, inputs: Any) -> Any:
        """Return the model's outputs: of a mapping by name, without what has no axis of samples, such as its loss."""
        inputs = self._to_device(inputs)
        if not isinstance(inputs, Mapping):
            return self._model(inputs)
        outputs = self._model(**inputs)
        if not isinstance(outputs, Mapping):
            return outputs
        return {name: value for name, value in outputs.items() if getattr(value, "shape", None)}

    def run_empty(self, batch: Batch, *, rows: int) -> torch.Tensor:
        """Run the step on no samples, or on so many that do not count; return a loss whose gradient is zero."""
        with self._without_samples():
            mean: torch.Tensor = self(self._emptied(batch, rows)).mean
        return mean * 0.0

    def _emptied(self, batch: Batch, rows: int = 0) -> Batch:
        item = move(partial(_rows, count=rows), self._to_device(batch.item))
        return dataclasses.replace(batch, item=item, local_count=0)

    @contextmanager
    def _without_samples(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise HvdTrainError(
                f"rank {self._rank} has no samples in this step. Other ranks wait for it in collectives, of "
                "SyncBatchNorm or of step, so step was called on a batch of 0 samples, and raised "
                f"{type(error).__name__}: {error}. Let step take such a batch, or use data that gives every rank "
                "samples in every step."
            ) from error


Yielded = tuple[tuple[str, ...], Loss]


class YieldingStep(OwnStep):
    """Calls the user's step of several optimizers, a generator of (name or names, Loss)."""

    def run(self, batch: Batch) -> Iterator[Yielded]:
        """Yield what the user's step yields, checked."""
        if not batch.local_count:  # for a SyncBatchNorm: see `run_empty`
            with self._without_samples():
                yield from self._run(self._emptied(batch))
            return
        yield from self._run(batch)

    def _run(self, batch: Batch) -> Iterator[Yielded]:
        yields = self._step(self._model, self._to_device(batch.item))
        if not isinstance(yields, Iterator):
            raise TypeError(self._no_pair(yields))
        has_outputs = not self._has_metrics
        for pair in yields:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(self._no_pair(pair))
            names = (pair[0],) if isinstance(pair[0], str) else pair[0]
            if not isinstance(names, tuple | list) or not names or not all(isinstance(name, str) for name in names):
                raise TypeError(self._no_pair(pair))
            found = self._checked(pair[1], batch)
            has_outputs |= found.outputs is not None and found.targets is not None
            yield tuple(names), found
        if not has_outputs:
            raise ValueError(self._no_outputs())

    def _no_pair(self, received: Any) -> str:
        return (
            "With several optimizers step must yield pairs (name, hvdtrain.Loss), or (names, hvdtrain.Loss) where one "
            f"loss trains several. Received: {describe(received)} on rank {self._rank}. For example:{_YIELD_EXAMPLE}"
        )

    def predict(self, inputs: Any) -> Any:
        """Return the outputs of a single model; of several it is not known which one to call."""
        if isinstance(self._model, nn.Module):
            return super().predict(inputs)
        raise TypeError(
            f"predict needs one model. Received: a Trainer of {', '.join(self._model)}. Make a Trainer of that one "
            "model, or call it."
        )


def sum_of_nothing(outputs: Any) -> torch.Tensor:
    """Return a loss of zero, whose gradient with respect to the outputs is zero, even if they are not finite."""
    return torch.stack([output.sum() for output in leaves(move(_rows, outputs))]).sum()


def without_gradient(loss: torch.Tensor, *, may_be_nan: bool = False) -> torch.Tensor:
    """Return a loss whose gradient is zero, for a backward pass in which ranks wait for each other.

    With `may_be_nan`, no gradient of it is used.
    """
    if may_be_nan:
        return (loss * 0.0).nan_to_num()
    if not loss.isfinite():
        raise ValueError(
            "Loss.mean must be finite also on a rank where nothing counts, because other ranks wait for its backward "
            "pass, in a SyncBatchNorm or a collective of step. Compute it from the rows of all ranks, or as loss.sum() "
            f"/ max(count, 1). Received: {loss.item()}"
        )
    return loss * 0.0


def _rows(value: Any, count: int = 0) -> Any:
    return value[:count] if isinstance(value, torch.Tensor) and value.dim() else value


def move(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to all leaves of a batch, and keep the types of its containers."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, MutableMapping):
        kept = copy.copy(tree)
        for name, value in tree.items():
            kept[name] = move(function, value)
        return kept
    if isinstance(tree, tuple | list) and not hasattr(tree, "to"):  # a PackedSequence moves itself
        return rebuild(tree, [move(function, value) for value in tree])
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type) and not hasattr(tree, "to"):
        same: Any = copy.copy(tree)
        for each in dataclasses.fields(tree):
            object.__setattr__(same, each.name, move(function, getattr(tree, each.name)))
        return same
    return function(tree)


def describe(value: Any, *, depth: int = 2) -> str:
    """Return what a batch is made of, in a few words: "a dict of ids (4, 7) int64, mask (4, 7) bool"."""
    kind = type(value).__name__
    if getattr(value, "shape", None) is not None and hasattr(value, "dtype"):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping | tuple | list) and depth:
        named = value.items() if isinstance(value, Mapping) else [("", each) for each in value]
        parts = [f"{name} {describe(each, depth=depth - 1)}".strip() for name, each in list(named)[:_NAMED]]
        more = f" and {len(value) - _NAMED} more" if len(value) > _NAMED else ""
        count = "" if isinstance(value, Mapping) else f"{len(value)}: "
        return f"a {kind} of {count}{', '.join(parts)}{more}"
    return f"a {kind}"


def _example(item: Any) -> str:
    """Return an example of a step that takes such a batch."""
    if isinstance(item, Mapping):
        labels = next((name for name in item if "label" in str(name)), None)
        inputs, *targets = [f"batch[{name!r}]" for name in item][:2]
        body = [f"return hvdtrain.Loss(my_loss({', '.join([f'model({inputs})', *targets])}))"]
        if labels is not None:  # as transformers' models take it
            body = ["out = model(**batch)", f"metrics = dict(outputs=out.logits, targets=batch[{labels!r}])"]
            # With a label for each token, what the mean of such a model was divided by.
            count = f"(batch[{labels!r}] != -100).sum()"
            has_tokens = len(getattr(item[labels], "shape", ())) > 1
            body += [f"return hvdtrain.Loss(out.loss, {f'count={count}, ' if has_tokens else ''}**metrics)"]
    elif isinstance(item, tuple | list) and len(item) > 1:
        names = ["x", "y", "weight"] if len(item) == 3 else [f"part{index}" for index in range(len(item))]
        body = [f"{', '.join(names)} = batch", f"return hvdtrain.Loss(my_loss(model, {', '.join(names)}))"]
    else:
        body = ["return hvdtrain.Loss(my_loss(model, batch))"]
    return _EXAMPLE.format(body="\n        ".join(body))
