"""Check that a loss is weighed by what it was divided by: known of torch's own losses, found out of any other.

A step is split over ranks, batches or micro-batches, and their losses are weighed by their samples. That is right for a
mean over samples. Of a callable it is not known, so the first batch shows it, on two parts of its samples.
"""

from __future__ import annotations

import copy
import logging
import operator
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hvdtrain.data.trees import num_rows, tree_map
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.world import World
from hvdtrain.torch.reduction.loss_weights import divisor, elementwise, needs_exchange

log = logging.getLogger("hvdtrain")

_CLASSES: dict[Any, type[nn.Module]] = {
    functional.cross_entropy: nn.CrossEntropyLoss,
    functional.nll_loss: nn.NLLLoss,
    functional.mse_loss: nn.MSELoss,
    functional.l1_loss: nn.L1Loss,
    functional.smooth_l1_loss: nn.SmoothL1Loss,
    functional.huber_loss: nn.HuberLoss,
    functional.binary_cross_entropy: nn.BCELoss,
    functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
}
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4}
_TOLERANCE_OF_HALF = 2e-2
_IGNORED = -100  # torch's default of ignore_index
_WAYS_OUT = (
    'Give the module of torch.nn that computes it, return one value per sample (reduction="none"), which are averaged, '
    "or give step=, which returns hvdtrain.Loss(mean, count=what the mean was divided by)."
)


def as_module(loss: Any) -> Any:
    """Return torch's module for a function of torch.nn.functional, also of a `partial` with keywords; else `loss`."""
    function, keywords = (loss.func, loss.keywords) if isinstance(loss, partial) else (loss, {})
    kind = None if isinstance(loss, partial) and loss.args else _CLASSES.get(function) if _hashable(function) else None
    if kind is None or not keywords.keys() <= signature(kind).parameters.keys():
        return loss
    return kind(**keywords)


def _has_sums_without_count(loss: Any) -> bool:
    is_mean = isinstance(loss, nn.CrossEntropyLoss) and loss.reduction == "mean" and loss.label_smoothing > 0
    return is_mean and loss.weight is not None and bool((loss.weight == 0).any())


def _hashable(value: Any) -> bool:
    return type(value).__hash__ is not None


class LossRefusedError(ValueError):
    """This rank's batch shows, after the first step, that the loss cannot be split over ranks."""


class LossCheck:
    """Checks the loss on the first batch, and that batches are of one width; ranks agree on it once in each fit.

    What a later batch shows is a LossRefusedError on its rank alone.
    """

    def __init__(self, loss: Any, world: World, *, split: bool) -> None:
        self._loss, self._world, self._ranks = loss, world, DataRanks(world)
        if split and _has_sums_without_count(loss):
            raise ValueError(
                "With label_smoothing, a sample whose class has a weight of 0 has a loss, but torch does not count it "
                "in what it divides by: where a batch has such samples alone, its loss cannot be weighed. Give these "
                "classes a small weight, such as 1e-6, or set their labels to ignore_index. "
                f"Received: weight={loss.weight.tolist()}, label_smoothing={loss.label_smoothing}."
            )
        is_known = type(loss) in _CLASSES.values()
        self._is_sum = getattr(loss, "reduction", "mean") == "sum"
        self._has_parts = split and loss is not None and not is_known
        self._has_width = split and loss is not None and not self._is_sum and (not is_known or elementwise(loss))
        self._may_pad = split and is_known and needs_exchange(loss)  # tokens, whose padding counts unless ignored
        self._finding: str | None = None  # "" if the loss is right
        self._ignores = False  # what is found right as long as no label is -100
        self.begin()

    def begin(self) -> None:
        """Check again with the next batch; every rank calls it."""
        self._widths: dict[bool, tuple[int, ...]] = {}  # of this rank's first batch: of training, of this evaluation
        self._of_evaluation: str | None = None  # what a batch of this evaluation has shown
        self._is_due = self._has_parts or self._has_width
        if not self._has_parts:
            self._finding = ""

    def see(self, outputs: Any, targets: Any, value: torch.Tensor, samples: int) -> None:
        """See a batch: compare its width with the first's, and check the loss on it if that has not been done."""
        is_training = torch.is_grad_enabled()
        problem = None
        if self._has_width or self._may_pad:
            problem = self._compare_width(targets, value, is_training=is_training)
        if self._ignores and isinstance(targets, torch.Tensor) and bool((targets == _IGNORED).any()):
            problem = f"{self._ignored()} Received: loss={_name(self._loss)}, on rank {self._world.rank}."
        if problem and is_training:
            raise LossRefusedError(problem)
        self._of_evaluation = self._of_evaluation or problem
        if self._finding is None:
            self._finding = self._find(outputs, targets, value.detach(), samples)

    def end_evaluation(self) -> None:
        """Raise on every rank what the batches of an evaluation have shown on one; a collective call."""
        mine, width = self._of_evaluation, self._widths.pop(False, None)
        self._of_evaluation = None
        if self._world.size == 1 or not (self._has_parts or self._has_width):
            return
        everyone = self._world.allgather_object((mine, width), name="loss_check")
        for refusal, _ in everyone:
            if refusal:
                raise LossRefusedError(refusal)
        self._compare_ranks([width for _, width in everyone])

    def agree(self) -> None:
        """Raise on every rank what one rank has found; a collective call in the first step only."""
        if not self._is_due:
            return
        mine = (self._finding, self._widths.get(True))
        everyone = [mine] if self._world.size == 1 else self._world.allgather_object(mine, name="loss_check")
        for rank, (finding, _) in enumerate(everyone):
            if finding:
                raise ValueError(f"{finding} Received: loss={_name(self._loss)}, found on rank {rank}.")
        self._compare_ranks([width for _, width in everyone])
        self._is_due = all(finding is None for finding, _ in everyone)
        if not self._is_due:
            self._finding = ""

    def _compare_ranks(self, widths: list[tuple[int, ...] | None]) -> None:
        known = {rank: tuple(width) for rank, width in enumerate(widths) if width is not None}
        for rank, width in known.items():
            if width != (first := next(iter(known.values()))):
                raise ValueError(self._padded(f"{first} on rank {next(iter(known))} and {width} on rank {rank}"))

    def _compare_width(self, targets: Any, value: torch.Tensor, *, is_training: bool) -> str | None:
        """Return what is wrong with the width of a batch's targets, None if nothing is."""
        if not isinstance(targets, torch.Tensor) or value.dim() == 1 or not (is_training or self._ranks.size > 1):
            return None  # one process computes the batches of an evaluation whole
        width = tuple(targets.shape[1:])
        first = self._widths.setdefault(is_training, width)
        if width == first:
            return None
        if not self._may_pad:
            return self._padded(f"{first}, then {width} on rank {self._world.rank}")
        self._may_pad = False
        if not bool((targets == self._loss.ignore_index).any()):
            log.warning(
                "The targets of batches have different lengths, %s and %s, and none is ignored. If they are padded, "
                "padding counts as a label, and the result depends on the number of ranks: pad targets with "
                "ignore_index=%d.",
                first,
                width,
                self._loss.ignore_index,
            )
        return None

    def _padded(self, widths: str) -> str:
        return (
            "A mean over elements of batches that are padded to their own length depends on the number of ranks: pad "
            'all batches to one length, return one value per sample (reduction="none" and a mask), or give step=, '
            f"which returns hvdtrain.Loss(mean, count=elements). Received: targets of {widths}, without the first axis."
        )

    def _find(self, outputs: Any, targets: Any, value: torch.Tensor, samples: int) -> str | None:
        """Return what is wrong with the loss, "" if nothing is; None if this batch does not show it."""
        if value.dim() and value.shape[0] == samples:
            return ""
        if value.numel() != 1:
            return f"loss must return a mean, or values of shape ({samples}, ...). It returned {tuple(value.shape)}."
        if not value.isfinite():
            return None
        outputs, targets = (tree_map(_detached, each) for each in (outputs, targets))
        try:
            with torch.no_grad(), torch.random.fork_rng([value.device] if value.is_cuda else []):
                return self._find_on_parts(outputs, targets, samples)
        except Exception as error:  # noqa: BLE001 - the step itself has computed its loss: what fails is the check
            log.warning(
                "loss=%s could not be checked on parts of a batch (%s: %s). Its result is that of one process only if "
                "it is a mean over samples.",
                _name(self._loss),
                type(error).__name__,
                error,
            )
            return ""

    def _find_on_parts(self, outputs: Any, targets: Any, samples: int) -> str:
        if samples == 1:  # and another sample, made of it
            outputs = tree_map(lambda each: torch.cat([each, each / 2 if each.is_floating_point() else each]), outputs)
            targets, samples = tree_map(lambda each: torch.cat([each, each]), targets), 2
        for each in (outputs, targets):
            tree_map(lambda leaf: _require_rows(leaf, samples), each)
        loss = copy.deepcopy(self._loss)
        before = _buffers(self._loss)
        whole = float(loss(outputs, targets).mean())
        changed = [name for name, held in _buffers(loss).items() if not torch.equal(held, before[name])]
        if changed and self._ranks.size == 1:
            return ""
        if changed:
            return (
                f"A call of loss changes its buffer {changed[0]}, from the samples of one rank. Make the buffer a part "
                "of the model and compute the loss in step=, with hvdtrain.torch.allgather over all ranks' samples."
            )
        if float(loss(outputs, targets).mean()) != whole:
            raise ValueError("it is random")
        first = max(1, samples // 3)
        losses, weights = [], []
        for rows in (slice(first), slice(first, None)):
            part, labels = (tree_map(operator.itemgetter(rows), each) for each in (outputs, targets))
            losses.append(float(loss(part, labels).mean()))
            weights.append(divisor(self._loss, labels, samples=num_rows(part))[0])
        tolerance = _tolerance(outputs)
        total = losses[0] + losses[1]
        if self._is_sum:
            return "" if _close(whole, total, tolerance) else self._refusal(whole, losses, samples, "the sum")
        terms = [each * weight for each, weight in zip(losses, weights, strict=True) if weight]
        if not _close(whole, sum(terms) / (sum(weights) or 1.0), tolerance, scale=max(map(abs, losses))):
            if _close(whole, total, tolerance):
                return 'loss is a sum over samples, and was taken for a mean: use the module with reduction="sum".'
            return self._refusal(whole, losses, samples, "the mean")
        return self._find_ignored(outputs, targets)

    def _refusal(self, whole: float, losses: list[float], samples: int, kind: str) -> str:
        parts = " and ".join(f"{each:.6g}" for each in losses)
        return (
            f"loss is not a mean over samples, so ranks cannot compute it on their own: of {samples} samples it is "
            f"{whole:.6g}, of two parts of them {parts}, of which it is not {kind}. {_WAYS_OUT} A loss that compares "
            "samples needs those of all ranks: see the page on losses."
        )

    def _find_ignored(self, outputs: Any, targets: Any) -> str:
        """Find out if the loss leaves out labels of -100; return a refusal if there are any."""
        is_labels = isinstance(targets, torch.Tensor) and targets.dtype in (torch.int64, torch.int32)
        if not is_labels or needs_exchange(self._loss):
            return ""
        # On the host, where an index that is out of range is an error; on a GPU it would end the process.
        outputs, targets = (tree_map(_on_host, each) for each in (outputs, targets))
        loss = copy.deepcopy(self._loss)
        loss = loss.cpu() if isinstance(loss, nn.Module) else loss
        marked = targets.clone()
        marked[0] = _IGNORED
        try:
            found = float(loss(outputs, marked).mean())
            others = float(loss(tree_map(lambda leaf: leaf[1:], outputs), targets[1:]).mean())
        except Exception:  # noqa: BLE001 - it takes no such label
            return ""
        self._ignores = _close(found, others, 1e-4)
        return self._ignored() if self._ignores and bool((targets == _IGNORED).any()) else ""

    def _ignored(self) -> str:
        return (
            f"loss leaves out labels of {_IGNORED} and divides by the others, whose number differs by rank. {_WAYS_OUT}"
        )


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _on_host(leaf: torch.Tensor) -> torch.Tensor:
    leaf = leaf.cpu()
    return leaf.float() if leaf.dtype in (torch.float16, torch.bfloat16) else leaf


def _require_rows(leaf: Any, samples: int) -> Any:
    if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0] != samples:
        raise ValueError(f"outputs and targets are not tensors of {samples} rows")
    return leaf


def _buffers(loss: Any) -> dict[str, torch.Tensor]:
    return dict(loss.named_buffers()) if isinstance(loss, nn.Module) else {}


def _tolerance(outputs: Any) -> float:
    found: list[float] = []
    tree_map(lambda leaf: found.append(_TOLERANCE.get(leaf.dtype, _TOLERANCE_OF_HALF)), outputs)
    return max(_TOLERANCE_OF_HALF if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled() else 0.0, *found)


def _close(a: float, b: float, tolerance: float, *, scale: float = 0.0) -> bool:
    return abs(a - b) <= tolerance * max(abs(a), abs(b), scale)


def _name(loss: Any) -> str:
    return getattr(loss, "__name__", type(loss).__name__)
