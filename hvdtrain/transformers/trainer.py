"""transformers' Trainer on Horovod's ranks: N ranks train as one process does on N times the batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from accelerate.utils import find_batch_size
from transformers.trainer_utils import get_last_checkpoint

import hvdtrain.torch as hvd
from hvdtrain.distributed.agreement import require_equal
from hvdtrain.distributed.world import init
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.ops import names
from hvdtrain.torch.ops.average_buffers import average_buffers
from hvdtrain.torch.reduction.loss_weights import without_weight
from hvdtrain.transformers import arguments, batches, host, losses
from hvdtrain.transformers.accelerator import HorovodAccelerator, unwrapped
from hvdtrain.transformers.buckets import KeepBuckets

_NOT_YET = 2**31  # backward passes after which gradients would be sent: never
_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
_STOPS = _FLAGS[:2]


class TrainerOnRanks:
    """Put before a class of transformers' Trainer: `class Mine(TrainerOnRanks, SomeTrainer)`.

    Takes what the class takes. Each rank gets its part of the data and of the validation set; gradients are averaged by
    Horovod; rank 0 writes. One process trains as without it.
    """

    # transformers' Trainer has them.
    accelerator: Any
    args: Any
    compute_loss: Any
    compute_loss_func: Any
    control: Any
    model: Any
    model_accepts_loss_kwargs: bool
    optimizer: Any
    state: Any
    _tr_loss: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.world = init("torch")
        self._loss_kinds: dict[bool, losses.Kind | None] = {}  # by whether the loss gets num_items_in_batch
        self._weights: deque[_Weights] = deque()  # of batches to come
        self._of_batch = _Weights(1.0, 1.0, 1.0, False)  # of the last batch
        self._is_weighted = False
        super().__init__(*args, **kwargs)
        if self.world.size > 1:
            self.add_callback(KeepBuckets(self))  # type: ignore[attr-defined]

    # Making

    def create_accelerator_and_postprocess(self) -> None:
        """Let transformers make a HorovodAccelerator."""
        arguments.check(self.args, self.world)
        with _replaced(transformers.trainer, "Accelerator", HorovodAccelerator):
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if not isinstance(self.accelerator, HorovodAccelerator):
            raise host.different("whose Trainer makes an Accelerator elsewhere")
        host.require(self.accelerator, "_models", "_dataloaders", "gradient_state")
        arguments.check_accelerator(self.accelerator, self.world)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse on several ranks, which would search each on its own."""
        if self.world.size > 1:
            raise ValueError("On several ranks there is no hyperparameter_search. Start one job for each trial.")
        return super().hyperparameter_search(*args, **kwargs)  # type: ignore[misc]

    # Training

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train; all ranks resume from the same checkpoint, or none does."""
        if self.world.size > 1:
            arguments.check(self.args, self.world)
            if resume_from_checkpoint is True:
                resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True
            values = {"resume_from_checkpoint": str(resume_from_checkpoint), "steps": self.args.max_steps}
            values |= {"epochs": self.args.num_train_epochs, "accumulate": self.args.gradient_accumulation_steps}
            require_equal(values, world=self.world, what="what to train")
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def set_initial_training_values(self, args: Any, dataloader: Any, *rest: Any) -> Any:
        """Refuse a DataLoader of the user's own that gives each rank all of the data."""
        self._require_shared(dataloader, "get_train_dataloader")
        return super().set_initial_training_values(args, dataloader, *rest)  # type: ignore[misc]

    def _require_shared(self, loader: Any, method: str) -> None:
        if self.world.size > 1 and batches.find(loader) is None:
            raise ValueError(
                f"{method} returned a {type(loader).__name__} with all of the data on rank {self.world.rank}. Let it "
                "return self.accelerator.prepare(loader), which gives each rank its batches."
            )

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Return the number of labels of all ranks, as transformers counts them; note what each batch weighs."""
        if self.world.size == 1:
            return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
        has_labels, counts = True, np.zeros((len(batch_samples), 3))
        for number, batch in enumerate(batch_samples):
            has_labels &= self._labels(batch, device) is not None
            counts[number] = self._counts(batch)
        fillers = [False] * len(counts)
        if fillers and self.accelerator.is_at_filler:
            counts[-1], fillers[-1] = 0.0, True
        gathered = self.world.allgather(counts.T[None], name="transformers.counts")  # shape (ranks, 3, batches)
        weights = [losses.weights_of(gathered[:, i], self.world.rank) for i in range(3)]
        self._weights = deque(map(_Weights, *weights, fillers))
        takes_count = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if not (fillers and has_labels and takes_count):
            return None
        return torch.tensor(gathered[:, 0].sum(), dtype=torch.int64, device=device)

    def _labels(self, batch: Any, device: torch.device) -> float | None:
        """Return the number of labels in a batch as transformers counts them; None if it has none."""
        # This rank's, and also where the loss does not take the count.
        here, counting = (self.args, "average_tokens_across_devices", False), (self, "model_accepts_loss_kwargs", True)
        with _replaced(*here), _replaced(*counting):
            labels = super()._get_num_items_in_batch([batch], device)  # type: ignore[misc]
        return None if labels is None else float(labels)

    def _counts(self, batch: Any) -> losses.Counts:
        samples, device = float(find_batch_size(batch) or 1), self.args.device
        if (labels := self._labels(batch, device)) is None:
            return samples, samples, samples
        of_tokens = isinstance(batch["labels"], torch.Tensor) and batch["labels"].ndim > 1
        shifted = self._labels({**batch, "shift_labels": batch["labels"][..., 1:]}, device) if of_tokens else labels
        return labels, samples, shifted or 0.0

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute gradients of one batch; with the last batch of a step, average them over ranks."""
        if self.world.size == 1:
            return super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc, no-any-return]
        optimizer = unwrapped(self.optimizer)
        is_last = self.accelerator.sync_gradients
        optimizer.set_backward_passes_per_step(1 if is_last else _NOT_YET)
        self._begin(inputs)
        with self._loss_of_all_ranks():
            loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if not self._is_weighted:
            raise HvdTrainError(
                "training_step must compute its loss by self.compute_loss, which weighs it by what each rank has. "
                f"Received: a {type(self).__name__} that does not, on rank {self.world.rank}"
            )
        if is_last:
            optimizer.synchronize()
        return loss

    def _begin(self, inputs: Any) -> None:
        """Find what the batch counts, whoever computes its loss, and how often."""
        if not self._weights:
            self._get_num_items_in_batch([inputs], self.args.device)
        self._of_batch, self._is_weighted = self._weights.popleft(), False

    @contextmanager
    def _loss_of_all_ranks(self) -> Iterator[None]:
        """Within it, `compute_loss` returns this rank's share: its mean over ranks is one process's loss."""
        compute = self.compute_loss
        backward = ExitStack()

        def weighted(model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            items = kwargs.get("num_items_in_batch")
            with self.accelerator.alone():
                kind = self._loss_kinds.get(items is not None)
                if kind is None:
                    kind = losses.kind_of(compute, model, inputs, items, self.world, self._counts)
                    self._loss_kinds[items is not None] = kind
                found = compute(model, inputs, return_outputs=return_outputs, **kwargs)
            loss = found[0] if return_outputs else found
            weight = self._weight(kind)
            if not weight and torch.is_grad_enabled():
                backward.enter_context(without_weight(self.model))
            loss = _weighed(loss, weight)
            return (loss, *found[1:]) if return_outputs else loss

        self.compute_loss = weighted
        try:
            with backward:
                yield
        finally:
            del self.compute_loss

    def _weight(self, kind: losses.Kind | None) -> float:
        self._is_weighted, found = True, self._of_batch
        if found.is_filler:
            return 0.0
        return float(self.world.size) if kind == "sum" else getattr(found, kind or "labels")

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count no token of a batch that stands for none."""
        if self._of_batch.is_filler:
            inputs = {k: each[:0] for k, each in inputs.items() if isinstance(each, torch.Tensor) and each.ndim}
        super()._track_num_input_tokens(inputs)  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log, evaluate and save on all ranks if a callback on one asks for it; stop likewise."""
        acts = self._agree(_FLAGS)
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        if acts:  # callbacks of these events may stop, too
            self._agree(_STOPS)

    def _agree(self, flags: tuple[str, ...]) -> bool:
        """Set each flag of `control` that is set on one rank; return True if one is set."""
        if self.world.size > 1:
            mine = np.array([getattr(self.control, flag) for flag in flags], np.int32)
            for flag, value in zip(flags, self.world.allreduce(mine, "max", name="transformers.control"), strict=True):
                setattr(self.control, flag, bool(value))
        return any(getattr(self.control, flag) for flag in flags)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Let train_loss be the mean over ranks, also of steps that were not logged."""
        if self.world.size > 1:
            self._tr_loss = hvd.allreduce(self._tr_loss, name="transformers.train_loss")
            self._average_buffers()
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save on rank 0; random states on each rank."""
        self._average_buffers()
        super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def _average_buffers(self) -> None:
        """Make running statistics equal on all ranks."""
        if self.world.size > 1:
            average_buffers(list(names.buffers(self.model)), self.world)

    # Evaluation

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate each sample once over all ranks; the metrics are rank 0's, computed of all predictions."""
        if self.world.size == 1:
            return super().evaluation_loop(dataloader, *args, **kwargs)  # type: ignore[misc]
        self._require_shared(dataloader, "get_eval_dataloader or get_test_dataloader")
        self._average_buffers()
        with self.accelerator.evaluating(dataloader) as loader:
            found = super().evaluation_loop(loader, *args, **kwargs)  # type: ignore[misc]
        return found._replace(metrics=hvd.broadcast_object(found.metrics, 0, "transformers.metrics"))

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of all ranks' batches, and this rank's predictions and labels."""
        if self.world.size == 1:
            return super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        of_training, self._weights = self._weights, deque()
        self._begin(inputs)
        with self._loss_of_all_ranks():
            loss, *rest = super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if loss is not None:
            if not self._is_weighted:  # by compute_loss, which Seq2SeqTrainer does not call
                loss = _weighed(loss, self._weight("labels"))
            loss = hvd.allreduce(loss.reshape(1), name="transformers.evaluation")[0]
        self._weights = of_training
        return (loss, *rest)


class _Weights(NamedTuple):
    """What a rank's mean over a batch counts in the mean over ranks."""

    labels: float  # if it is a mean over labels
    samples: float  # if it is a mean over samples
    shifted: float  # if it is a mean over labels but the first of each sample
    is_filler: bool  # True if the batch only repeats another rank's sample


def _weighed(loss: torch.Tensor, weight: float) -> torch.Tensor:
    """Return a loss times its weight; 0, even if the loss is not finite, such as the mean of no label."""
    return loss * weight if weight else torch.nan_to_num(loss, 0.0, 0.0, 0.0) * 0.0


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within it, an attribute has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class Trainer(TrainerOnRanks, transformers.Trainer):
    """`transformers.Trainer` on Horovod's ranks, with the same arguments."""


class Seq2SeqTrainer(TrainerOnRanks, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` on Horovod's ranks, with the same arguments."""
