"""Take the Trainer's steps in Keras 3, on any backend.

The compiled step (and the user's own train_step in it), metrics, losses and callbacks stay Keras's. Gradients are
reduced over ranks in `hvdtrain.keras.DistributedOptimizer`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import keras
from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

import hvdtrain.keras as hvd
from hvdtrain.adapter import Fault, OpenStep, Options, Ranks, Reduce, Refusal, State, shard_refusals
from hvdtrain.data.sources import Batch
from hvdtrain.data.trees import as_array, tree_map
from hvdtrain.distributed import launch_environment
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.world import World
from hvdtrain.keras import activations, delayed, trained, training_state
from hvdtrain.keras.backends import number
from hvdtrain.keras.exchange import ALONE, EVERY_STEP
from hvdtrain.keras.losses import are_sums, as_global_sums, check_losses
from hvdtrain.keras.masks import MaskedSteps
from hvdtrain.keras.memories import Memories
from hvdtrain.keras.memory import held_by
from hvdtrain.keras.metrics import check_sums, reduced, scalars, weigh_losses_by_samples
from hvdtrain.keras.model_optimizers import all_optimizers, check_optimizers, other_optimizers, replace_optimizers
from hvdtrain.keras.optimizer import distributed_part
from hvdtrain.keras.overrides import STEPS, overrides
from hvdtrain.keras.own_logs import OwnLogs
from hvdtrain.keras.shards import check as check_sharded
from hvdtrain.keras.shards.commits import commits_of
from hvdtrain.keras.training_state import StepSnapshot, assign, build_optimizer, copies, metric_variables
from hvdtrain.keras.variables import broadcast_model, broadcast_variables
from hvdtrain.keras.weight_access import WeightAccess
from hvdtrain.keras.wrapping import adopt_optimizer
from hvdtrain.telemetry.memory import Held

log = logging.getLogger("hvdtrain")


def make_adapter(
    model: keras.Model, *, optimizer: Any, loss: Any, metrics: Any, options: Options, world: World, step: Any = None
) -> KerasAdapter:
    """Return the adapter for `model`, compiled with a distributed optimizer; see `Trainer` for arguments and errors."""
    if step is not None:
        raise TypeError(f"step= is for torch. Override train_step of your keras.Model instead. Received: step={step!r}")
    if options.shard not in (None, "optimizer"):
        raise ValueError(
            "Keras computes all gradients before any of them is reduced, so a rank holds whole ones. Use "
            f"shard='optimizer'. Received: shard={options.shard!r} for a Keras model on rank {world.rank}"
        )
    if options.micro_batch is not None:
        raise ValueError(
            "micro_batch is for torch: Keras's train_step computes a batch at once, and cannot be repeated. Use a "
            f"smaller batch_size, and accumulate. Received: micro_batch={options.micro_batch!r}"
        )
    plain = _plain_optimizer(model, optimizer, loss, metrics)
    if options.needs is not None:
        options.needs.check([*_refusals(model, options, world), *delayed.refusals(model, plain, options)])
    layers = model._flatten_layers(include_self=True)
    _refuse_synchronized(layers, world)
    if options.precision != "fp32":  # variables stay float32
        for layer in layers:
            layer.dtype_policy = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16"}[options.precision]
        model.train_function = model.test_function = model.predict_function = None
    in_half = any(layer.dtype_policy.name.endswith("mixed_float16") for layer in layers)
    if in_half and not isinstance(plain, keras.optimizers.LossScaleOptimizer):
        plain = keras.optimizers.LossScaleOptimizer(plain)  # small gradients would become zero
    check_optimizers(model, options)
    for each in (plain, *other_optimizers(model).values()) if options.shard is not None else ():
        check_sharded(each)

    def distribute(one: Any) -> Any:
        how: dict[str, Any] = {"compression": options.compression, "process_set": world.data_set}
        how |= {"backward_passes_per_step": options.accumulate, "shard_state": options.shard is not None}
        found = hvd.DistributedOptimizer(one, **how)
        _set_clip_norm(distributed_part(found), options.clip_norm)
        return found

    distributed = distribute(plain)
    replace_optimizers(model, distribute, own=distributed)
    if optimizer is None:
        adopt_optimizer(model, distributed)
    else:
        if not isinstance(metrics, dict):  # which is by output
            metrics = list(metrics) if isinstance(metrics, list | tuple) else [metrics]
        model.compile(optimizer=distributed, loss=loss, metrics=metrics or None, auto_scale_loss=False)
    return KerasAdapter(model, options, world)


def _refusals(model: keras.Model, options: Options, world: World) -> Iterator[Refusal]:
    """Yield what Keras cannot do, and what this model cannot."""
    kind = "a Keras model"
    yield from shard_refusals(options)
    yield Refusal(("open steps",), kind, "its compiled step computes a batch and applies the gradient; use balance")
    if world.size > 1:  # one process steps alone
        yield Refusal(("host steps",), kind, "its compiled step reduces over all ranks or none; leave out `within`")
    reason = "an exchange passes through the host, and a step would wait for it; leave out fragments and overlap"
    yield Refusal(("weights in flight",), kind, reason)
    if not model.built:
        reason = "ranks agree on the weights before the first step; give it a keras.Input, or build it"
        yield Refusal(("weights",), f"{model.name}, which is not built", reason)


def _plain_optimizer(model: keras.Model, optimizer: Any, loss: Any, metrics: Any) -> Any:
    """Return the given optimizer, or the optimizer of the compiled model; ValueError if they cannot be trained."""
    if optimizer is None and not model.compiled:
        raise ValueError(f"optimizer must be a Keras optimizer or a name. Received: None; {model.name} is not compiled")
    if model.built and not model.trainable_variables:
        raise ValueError(f"model has no trainable parameters. Received: {model.name} with {len(model.weights)} weights")
    if optimizer is None and (loss is not None or metrics):
        raise ValueError(f"Without an optimizer, compile()'s loss and metrics are used. Received: {loss=}, {metrics=}")
    plain = keras.optimizers.get(optimizer if optimizer is not None else model.optimizer)
    if distributed_part(plain) is not None:
        kind = f"distributed {type(plain).__name__}"
        raise ValueError(f"Give the Trainer the plain optimizer: it distributes it itself. Received: a {kind}")
    own = {id(v) for v in model.weights}
    inner = getattr(plain, "inner_optimizer", plain)
    foreign = [v.path for v in inner._trainable_variables if id(v) not in own]  # none if it is not built yet
    if foreign and model.built:
        raise ValueError(f"optimizer must be over the model's own variables. Received: one built over {foreign[0]}")
    if keras.backend.backend() == "jax" and inner.built and model.built:
        trained_now = {id(v) for v in model.trainable_variables}
        if frozen := [v.path for v in inner._trainable_variables if id(v) not in trained_now]:
            raise ValueError(
                "On JAX, Keras's optimizer must be built over exactly the weights that are trained. Received: one "
                f"built over {frozen[0]}, which is frozen. Freeze layers before you build the optimizer."
            )
    return plain


def _refuse_synchronized(layers: Sequence[Any], world: World) -> None:
    """Raise ValueError if a BatchNormalization is synchronized, which Keras does within tf.distribute alone."""
    for layer in layers if world.size > 1 else ():
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
            raise ValueError(
                "BatchNormalization(synchronized=True) synchronizes within tf.distribute alone, so each of Horovod's "
                f"ranks would normalize by its own batch. Received: layer {layer.name} on {world.size} ranks. Use "
                "GroupNormalization, or synchronized=False, whose running statistics are averaged after each epoch."
            )


_USE_TARGETS = ("train_step", "test_step", "compute_loss")


class KerasAdapter:
    """Steps a compiled keras.Model through its own train_on_batch, test_on_batch and predict_on_batch."""

    def __init__(self, model: keras.Model, options: Options, world: World) -> None:
        self._model, self._options, self._world, self._ranks = model, options, world, DataRanks(world)
        self._weighted = self._ranks.size > 1 or options.accumulate > 1 or launch_environment.reduces_alone()
        self._sums = are_sums(model, split=self._weighted)  # as declared; the first batch shows more
        self._masked = MaskedSteps(model, world)
        self._alone = False  # whether this rank's steps are not reduced
        self.fault: Fault | None = None
        self._scales = isinstance(getattr(model, "optimizer", None), keras.optimizers.LossScaleOptimizer)
        self._updates_before: Any = None  # with loss scaling, the optimizer's iterations before the last step
        self.notes: list[str] = []
        self._checkpoints: AbstractContextManager[Any] = nullcontext()
        if options.checkpoint_activations:
            self._checkpoints = checkpoints = activations.choose(model, options.checkpoint_activations)
            self.notes += filter(None, [str(checkpoints), checkpoints.warning])
        self.class_weight: dict[int, float] | None = None
        norms = [each for each in model._flatten_layers() if isinstance(each, keras.layers.BatchNormalization)]
        self._sync_norms: list[Any] = [each for each in norms if type(each).__module__.startswith("hvdtrain.")]
        self.couples_samples = len(self._sync_norms) < len(norms)
        self._snapshot = None if options.nan_policy is None else StepSnapshot(model, options)
        self._started = False
        self._fresh = True  # until the first step after metrics were read
        self._training = False  # the metrics are those of an unfinished epoch
        self._trained: set[int] | None = None  # weights that the last step trains; None before the first
        self._restored: training_state.Restored | None = None  # by the last `load_state`, until ranks share it
        self._resumed: training_state.Arrays = {}  # its metrics are loaded with the first batch
        self._logs: dict[str, Any] = {}  # what the last step returned; empty where that is not computed
        self._own_logs = OwnLogs(model)
        self._begin_checks()
        # Those that reduce. Beside others, compile()'s is often but Keras's default: it comes last.
        self._parts: list[Any] = [distributed_part(each) for each in all_optimizers(model)]
        self._memories = Memories(model, self._parts, options.compression)
        self._delayed: delayed.Delayed | None = None
        self.shard_commits = commits_of(self._of_optimizers) if options.shard is not None else None
        self.prefetch = None  # each backend moves a batch to its device by itself
        weigh_losses_by_samples(model)
        if self._weighted:
            self._set_batch_weight(1.0)  # before anything is compiled
            for norm in self._sync_norms:
                norm.batch_weight = self._parts[-1].batch_weight

    def _set_batch_weight(self, weight: float) -> None:
        for part in self._parts:
            part.set_batch_weight(weight)

    @property
    def step_taken(self) -> bool:
        """False if the step was refused, or loss scaling skipped it: `iterations` do not count such a step."""
        if self.fault is not None or self._updates_before is None:
            return self.fault is None
        before, passes = number(self._updates_before), self._options.accumulate
        return number(self._model.optimizer.iterations) // passes > before // passes

    @property
    def learning_rates(self) -> list[float]:
        """One value an optimizer; the present one where it follows a schedule."""
        return [number(part.learning_rate) for part in self._parts]

    @learning_rates.setter
    def learning_rates(self, rates: list[float]) -> None:
        for part, rate in zip(self._parts, rates, strict=True):
            if isinstance(part._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
                kind = type(part._learning_rate).__name__
                raise ValueError(f"Put lr_scaling and warmup_epochs into the schedule. Received: {kind}")
            part.learning_rate = rate

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The rate, one an optimizer: a checkpoint restores no other setting. Nothing where it follows a schedule."""
        schedule = keras.optimizers.schedules.LearningRateSchedule
        rates = zip(self._parts, self.learning_rates, strict=True)
        return [{} if isinstance(part._learning_rate, schedule) else {"lr": rate} for part, rate in rates]

    @settings.setter
    def settings(self, settings: list[dict[str, Any]]) -> None:
        for part, given in zip(self._parts, settings, strict=True):
            if "lr" in given:
                part.learning_rate = given["lr"]

    @property
    def rank_state(self) -> training_state.Arrays:
        """Seeds, variables that are not trained, the epoch's running metrics, and what compression remembers."""
        if self._memories and self._delayed is not None:
            self._delayed.wait()
        held = training_state.rank_state(self._model, metrics=self._training) | self._memories.state()
        return held | self._own_logs.arrays() if self._training else held

    @rank_state.setter
    def rank_state(self, held: training_state.Arrays) -> None:
        training_state.set_rank_state(held, self._model)
        self._resumed = held
        self._own_logs.load(held)
        self._memories.load(held)
        if self._has_metrics and any(".metric." in name for name in held):
            self._fresh, self._training = False, True
            self._resume_metrics()

    def reseed(self, seeds: Mapping[str, int]) -> None:
        """Seed those generators of Keras and the backend that are in `seeds`, by their names in `rank_state`."""
        training_state.reseed(seeds, self._model)

    def _begin_checks(self) -> None:
        """Let all ranks check losses and metrics at their next batch; in an elastic job a new rank does so, too."""
        self._losses_checked = set() if self._weighted else {True, False}  # in training, in evaluation
        self._metrics_checked = self._ranks.size == 1 and not launch_environment.is_elastic()  # they can be added up

    def start(self) -> None:
        """Broadcast weights and optimizer state, now or, for a model that is built by its first batch, then."""
        self._started = False
        if launch_environment.is_elastic():  # ranks may have changed
            if not self._model.built:
                raise ValueError(f"In an elastic job, give {self._model.name} a keras.Input, or build it before fit")
            build_optimizer(self._model)
            for part in self._parts if self._world.size > 1 else ():
                part.agree_on_model()
            self._model.train_function = None  # it may have been compiled for other ranks
            self._begin_checks()
        if self._model.built:
            self._follow_trainable()
            self._broadcast()
        if self._delayed is not None:
            self._delayed.start()
        self._memories.reset()  # only now no exchange changes them

    def _follow_trainable(self) -> None:
        """Train the weights that are trainable now, where the script or a callback has frozen or unfrozen layers."""
        before, self._trained = self._trained, {id(v) for v in self._model.trainable_variables}
        if before not in (None, self._trained) and (done := trained.follow(self._model)):
            self.notes.append(f"other layers are trainable: {done}")

    def train_step(self, batches: Sequence[Batch]) -> None:
        """Take the step: `accumulate` passes through Keras's train step, the last of which reduces and updates."""
        if self._fresh and self._model.built:
            self._follow_trainable()
        self._begin(batches[0])
        self._training = True
        self._resume_metrics()
        if not self._started:
            self._broadcast()
        self._check_losses(batches[0], training=True)
        if self._snapshot is not None:
            self._snapshot.save()
            undo = self._own_logs.snapshot()
        if self._scales:  # a copy on the device, because JAX's steps reuse the variable's memory
            self._updates_before = keras.ops.copy(self._model.optimizer.iterations)
        samples = sum(batch.global_count for batch in batches)
        for batch, share in zip(batches, self._shares(batches), strict=True):
            weight = 1.0 if self._sums else share
            self._pass(batch, weight * self._ranks.size if batch.local_count else 0.0, share, samples)
        # The last step of an epoch may have fewer batches; Keras counts passes, so empty ones make up the number.
        for _ in range(self._options.accumulate - len(batches)):
            self._pass(batches[-1], 0.0)
        if self._world.size > 1 and not any(part.has_stepped for part in self._parts):
            raise ValueError(
                f"train_step of {type(self._model).__name__} called no optimizer that reduces gradients over ranks, so "
                "each rank would train on its own. Call self.optimizer, or optimizers that are attributes of the model."
            )
        if self._snapshot is not None:
            self.fault = self._snapshot.fault(counted=any(batch.local_count for batch in batches))
            if self.fault is not None:
                undo()
        if self._delayed is not None:
            self._delayed.end_step()

    def reduce_over(self, ranks: Ranks) -> None:
        """Reduce the next steps' gradients over all ranks or none."""
        self._alone = ranks == "none"
        changed = [part._hvd_use(ALONE if self._alone else EVERY_STEP) for part in self._parts]
        if any(changed):
            self._model.train_function = None

    def weight_access(self) -> WeightAccess:
        """Return access to weights and optimizer state."""
        return WeightAccess(self._model, self._world, self._memories.changes)

    def eval_step(self, batch: Batch) -> None:
        """Add a batch to Keras's metrics."""
        self._begin(batch)
        self._check_losses(batch, training=False)
        [share] = self._shares([batch])
        if not batch.local_count and not self._own_logs.is_used:
            return
        restored = [] if batch.local_count else metric_variables(self._model)
        before = copies(restored)
        with self._running_metrics(), self._reported(batch, share, batch.global_count):
            self._logs = self._model.test_on_batch(*_data(batch, self._world), return_dict=True)
        self._own_logs.add(self._logs, batch.local_count)
        assign(restored, before)

    def predict_step(self, inputs: Any) -> Any:
        """Return the outputs on the host."""
        return self._model.predict_on_batch(inputs)

    def metrics(self, reduce: Reduce, *, keep: bool = False) -> dict[str, float]:
        """Sum the metrics' own variables over ranks, and compute the metrics' results from the sums."""
        self._resume_metrics()  # of an epoch whose last step was taken before
        variables = metric_variables(self._model)
        mine = copies(variables) if keep else []
        *totals, of_logs = reduced([*variables, self._own_logs.numbers], reduce)
        for variable, total in zip(variables, totals, strict=True):
            variable.assign(total)  # others than sums were refused
        results = self._own_logs.results(scalars(self._model.get_metrics_result()), of_logs)
        if keep:
            assign(variables, mine)
            return results
        self.reset_metrics()
        return results

    def reset_metrics(self) -> None:
        """Reset Keras's metrics."""
        self._resumed = {}
        self._own_logs.clear()
        self._model.reset_metrics()
        self._fresh, self._training = True, False

    def local_metrics(self) -> dict[str, float]:
        """Return what Keras passes to batch hooks: running results, or what a step of the user's own returned."""
        results = self._model.get_metrics_result()
        return scalars(self._logs if self._logs and self._logs.keys() != results.keys() else results)

    def open_step(self, step: OpenStep) -> None:
        """Raise NotImplementedError: see `_refusals`."""
        raise NotImplementedError

    def delay(self, between_exchanges: Callable[[], None]) -> None:
        """Apply each step's gradient in the step after it."""
        [part] = self._parts
        self._delayed = delayed.Delayed(self._model, self._world, between_exchanges)
        part._hvd_use(self._delayed)

    def abandon(self) -> None:
        """Do nothing: `start` of a later fit drops what is in flight."""

    def finish(self) -> None:
        """Replace the weights by their moving averages if the optimizer keeps any (use_ema), as Keras's fit does."""
        if self._weighted:
            self._set_batch_weight(1.0)  # for a loop of the user's own that follows
        if self._delayed is not None:
            self._delayed.flush()
        if self._model.optimizer.built:
            self._model.optimizer.finalize_variable_values(self._model.trainable_weights)

    def average_buffers(self) -> None:
        """Average what is not trained over ranks: running statistics of normalisation layers."""
        variables = [v for v in self._model.non_trainable_weights if "float" in str(v.dtype)]
        if self._ranks.size > 1 and variables:
            assign(
                variables, reduced(variables, lambda flat: self._ranks.allreduce(flat, "mean", name="average_buffers"))
            )

    def memory(self) -> Held:
        """Return the sizes of weights, gradients and optimizer state."""
        return held_by(self._model, self._memories.changes)

    def state(self) -> State:
        """Return weights and optimizer state, as arrays that the next step may change."""
        state = training_state.capture(self._model)
        if self._delayed is None:
            return state
        arrays, meta = self._delayed.state()
        return replace(state, arrays=state.arrays | arrays, meta=state.meta | meta, pending=frozenset(arrays))

    def load_state(self, state: State) -> None:
        """Load a state; raises ValueError naming the first tensor that does not fit, before anything changes."""
        self._restored = training_state.restore(state, self._model)
        if changed := self._restored.changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            self.notes.append(f"trainable is as in the checkpoint: changed for {changed[0]}{more}")
        if self._delayed is not None:
            self._delayed.load(state.arrays, state.meta)

    def _begin(self, batch: Batch) -> None:
        """At the first batch of an epoch or evaluation, build the metrics that batches build, and reset all."""
        if not self._fresh:
            self._check_metrics(batch)
            return
        own = overrides(self._model, *_USE_TARGETS)
        if batch.inputs is not None and batch.targets is None and self._model.loss is not None and not own:
            raise ValueError(
                f"The loss of {self._model.name} needs targets: give (inputs, targets); for an autoencoder, (x, x). "
                "Received: data with inputs alone"
            )
        if not self._has_metrics:
            # On every rank, also one without samples: ranks sum their metrics, and must have as many.
            self._model._symbolic_build(data_batch=_data(batch, self._world))
        self._check_metrics(batch)
        self._model.reset_metrics()  # a user's own evaluate or train_on_batch may have left counts
        self._own_logs.clear()
        self._fresh, self._logs = False, {}

    def _check_metrics(self, batch: Batch) -> None:
        """At the first batch, let metrics show whether ranks' states can be added up; they stay as they are."""
        if self._metrics_checked:
            return
        variables = metric_variables(self._model)
        before = copies(variables)
        self._metrics_checked = check_sums(self._model, _data(batch, self._world), batch.local_count, self._world)
        assign(variables, before)

    def _check_losses(self, batch: Batch, *, training: bool) -> None:
        """At the first batch, let the losses show whether they are means or sums over samples."""
        if training in self._losses_checked:
            return
        x, y, weights = _data(batch, self._world)
        if training and weights is None and self.class_weight is not None and hasattr(y, "shape"):
            weights = class_weight_to_sample_weights(y, self.class_weight)
        self._sums = check_losses(
            self._model, (x, y, weights), batch.local_count, self._world, sums=self._sums, training=training
        )
        if not self._losses_checked:
            self._masked.find(x)
        self._losses_checked |= {training, False}  # training has all losses that evaluation has

    def _shares(self, batches: Sequence[Batch]) -> list[float]:
        """Return what each of this rank's batches is of a step: of its samples, or of the time steps that count."""
        counts = [batch.local_count for batch in batches]
        if self._masked.is_masked and not self._alone:  # ranks that step alone exchange nothing
            steps, of_all = self._masked.weigh([_data(batch, self._world)[0] for batch in batches], counts)
            if of_all:
                return [each / of_all for each in steps]
        total = sum(batch.global_count for batch in batches) or 1  # a step without samples gives metrics their names
        return [count / total for count in counts]

    def _reported(self, batch: Batch, share: float, samples: int) -> AbstractContextManager[None]:
        """Return a block whose losses are reported as this batch's part of the loss over a step of all ranks.

        Keras weighs a batch's mean by its samples. `samples` are those of the step, over all ranks.
        """
        mine = batch.local_count
        if not mine:
            return as_global_sums(self._model, 1.0)
        if self._sums:
            return as_global_sums(self._model, batch.global_count / mine)
        ratio = share * samples / mine
        return as_global_sums(self._model, 1.0 if math.isclose(ratio, 1.0, rel_tol=1e-12) else ratio)

    @property
    def _has_metrics(self) -> bool:
        """True if the model, its loss and its metrics have all their variables."""
        parts = (self._model, self._model._compile_loss, self._model._compile_metrics)
        return all(part is None or part.built for part in parts)

    def _resume_metrics(self) -> None:
        """Load the metrics of an interrupted epoch, now that a batch has built them."""
        if self._resumed:
            training_state.set_metrics(self._resumed, self._model)
            self._resumed = {}

    def _broadcast(self) -> None:
        build_optimizer(self._model)
        self._memories.name_weights()
        if self._world.size > 1 or self.shard_commits is not None:  # one rank of an elastic job has shards, too
            self._share_trained()
            broadcast_model(self._model, self._model.optimizer, root_rank=0)
            others = all_optimizers(self._model)[:-1]
            broadcast_variables([variable for each in others for variable in each.variables])
        self._started = True

    def _of_optimizers(self) -> list[Any]:
        """Return the variables of the optimizers, which a new rank of an elastic job has not built yet."""
        if self._model.built:
            build_optimizer(self._model)
        return [variable for each in all_optimizers(self._model) for variable in each.variables]

    def _share_trained(self) -> None:
        """Train the weights that the root trains, if it has loaded a state."""
        mine, self._restored = self._restored, None
        given = None if mine is None else (trained.flags_of(self._model), mine.is_built_again)
        given = self._world.broadcast_object(given, name="trained")
        if given is None or mine is not None:  # or each rank has loaded the state
            return
        flags, is_built_again = given
        trained.set_flags(self._model, flags)
        if is_built_again:
            trained.build_again(self._model)

    def _pass(self, batch: Batch, weight: float, share: float = 0.0, samples: int = 0) -> None:
        """Run Keras's train step on a batch whose gradient weighs `weight`.

        Without `samples`, or without samples of its own, it leaves metrics and statistics alone.
        """
        if self._weighted:
            self._set_batch_weight(weight)
        counts = samples and batch.local_count
        restored = [] if counts else [*metric_variables(self._model), *self._model.non_trainable_variables]
        if samples:  # ranks share these statistics
            shared = {id(v) for norm in self._sync_norms for v in norm.non_trainable_variables}
            restored = [v for v in restored if id(v) not in shared]
        before = copies(restored)
        if self.class_weight is not None and not hasattr(batch.targets, "shape"):
            raise ValueError(
                "class_weight needs targets that are one array. Give each sample its weight, as a third item: "
                f"(x, y, sample_weight). Received: targets of type {type(batch.targets).__name__}"
            )
        with self._running_metrics(), self._reported(batch, share, samples), self._checkpoints:
            data, weights = _data(batch, self._world), self.class_weight
            self._logs = self._model.train_on_batch(*data, class_weight=weights, return_dict=True)
        self._own_logs.add(self._logs, batch.local_count if counts else 0)
        assign(restored, before)

    @contextmanager
    def _running_metrics(self) -> Iterator[None]:
        """Let metrics add up over batches: train_on_batch and test_on_batch reset them each time."""
        changed: dict[str, Any] = {"reset_metrics": lambda: None}
        keras_alone = not overrides(self._model, *STEPS)
        # Where no user code reads them, spare the means that each step computes and copies to the host. A compiled step
        # is not changed from outside.
        if keras.backend.backend() == "torch" and keras_alone and not self._model.jit_compile:
            changed["get_metrics_result"] = dict
        vars(self._model).update(changed)
        try:
            yield
        finally:
            for name in changed:
                del vars(self._model)[name]


def _data(batch: Batch, world: World) -> Any:
    if batch.inputs is None:
        raise ValueError(f"rank {world.rank} never had any data. Give each rank a sample or more, or use fewer ranks.")

    def readable(leaf: Any) -> Any:
        return as_array(leaf) if hasattr(leaf, "detach") and keras.backend.backend() != "torch" else leaf

    return tree_map(readable, (batch.inputs, batch.targets, batch.sample_weight))


def _set_clip_norm(distributed: Any, clip_norm: float | None) -> None:
    """Clip in the distributed optimizer. The user's optimizer, from which its settings were copied, does not change."""
    if clip_norm is None:
        return
    settings = ("clipnorm", "clipvalue", "global_clipnorm")
    given = {name: getattr(distributed, name) for name in settings if getattr(distributed, name)}
    if given:
        raise ValueError(f"clip_norm was given twice. Received: clip_norm={clip_norm}, and the optimizer has {given}")
    distributed.global_clipnorm = clip_norm
