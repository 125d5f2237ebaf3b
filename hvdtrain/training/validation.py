"""Evaluate the validation sets of `fit`, at the ends of epochs and within them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from hvdtrain.adapter import Adapter
from hvdtrain.callbacks.base import Callback, CallbackList, RunContext
from hvdtrain.data.generators import Generators
from hvdtrain.data.sources import Source, reading
from hvdtrain.data.trees import is_array
from hvdtrain.distributed import rank_state
from hvdtrain.distributed.data_ranks import DataRanks


@dataclass(frozen=True)
class Validation:
    """The validation sets of a fit, and when they are due."""

    adapter: Adapter
    context: RunContext
    sets: Mapping[str, Source]  # by name; "" is the name of a single set
    every: int | None  # optimizer steps; None for epochs' ends only
    of_training: Generators  # the generators that the training data hold

    def is_due(self, global_step: int) -> bool:
        """Return whether a validation within the epoch is due after this step."""
        return self.every is not None and global_step % self.every == 0

    def run(self, hooks: CallbackList, *, within_epoch: bool) -> dict[str, float]:
        """Return the metrics of all sets, named "val_...", and call the callbacks around each set."""
        logs: dict[str, float] = {}
        for name, source in self.sets.items():
            for hook in hooks:
                hook.on_validation_begin(self.context)
            with self._training_aside(within_epoch=within_epoch):
                found = evaluate(self.adapter, self.context, source, hooks)
            prefix = f"val_{name}_" if name else "val_"
            named = {prefix + metric: value for metric, value in found.items()}
            # A callback that gives the model its weights back comes first: others may read or restore weights.
            for hook in sorted(hooks, key=lambda each: not each.swaps_weights):
                hook.on_validation_end(self.context, named)
            logs |= named
        return logs

    @contextmanager
    def _training_aside(self, *, within_epoch: bool) -> Iterator[None]:
        """Evaluate on averaged statistics; training then continues with its own metrics, statistics, random states."""
        before = rank_state.random_states() | self.adapter.rank_state
        if within_epoch:
            self.adapter.reset_metrics()
            self.adapter.average_buffers()
        with self.of_training.aside():
            yield
        load_rank_state(self.adapter, before)


def evaluate(adapter: Adapter, context: RunContext, source: Source, hooks: Iterable[Callback] = ()) -> dict[str, float]:
    """Return the loss and metrics over all of the data, exact over all ranks."""
    if source.facts.get("endless"):
        raise ValueError("data to evaluate never ends. Received: an infinite dataset. Bound it: .take(batches)")
    with reading(source.epoch(0, shuffle=False)) as batches:
        for step, batch in enumerate(batches):
            for hook in hooks:
                hook.on_validation_step_begin(context, step)
            adapter.eval_step(batch)
            for hook in hooks:
                hook.on_validation_step_end(context, step)
    return adapter.metrics(lambda vector: DataRanks(context.world).allreduce(vector, name="metrics"))


def load_rank_state(adapter: Adapter, arrays: rank_state.Arrays) -> None:
    """Restore this rank's random states, and the adapter's state of this rank."""
    rank_state.set_random_states(arrays)
    adapter.rank_state = arrays


def named_sets(data: Any, keys: Set[str] | None = None) -> dict[str, Any]:
    """Return the validation sets by name: the datasets of a dict, or anything else as a single set.

    A dict of arrays, or of dicts, is a single set: the inputs of a model by name. But if the training data are a dict
    with these `keys`, dicts with the same keys are sets of their own.
    """
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        return {"": data}
    is_like_train = keys is None or data.keys() == keys
    are_sets = not is_like_train and all(isinstance(each, Mapping) and each.keys() == keys for each in data.values())
    if not are_sets and any(is_array(each) or isinstance(each, Mapping) for each in data.values()):
        return {"": data}
    wrong = [name for name in data if not isinstance(name, str) or not name]
    if wrong or not data:
        raise ValueError(f'validation sets need names: {{"clean": data}}. Received: {wrong or data!r}')
    return dict(data)
