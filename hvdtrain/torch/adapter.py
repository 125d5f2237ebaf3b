"""Take the Trainer's steps in PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import hvdtrain.torch as hvd
from hvdtrain.adapter import Fault, OpenStep, Options, Ranks, Reduce, State
from hvdtrain.data.prefetch import Prefetch
from hvdtrain.data.sources import Batch
from hvdtrain.data.trees import tree_map
from hvdtrain.distributed import agreement, gpu_path, launch_environment
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.recorder import recorder
from hvdtrain.distributed.world import World
from hvdtrain.errors import HvdTrainError
from hvdtrain.telemetry.memory import Held
from hvdtrain.torch.ops import device_copies, divided, engine, lazy, names
from hvdtrain.torch.ops.average_buffers import average_buffers
from hvdtrain.torch.ops.finite import first_non_finite
from hvdtrain.torch.ops.gpu_clock import GpuClock
from hvdtrain.torch.ops.sync_batch_norm import convert_torchs
from hvdtrain.torch.reduction.loss_weights import Counted
from hvdtrain.torch.reduction.memory import held_by
from hvdtrain.torch.reduction.shard_commits import commits_of
from hvdtrain.torch.reduction.weight_access import Changes, Optimizers, WeightAccess
from hvdtrain.torch.steps import activations, divided_errors, meta_device, training_state
from hvdtrain.torch.steps.arguments import check, check_collectives, check_grid
from hvdtrain.torch.steps.attempt import Attempt
from hvdtrain.torch.steps.compute import (
    LossStep,
    OwnStep,
    Yielded,
    YieldingStep,
    move,
    sum_of_nothing,
    without_gradient,
)
from hvdtrain.torch.steps.grid_state import GridState, from_own_names, own_names
from hvdtrain.torch.steps.loss_check import LossCheck, as_module
from hvdtrain.torch.steps.losses import as_tensor
from hvdtrain.torch.steps.metrics import Totals, named_metrics
from hvdtrain.torch.steps.micro_batches import MicroBatches
from hvdtrain.torch.steps.modes import Modes
from hvdtrain.torch.steps.named_steps import END, Chosen, Names
from hvdtrain.torch.steps.open_steps import OpenSteps
from hvdtrain.torch.steps.together import Together, graph_of_a_later_yield
from hvdtrain.torch.steps.update import Update

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PLAIN: AbstractContextManager[Any] = nullcontext()
# In rank_state.
_MODES, _TRAINED, _SYNCS = "max.train_mode", "max.requires_grad", "max.collectives_in_step"


class TorchAdapter:
    """Takes steps of a torch.nn.Module; `DistributedOptimizer` reduces over ranks. `Trainer` explains the arguments."""

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Any,
        loss: Any,
        metrics: Any,
        options: Options,
        world: World,
        step: Any = None,
    ) -> None:
        given, several = model, isinstance(optimizer, dict)
        if isinstance(model, dict):
            is_training = any(each.training for each in model.values())
            model = nn.ModuleDict(model)
            model.training = is_training
        optimizers: dict[str, Any] = optimizer if several else {"": optimizer}
        self.notes: list[str] = []
        if world.size > 1 or launch_environment.is_elastic():
            self.notes += filter(None, [convert_torchs(model)])
        if world.grid is not None:  # after an evaluation fully_shard shows whole weights, which the checks refuse
            divided.reshard(model)
        with agreement.everywhere(world=world, name="grid.check") if world.grid is not None else _PLAIN:
            check(model, optimizers, loss, step, options, grid=world.grid)
            check_grid(model, optimizers, options, world, has_step=step is not None)
        lazy.agree(model, world)
        self._options, self._world, self._device = options, world, torch.device(world.device)
        if self._device.type == "cuda" and gpu_path.is_async():
            recorder.use(GpuClock(self._device))
        self._device = meta_device.place(model, list(optimizers.values()), self._device, world)
        self._model = model
        self._modes = Modes(model, self.notes.append)
        self._checkpoints = _PLAIN
        if options.checkpoint_activations:
            models = given if isinstance(given, dict) else {"": given}
            self._checkpoints = activations.choose(models, options.checkpoint_activations, world)
            self.notes.append(str(self._checkpoints))
        loss = as_module(loss)
        if isinstance(loss, nn.Module):
            loss = loss.to(self._device)
        named = named_metrics(metrics, loss)
        split = DataRanks(world).size > 1 or options.accumulate > 1 or options.micro_batch is not None or options.cutoff
        self._loss_check = LossCheck(loss, world, split=split)
        by_loss = LossStep(model, loss, self._to_device, world.rank, self._loss_check)
        self._stages: Any = None  # computes a pipeline
        if world.grid is not None and world.grid.stages > 1:
            self._stages = self._make_stages(model, by_loss)
        self._step: LossStep | OwnStep = by_loss
        if step is not None:
            kind = YieldingStep if several else OwnStep
            self._step = kind(given, step, self._to_device, world.rank, has_metrics=bool(named))
        self._training = False  # the totals are those of an unfinished epoch
        self._dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        self._copies = device_copies.of(self._device, self._dtype)
        # True if ranks wait for each other before backward: one without samples must go forward and backward as well.
        self._has_shards = world.grid is not None and world.grid.shards > 1
        self._zero_gradients = divided.ZeroGradients(model)
        self._calls_collectives = False  # the model or step, besides those that torch calls itself
        self._has_sync_norm = any(isinstance(m, hvd.SyncBatchNorm) for m in model.modules())
        self._syncs_in_forward = self._has_sync_norm or (self._has_shards and self._stages is None)
        # Likewise in evaluation, where SyncBatchNorm does not.
        self._syncs_in_evaluation = self._has_shards
        losses = _loss_names(list(optimizers))
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.couples_samples = not all(isinstance(norm, hvd.SyncBatchNorm) for norm in norms)
        self._totals = Totals(named, self._device, world, losses)
        self._reduced = world.size > 1 or launch_environment.reduces_alone()
        self._how: dict[str, Any] = {"loss": loss, "options": options, "world": world}
        self._updates = {name: Update(each, model, name=name, **self._how) for name, each in optimizers.items()}
        self._joined: dict[Chosen, Update] = {}  # of the optimizers that one loss has trained
        self._update = next(iter(self._updates.values()))
        self._changes = Changes(self._update.exchanges.names, options.compression)
        self._names = Names(list(optimizers), world)
        self.fault: Fault | None = None
        self._is_built, self._is_checked = lazy.first(model) is None, False
        parts = 1 if self._stages is None else self._stages.micro_batches
        self._micro_batches = MicroBatches(options.micro_batch, model, world, parts=parts)
        self._grid_state: GridState | None = None
        if world.grid is not None:
            self._grid_state = GridState(world.grid, model, lambda: (self._update.optimizer, self._update.scaler))
        shards = [each for update in self._updates.values() for each in update.exchanges.shards]
        self.shard_commits = commits_of(lambda: shards) if shards else None
        undoes = options.nan_policy in ("skip", "stop") or options.micro_batch == "auto"
        self._attempt = Attempt(model, self._totals) if undoes else None
        self._open_steps: OpenSteps | None = None
        if options.cutoff:
            self._open_steps = OpenSteps(model, self._update, self._totals, self._forward, world, options)

    @property
    def step_taken(self) -> bool:
        """False if the last step was refused, or loss scaling skipped the updates of all its optimizers."""
        updates = [*self._updates.values(), *self._joined.values()]
        tried = [each.step.was_taken for each in updates if each.step.was_taken is not None]
        return self.fault is None and (not tried or any(was_taken() for was_taken in tried))

    @property
    def prefetch(self) -> Prefetch | None:
        """Gathers batches of arrays in pinned memory before their steps, on a GPU."""
        if self._copies is None:
            return None
        # Of several batches in a step, or of parts of one, the device shall not hold all at once.
        saves_memory = self._options.accumulate > 1 or self._options.micro_batch is not None
        return Prefetch(self._copies, step=self._options.accumulate, copies=not saves_memory)

    @property
    def learning_rates(self) -> list[float]:
        """One per parameter group."""
        return [float(group["lr"]) for group in self._groups()]

    @learning_rates.setter
    def learning_rates(self, rates: list[float]) -> None:
        for group, rate in zip(self._groups(), rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)  # in place: a captured or compiled step reads this tensor
            else:
                group["lr"] = rate

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The settings of each parameter group, without the values of torch's schedulers and of fused steps."""
        return training_state.settings(self._groups())

    @settings.setter
    def settings(self, settings: list[dict[str, Any]]) -> None:
        self.learning_rates = [new.get("lr", rate) for new, rate in zip(settings, self.learning_rates, strict=True)]
        for group, given in zip(self._groups(), settings, strict=True):
            for name in given.keys() - {"lr"}:
                group[name] = tuple(given[name]) if isinstance(group[name], tuple) else given[name]

    @property
    def class_weight(self) -> None:
        """None: a torch loss has its own."""

    @class_weight.setter
    def class_weight(self, weight: dict[int, float] | None) -> None:
        if weight is not None:
            example = "torch.nn.CrossEntropyLoss(weight=tensor)"
            raise ValueError(f"class_weight is for Keras. For torch, use {example}. Received: class_weight={weight}")

    def _groups(self) -> list[dict[str, Any]]:
        return [group for update in self._updates.values() for group in update.optimizer.param_groups]

    @property
    def rank_state(self) -> dict[str, NDArray[Any]]:
        """Random states, buffers, modules' modes, the epoch's totals, and which gradients travel together."""
        held = training_state.rank_state(self._model) | self._micro_batches.rank_state
        held |= {_MODES: self._modes.array, _TRAINED: training_state.trained_flags(self._model)}
        held[_SYNCS] = np.array([self._syncs_in_forward, self._syncs_in_evaluation], np.uint8)
        for update in self._updates.values():
            held |= update.rank_state
        held |= self._changes.compressor.state()
        if self._training:
            held |= self._totals.arrays()
        return held if self._grid_state is None else own_names(held, self._world.grid)

    @rank_state.setter
    def rank_state(self, held: dict[str, NDArray[Any]]) -> None:
        held = from_own_names(held, self._world.grid)
        training_state.set_rank_state(held, self._model)
        if _TRAINED in held and (changed := training_state.set_trained_flags(held[_TRAINED], self._model)):
            self.notes.append(f"requires_grad is as in the checkpoint: changed for {_count(changed)}")
        if _MODES in held:
            self._modes.array = held[_MODES]
        if _SYNCS in held and self._world.size > 1:  # the next step may be a short one, with a rank without samples
            forward, evaluation = map(bool, held[_SYNCS])
            self._syncs_in_forward |= forward
            self._syncs_in_evaluation |= evaluation
        self._micro_batches.rank_state = held
        for update in self._updates.values():
            update.rank_state = held
        self._changes.compressor.load(held)
        self._training = self._totals.load(held) or self._training

    def reseed(self, seeds: Mapping[str, int]) -> None:
        """Seed those of torch's generators that are in `seeds`, by their names in `rank_state`."""
        training_state.reseed(seeds)

    def start(self) -> None:
        """Broadcast weights, buffers, optimizer state and the precision scaler from the root.

        A model with lazy modules waits for its first batch: see `_build`.
        """
        if not self._is_built:
            self._is_built = lazy.share_shapes(self._model, self._world)
        if not self._is_built:
            return
        self._end_open_steps()
        self._modes.start()
        self._loss_check.begin()
        if self._grid_state is not None:
            self._start_parts(self._grid_state)
        elif self._reduced:
            hvd.broadcast_parameters([*names.parameters(self._model), *names.buffers(self._model)], root_rank=0)
        for update in self._updates.values():
            update.start()
        self._changes.compressor.reset()

    def _start_parts(self, state: GridState) -> None:
        """Give each part of the model to its ranks: that of the root, which has loaded it, or of the first replica."""
        state.start(self._own_state)
        grid = self._world.grid
        grid.broadcast_parameters(self._model)
        optimizer = self._update.optimizer
        hvd.broadcast_optimizer_state(optimizer, root_rank=grid.part_root, process_set=grid.process_set)

    def _make_stages(self, stage: Any, step: LossStep) -> Any:
        """Return what computes the stages of a pipeline; imported here, because torch's schedules take a while."""
        from hvdtrain.torch.steps.stage_step import StageStep

        stage.within = self._within_stage
        return StageStep(stage, step, self._to_device, self._world.rank, lambda *each: self._totals.add(*each))

    @contextmanager
    def _within_stage(self, samples: int) -> Iterator[None]:
        """Compute so many samples of a stage in the chosen precision."""
        norms = self._normalize_by_running_statistics() if samples == 1 and self._model.training else _PLAIN
        with divided_errors.computing(self._model, self._world), self._autocast(), self._checkpoints, norms:
            yield

    def _build(self, batch: Batch) -> None:
        """Give lazy modules their shapes by the first batch, on all ranks, which then begin with the root's weights."""
        with agreement.everywhere(world=self._world, name="build"):
            self._check_data(batch)
            with self._modes.evaluating(), torch.no_grad(), self._autocast():
                self._step.build(batch)
            lazy.check(lazy.tensors(self._model).items(), what="The Trainer")
        self.start()

    def reduce_over(self, ranks: Ranks) -> None:
        """Reduce the next steps' gradients over these ranks."""
        for update in self._updates.values():
            update.reduce_over(ranks)

    def delay(self, between_exchanges: Callable[[], None]) -> None:
        """Apply each step's gradient in the step after it."""
        self._update.exchanges.delay(between_exchanges)

    def weight_access(self) -> WeightAccess:
        """Return access to weights and optimizer state."""
        lazy.check(lazy.tensors(self._model).items(), what="What reads weights before the first step")
        return WeightAccess(self._optimizers(), self._world, self._changes)

    def train_step(self, batches: Sequence[Batch]) -> None:
        """Forward and backward over each batch, one reduced and clipped update over all."""
        if not self._is_built:
            self._build(batches[0])
        step = partial(self._take_step, first=self._begin_step())
        known = None if self._is_checked else set(self._model.parameters())
        self.fault = self._micro_batches.run(step, batches, self._update, self._attempt)
        if known is not None:
            self._check_new(known)
        self._loss_check.agree()

    def _check_new(self, known: set[nn.Parameter]) -> None:
        """Raise ValueError if the first step has created parameters, which nobody trains."""
        self._is_checked = True
        trained = {p for group in self._groups() for p in group["params"]}
        new = [name for name, p in names.parameters(self._model) if p.requires_grad and p not in known | trained]
        if new:
            raise ValueError(
                f"The first batch has created parameters that no optimizer trains. Received: {_count(new)}, on rank "
                f"{self._world.rank}. Create them in __init__, by a lazy module such as torch.nn.LazyLinear if a size "
                "is not known there, or call the model once on a batch before you make the optimizer."
            )

    def open_step(self, step: OpenStep) -> None:
        """Contribute to a step while it is open, and apply the mean of what ranks have contributed."""
        assert self._open_steps is not None
        if DataRanks(self._world).size == 1:  # nobody closes it early
            for _ in range(int(step.planned[0])):
                step.contribute()
            self.train_step(step.batches)
            step.counts = step.planned
            return
        self._begin_step()
        if self._attempt is not None:
            self._attempt.begin()
        self.fault = self._open_steps.take(step)
        self._loss_check.agree()
        if self.fault is not None and self._attempt is not None:
            self._attempt.undo()

    def _begin_step(self) -> bool:
        """Let the model train; return whether this is the first step since metrics were reset."""
        for update in [*self._updates.values(), *self._joined.values()]:
            update.step.was_taken = None
        first = not self._training
        if first:
            self._totals.clear()  # of an evaluation that was interrupted
            self._training = True
        self._modes.train()
        if first and self._world.grid is not None and self._world.grid.shards > 1:
            divided.reduce_in_backward(self._model)
        return first

    def _take_step(self, batches: Sequence[Batch], *, first: bool) -> Fault | None:
        """Take a step over batches or micro-batches."""
        if isinstance(self._step, YieldingStep):
            return self._take_named_steps(self._step, batches, first=first)
        if self._update.needs_closure:
            self._update.search(lambda again: self._evaluate(batches, first=first and not again, again=again))
            return None
        if self._attempt is not None:
            self._attempt.begin(draws=self._micro_batches.adapts)
        self._evaluate(batches, first=first)
        applied = self._update.apply(batches)
        if applied.must_undo and self._attempt is not None:
            self._attempt.undo()
        if not applied.is_refused:
            return None
        late = applied.fault
        return self._fault(self._update, batches) if late is None else self._update.late_fault(late)

    def _evaluate(self, batches: Sequence[Batch], *, first: bool, again: bool = False) -> None:
        """Forward and backward over each batch of a step; `again` if the metrics have counted them."""
        update = self._update
        weights = update.begin(batches, everyone=self._syncs_in_forward, first=first)
        if self._stages is not None:
            self._stages.train(batches, weights, update.scaled)
            return
        for index, batch in enumerate(batches):
            loss = None
            if batch.local_count:  # also if no label counts: metrics and running statistics take all samples
                loss, weights.counted[index] = self._forward(batch, weights.counted[index], again=again)
            weights.expect(index)
            if loss is not None and weights.counted[index].weight:
                update.backward(loss, weights.factor(index))
            elif self._syncs_in_forward:
                with self._zero_gradients.in_backward():
                    update.backward(self._run_empty(batch) if loss is None else self._without_gradient(loss))

    def _take_named_steps(self, step: YieldingStep, batches: Sequence[Batch], *, first: bool) -> Fault | None:
        """Take one reduced step for each yield of the user's step over the batches, which advance together."""
        runs, earlier = [self._run(step, batch) for batch in batches], list[str]()
        for number in itertools.count():
            if self._attempt is not None:
                self._attempt.begin()
            update, begun, mine = self._update, END, 0.0
            for index, (batch, run) in enumerate(zip(batches, runs, strict=True)):
                with self._computing(batch):
                    names, found = (None, None) if run is None else next(run, (END, None))
                weight = found.count if found else 0.0
                mine += weight
                # A rank without samples learns here which optimizers the others have chosen.
                chosen, total = self._names.agree(names, mine, begun if index else None, first=not number)
                if not index:
                    begun = chosen
                    if chosen != END:
                        update = self._update_of(chosen)
                        weights = update.begin(batches, everyone=self._syncs_in_forward, first=first)
                if chosen == END:
                    continue
                weights.counted[index] = counted = Counted(weight, weight, batch.local_count, False)
                weights.expect(index, total)
                if found and batch.local_count:
                    self._totals.add(found.outputs, found.targets, found.mean, counted, _loss_names(chosen))
                if found and weight:
                    with graph_of_a_later_yield(chosen, earlier, self._world.rank) if number else _PLAIN:
                        update.backward(found.mean, weights.factor(index))
                elif found and self._syncs_in_forward:
                    update.backward(without_gradient(found.mean))
            if begun == END:
                return None
            if update.apply(batches).is_refused:
                return self._fault(update, batches, number)
            earlier += begun
        return None

    def _update_of(self, chosen: Chosen) -> Update:
        """Return the update of these optimizers: of several, one that scales its loss as the first one's is scaled."""
        first = self._updates[chosen[0]]
        if len(chosen) == 1:
            return first
        if chosen not in self._joined:
            together = Together({name: self._updates[name].optimizer for name in chosen})
            self._joined[chosen] = Update(together, self._model, name=" and ".join(chosen), **self._how)
            self._joined[chosen].scaler = first.scaler  # which checkpoints hold
        return self._joined[chosen]

    def _run(self, step: YieldingStep, batch: Batch) -> Iterator[Yielded] | None:
        """Return the user's step over a batch; None where this rank has no samples and nothing synchronizes."""
        if not batch.local_count and not self._syncs_in_forward:
            return None
        if not batch.local_count:
            self._check_data(batch)
        return step.run(batch)

    def eval_step(self, batch: Batch) -> None:
        """Add a batch to loss and metrics."""
        if not self._is_built:
            self._build(batch)
        if batch.local_count or (batch.global_count and self._syncs_in_evaluation):
            self._evaluate_batch(batch)
        if batch.global_count:  # else not every rank may have such a batch
            self._loss_check.agree()

    def _evaluate_batch(self, batch: Batch) -> None:
        counted = self._update.weights.count(batch)
        self._modes.evaluate()
        if self._stages is not None:
            self._stages.evaluate(batch, counted)
            return
        with torch.no_grad():  # not inference_mode, in which a step could not compute a gradient that it needs
            if not isinstance(self._step, YieldingStep):
                self._forward(batch, counted) if batch.local_count else self._run_empty(batch)
                return
            with self._computing(batch):
                for chosen, found in self._step.run(batch):
                    counted = Counted(found.count, found.count, batch.local_count, False)
                    self._names.check(chosen)
                    if batch.local_count:
                        self._totals.add(found.outputs, found.targets, found.mean, counted, _loss_names(chosen))

    def predict_step(self, inputs: Any) -> Any:
        """Return the outputs in float32 (or as they are, if not floats), on the host."""
        if self._world.size > 1:
            lazy.check(names.parameters(self._model), what="predict before fit")
        with self._modes.evaluating(), torch.no_grad(), self._autocast():
            outputs = (self._step if self._stages is None else self._stages).predict(inputs)
        return tree_map(training_state.to_host, outputs)

    def metrics(self, reduce: Reduce, *, keep: bool = False) -> dict[str, float]:
        """Return means over all samples, and the results of metrics with state."""
        if self._stages is None:
            results = self._totals.results(reduce, live=keep)
        else:  # the last stage has counted
            results = self._totals.results(reduce, live=keep) if self._stages.has_metrics else {}
            results = self._stages.share(results)
        if not keep:
            self._loss_check.end_evaluation()
            self.reset_metrics()
        return results

    def reset_metrics(self) -> None:
        """Drop what they have counted; an evaluation ends."""
        self._modes.resume()
        self._training = False
        self._totals.clear()

    def local_metrics(self) -> dict[str, float]:
        """Return this rank's metrics since they were started."""
        if self._stages is not None and not self._stages.has_metrics:
            return {}
        return self._totals.results(lambda local: local, live=True)

    def abandon(self) -> None:
        """Let no other rank wait for this one's steps."""
        if self._open_steps is not None:
            self._open_steps.abandon()

    def _end_open_steps(self) -> None:
        if self._open_steps is not None:
            self._open_steps.end()

    def finish(self) -> Fault | None:
        """Apply what is still in flight; leave the model to others."""
        self._end_open_steps()
        fault = self._update.finish()
        for update in self._updates.values():
            update.exchanges.detach()
        return fault

    def average_buffers(self) -> None:
        """Average running statistics over ranks; counters become the largest. See `average_buffers`."""
        if self._reduced:
            average_buffers(list(names.buffers(self._model)), self._world)

    def _optimizers(self) -> Optimizers:
        return {name: (update.optimizer, update.scaler) for name, update in self._updates.items()}

    def memory(self) -> Held:
        """Return the sizes of weights and buffers, gradients, optimizer state and buckets."""
        tensors = [each for _, each in (*names.parameters(self._model), *names.buffers(self._model))]
        optimizers = [each.optimizer for each in self._updates.values()]
        return held_by(tensors, optimizers, [self._changes.compressor])

    def state(self) -> State:
        """Return weights, buffers, optimizer state and scaler, as arrays that the next step may change."""
        state = self._own_state()
        if self._grid_state is not None:
            return self._grid_state.capture(state)
        arrays, meta = self._update.exchanges.used.state()
        return replace(state, arrays=state.arrays | arrays, meta=state.meta | meta, pending=frozenset(arrays))

    def _own_state(self) -> State:
        return training_state.capture(self._model, self._optimizers())

    def load_state(self, state: State) -> None:
        """Restore a state; raises ValueError naming the first tensor that does not fit, before anything changes."""
        if self._grid_state is not None:
            self._grid_state.load(state)
            return
        training_state.restore(state, self._model, self._optimizers())
        self._update.exchanges.used.load(state.arrays, state.meta)

    def _forward(self, batch: Batch, counted: Counted, *, again: bool = False) -> tuple[torch.Tensor, Counted]:
        """Return the loss, a scalar, and what counts of the batch; add both to the metrics, unless run `again`."""
        with self._computing(batch):
            found = self._step(batch)
        if found.count is not None:
            counted = Counted(found.count, found.count, batch.local_count, False)
        if not again:
            self._totals.add(found.outputs, found.targets, found.mean, counted)
        if not counted.weight and found.count is None:  # the mean of no labels is NaN, and its gradient is zero
            return sum_of_nothing(found.outputs), counted
        return found.mean, counted

    @contextmanager
    def _computing(self, batch: Batch) -> Iterator[None]:
        """Compute in the chosen precision; notice if ranks wait for each other in it."""
        alone = batch.local_count == 1 and self._model.training and (batch.global_count > 1 or self._micro_batches.size)
        before = engine.started.operations
        norms = self._normalize_by_running_statistics() if alone else _PLAIN
        errors = divided_errors.computing(self._model, self._world)
        with errors, self._autocast(), self._checkpoints, norms, self._zero_gradients.in_forward():
            yield
        if engine.started.operations != before and self._world.size > 1:
            self._calls_collectives = True
            self._sync_in_step()

    def _sync_in_step(self) -> None:
        """Note that the model, or a step of the user's own, calls collectives, so that every rank must run it."""
        if not torch.is_grad_enabled():
            self._syncs_in_evaluation = True
        elif not self._syncs_in_forward:
            check_collectives(self._options)
            self._syncs_in_forward = True

    @contextmanager
    def _normalize_by_running_statistics(self, kind: type[nn.Module] = nn.BatchNorm1d) -> Iterator[None]:
        """Let norms of this kind use their running statistics, for a row from which none can be taken.

        BatchNorm1d raises for a rank's single sample of a short tail; a row that stands in for none counts nowhere.
        """
        norms = nn.ModuleList(m for m in self._model.modules() if isinstance(m, kind) and m.training).eval()
        try:
            yield
        finally:
            norms.train()

    def _loss_again(self, batch: Batch, counted: Counted, number: int) -> torch.Tensor:
        """Return the loss of a batch once more; of several, the one that is yielded after `number` others."""
        if isinstance(self._step, YieldingStep):
            with self._computing(batch):
                _, found = next(itertools.islice(self._step.run(batch), number, None))
            return found.mean  # type: ignore[no-any-return]
        return self._forward(batch, counted, again=True)[0] if batch.local_count else self._run_empty(batch)

    def _run_empty(self, batch: Batch) -> torch.Tensor:
        """Run no samples through a model whose layers synchronize in forward and backward; return a loss of zero."""
        self._check_data(batch)
        norms: Any = _PLAIN
        rows, before = 0, engine.started.operations
        if self._world.grid is not None and self._world.grid.tensors > 1 and not self._calls_collectives:
            # torch cannot view a divided tensor without rows: one row stands in for none, and must not count in
            # running statistics, nor among the rows that a collective gathers.
            rows, norms = 1, self._normalize_by_running_statistics(nn.modules.batchnorm._BatchNorm)
        with self._autocast(), self._checkpoints, norms, self._zero_gradients.in_forward():
            loss = self._step.run_empty(batch, rows=rows)
        self._calls_collectives |= engine.started.operations != before
        # A norm's own gradient has no rows.
        return loss if self._has_sync_norm or not torch.is_grad_enabled() else self._without_gradient(loss)

    def _without_gradient(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss whose gradient is zero: NaN times zero would be that of rows that other ranks have gathered."""
        return without_gradient(loss, may_be_nan=self._has_shards and not self._calls_collectives)

    def _check_data(self, batch: Batch) -> None:
        """Raise if there is no batch from which one of no samples could be made."""
        if batch.item is None and batch.inputs is None:
            raise HvdTrainError(
                f"rank {self._world.rank} never had any data, and other ranks wait for it in each step: in a "
                "SyncBatchNorm, a shard, or a collective of step. Give every rank at least one sample, or use fewer "
                "ranks."
            )

    def _to_device(self, tree: Any) -> Any:
        return move(lambda value: as_tensor(value, self._device, self._dtype, self._copies), tree)

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = _AUTOCAST.get(self._options.precision)
        return torch.autocast(self._device.type, dtype=dtype) if dtype else _PLAIN

    def _fault(self, update: Update, batches: Sequence[Batch], number: int = 0) -> Fault:
        """Return what is not finite, and undo the step as far as `nan_policy` requests; `number` counts its yields."""
        fault = self._find_fault(update, batches, number) if self._world.grid is None else update.fault_of_losses()
        if self._attempt is not None:
            self._attempt.undo()
        update.optimizer.zero_grad()
        return fault

    def _find_fault(self, update: Update, batches: Sequence[Batch], number: int) -> Fault:
        """Compute the step's gradient once more, for this rank alone, and return what is not finite."""
        parameters = update.parameters
        reduced = update.first_non_finite()
        losses, own = [], None
        trained = [p for p in parameters if p.requires_grad]
        for batch, counted in zip(batches, update.weights.counted, strict=True):
            if counted.weight:
                # Hooks that reduce gradients do not see what autograd returns.
                loss = self._loss_again(batch, counted, number)
                gradients = torch.autograd.grad(loss, trained, allow_unused=True)
                own = first_non_finite(zip(trained, gradients, strict=True)) if own is None else own
                losses.append(float(loss.detach()))
            elif self._syncs_in_forward:
                nothing = self._loss_again(batch, counted, number) * 0.0
                torch.autograd.grad(nothing, trained, allow_unused=True)
        loss_mean = float(np.mean(losses)) if losses else float("nan")
        return Fault(reduced, update.name_of(own), loss_mean)


def _count(parameters: list[str]) -> str:
    return parameters[0] if len(parameters) == 1 else f"{len(parameters)} parameters, the first is {parameters[0]}"


def _loss_names(optimizers: Sequence[str]) -> list[str]:
    return [f"{name}_loss" if name else "loss" for name in optimizers]


make_adapter = TorchAdapter
