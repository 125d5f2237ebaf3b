"""The Trainer turns its arguments into parts; `training.loop` runs them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hvdtrain.adapter import Adapter, Options, State, framework_of
from hvdtrain.callbacks.base import CallbackList, CheckpointOptions, RunId
from hvdtrain.callbacks.run_folder import RunFolder
from hvdtrain.data.reading import as_source
from hvdtrain.data.sources import Sharded, Source
from hvdtrain.data.workers import warn_of_stale_epochs
from hvdtrain.distributed import agreement, frameworks, launch_environment
from hvdtrain.distributed.compression import Scheme
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.world import World, init_if_missing, refuse_grid
from hvdtrain.errors import HvdTrainError
from hvdtrain.sync import as_strategy
from hvdtrain.sync.balance import Balance, check_balance
from hvdtrain.sync.cutoff import NEEDS, CutoffPlan, check_cutoff
from hvdtrain.sync.steps import OrdinarySteps, Steps
from hvdtrain.sync.strategy import Strategy
from hvdtrain.sync.synchronizer import Synchronizer
from hvdtrain.training import checkpointing, learning_rate, preemption
from hvdtrain.training.arguments import (
    as_budget,
    as_class_weight,
    as_config,
    check_choice,
    check_end,
    check_positive,
    with_defaults,
)
from hvdtrain.training.description import name_of, script_arguments
from hvdtrain.training.fit import Fit
from hvdtrain.training.loop import Loop
from hvdtrain.training.predict import predict
from hvdtrain.training.progress import Budget, agree_on_run
from hvdtrain.training.progress import History as History
from hvdtrain.training.validation import Validation, evaluate, named_sets

if TYPE_CHECKING:
    from hvdtrain.training.elastic import FitState

log = logging.getLogger("hvdtrain")


class Trainer:
    """Trains a torch.nn.Module or a keras.Model on all ranks.

    Every rank creates it with the same arguments. All ranks then hold rank 0's weights and optimizer state; `fit`
    synchronizes them again. Call `hvdtrain.init()` before you create the model: it selects this rank's GPU.

    Args:
        model: the model; for torch also a dict of models.
        optimizer: the framework's own optimizer of the model's parameters, or a Keras name. None for a Keras model
            that is already compiled. For torch also a dict of several: `step` then yields (name, `hvdtrain.Loss`), and
            each yield is one step of the optimizer of that name, or of several, with a tuple of names. If `step` of a
            torch optimizer needs a closure, as LBFGS's does, the Trainer gives it one.
        loss: the framework's own loss, a callable (outputs, targets) -> mean over the batch, or a Keras name.
        metrics: names ("accuracy") or the framework's own metrics. For torch: functions (outputs, targets) -> one value
            per sample, torchmetrics' objects, of which the Trainer updates a copy, or a dict that names them.
        step: for torch, instead of `loss`: a callable (model, batch) -> `hvdtrain.Loss`. It gets what the data yields,
            on the device. Metrics take the Loss's outputs and targets. `predict` then calls model(**batch) if the data
            yields mappings.
        lr_scaling: how to scale the learning rate with the number of ranks: "none", "linear" or "sqrt".
        warmup_epochs: epochs over which the learning rate ramps up, step by step.
        accumulate: batches whose gradients make one optimizer step.
        micro_batch: for torch, the largest number of samples that a rank computes at once; larger batches are computed
            in parts, and the step is the same. "auto" begins with whole batches. When a rank runs out of memory in
            forward or backward, all ranks undo the step, halve their micro-batches, and repeat it; `step` must then
            call no collective.
        checkpoint_activations: to save memory, chosen modules keep only their inputs in forward, and are computed again
            in backward; gradients are the same. "blocks" chooses a model's repeated blocks, such as the layers of a
            transformer; True also other parts of a sequence that consist of several modules; a function
            (module) -> bool those for which it is true. The docs have the precise rule.
        clip_norm: largest global norm of the reduced gradient; None for no clipping.
        precision: "fp32", "bf16" or "fp16" (with loss scaling) for the forward and backward pass.
        compression: the form in which gradients are sent: "none", "fp16" or "bf16", a type; or "int8",
            "topk:0.01" (the largest 1 %), "powersgd:4" (matrices of rank 4), or `hvdtrain.Int8`, `hvdtrain.TopK`,
            `hvdtrain.PowerSGD`. These add what a gradient has lost to the next one. With `hvdtrain.LocalSGD` and
            `hvdtrain.DiLoCo`, it is of changes of the weights.
        shard: what each rank holds 1/N of. "optimizer": the optimizer's state; it then updates 1/N of each weight.
            "gradients", for torch: also the reduced gradients. None: nothing.
        sync: when ranks synchronize: None in every step; `hvdtrain.Delayed` in every step, but one step late;
            `hvdtrain.LocalSGD` and `hvdtrain.DiLoCo`, for slow networks, every so many. Checkpoints, validation and
            stops that are due between two synchronizations come after the next one.
        cutoff: for torch, with `accumulate`: a share of the ranks, in (0, 1]. Soon after so many ranks have computed
            all their batches of a step, it closes, and the others send what they have. Batches that were cut off are
            computed in later steps of the epoch. Or `History.cutoffs` of an earlier run, whose steps are repeated on
            as many ranks. None waits for all ranks. See Chen et al., "Revisiting Distributed Synchronous SGD", 2016
            (backup workers), and Giladi et al., "DropCompute", 2023.
        nan_policy: what to do about a non-finite gradient. All ranks detect it in the same step, and no rank takes that
            step. "raise" ends the run with an error; "stop" ends it with a checkpoint, if there is a checkpoint_dir,
            and returns the History so far; "skip" continues with the next step. The message names the step, the rank,
            its first non-finite gradient, and the samples. None does not check. A check costs one pass over the
            gradients per step. With precision="fp16", steps that the loss scaling skips do not count.
        seed: order of the samples, equal on all ranks; the default is `hvdtrain.init`'s seed, or 0. Does not change any
            framework's random state; `rank_streams` does.
        rank_streams: give ranks different random numbers for dropout, augmentation and noise, although the script seeds
            all ranks alike. When `fit` begins, a generator that has the state of a lower rank's gets a new seed: the
            global generators of torch, NumPy and Python, Keras's own, and those of the model's layers. After `fit` they
            have rank 0's states. False leaves all generators as they are.

    Attributes:
        model: as given.
        world: the ranks.
        epochs: number of epochs of the current fit; None if steps or seconds alone end it.
        hosts: each rank's host, by rank; set when fit begins.
        steps_per_epoch: optimizer steps per epoch; None if unknown.

    Raises:
        ValueError: an option is outside its range; the model has no trainable parameters; the optimizer has others.
        TypeError: the model is neither PyTorch's nor Keras's.
        DesyncError: the ranks' models differ; names the first parameter.
    """

    def __init__(
        self,
        model: Any,
        *,
        optimizer: Any = None,
        loss: Any = None,
        step: Any = None,
        metrics: Sequence[Any] | dict[str, Any] = (),
        lr_scaling: str = "none",
        warmup_epochs: float = 0,
        accumulate: int = 1,
        micro_batch: int | str | None = None,
        checkpoint_activations: bool | str | Callable[[Any], Any] = False,
        clip_norm: float | None = None,
        precision: str = "fp32",
        compression: Scheme | str = "none",
        shard: str | None = None,
        sync: Strategy | None = None,
        cutoff: float | Mapping[int, Sequence[int]] | None = None,
        nan_policy: str | None = None,
        seed: int | None = None,
        rank_streams: bool = True,
    ) -> None:
        self.model = model
        self.world: World = init_if_missing(framework_of(model))
        if framework_of(model) == "keras":
            refuse_grid("A Trainer of a Keras model", "Keras on JAX has ModelParallel of its own")
        self.epochs: int | None = 0
        self.hosts: list[str] = []
        self.steps_per_epoch: int | None = None
        strategy = as_strategy(sync)
        self._strategy, self._cutoff = strategy, check_cutoff(cutoff)
        self._config = as_config(
            lr_scaling=lr_scaling, warmup_epochs=warmup_epochs, accumulate=accumulate, clip_norm=clip_norm,
            precision=precision, compression=compression, shard=shard, nan_policy=nan_policy, micro_batch=micro_batch,
            sync=strategy, cutoff=self._cutoff, checkpoint_activations=checkpoint_activations,
            seed=(self.world.seed or 0) if seed is None else seed, rank_streams=rank_streams,
        )  # fmt: skip
        # In an elastic job a new rank makes its Trainer alone; its first collective call is in `fit`.
        self._elastic = launch_environment.is_elastic()
        if not self._elastic:
            given = {**self._config, "cutoff": self._cutoff}
            agreement.require_equal(given, world=self.world, what="the Trainer's options")
        is_cut = self._cutoff is not None
        options = Options(
            accumulate, clip_norm, precision, self._config["compression"], nan_policy, micro_batch, cutoff=is_cut,
            checkpoint_activations=checkpoint_activations, shard=shard,
            needs=strategy.needs if strategy else NEEDS if is_cut else None,
        )  # fmt: skip
        self._adapter: Adapter = frameworks.load(framework_of(model), "adapter").make_adapter(
            model, optimizer=optimizer, loss=loss, step=step, metrics=metrics, options=options, world=self.world
        )
        self._sync = Synchronizer(self._adapter, self.world)
        if strategy is not None:
            self._sync = strategy.synchronizer(self._adapter, options, self.world)
        self._lr = learning_rate.LearningRate(
            self._adapter.learning_rates,
            scaling=lr_scaling,
            size=DataRanks(self.world).size,
            warmup_epochs=warmup_epochs,
        )
        self._loop = Loop(self, self._sync, self._lr, self._config)
        self._chosen = {"optimizer": name_of(optimizer), "loss": name_of(loss), "step": name_of(step)}
        self._budget, self._fit_config = Budget(), dict[str, Any]()  # of the current or last fit
        self._run_folder = RunFolder()
        if not self._elastic:
            self._sync.start()  # evaluate and predict, too, need the same model on all ranks

    def fit(
        self,
        train: Any,
        *,
        validation: Any = None,
        epochs: int | None = None,
        steps: int | None = None,
        seconds: float | None = None,
        validate_every: int | None = None,
        batch_size: int = 32,
        class_weight: dict[int, float] | None = None,
        balance: str | Sequence[float] | None = None,
        callbacks: Sequence[Any] = (),
        checkpoint_dir: str | None = None,
        resume: str = "auto",
        override: Sequence[str] = (),
        run_dir: str | None = "auto",
        progress: bool = True,
    ) -> History:
        """Train, and return the metrics of each epoch.

        It starts at epoch 0 with the model's weights and the optimizer's state. It resumes from a checkpoint after
        `load`, with `checkpoint_dir`, or with a `Checkpoint` callback.

        Args:
            train: arrays `(x, y)`, a dataset or a loader (see Data in the docs), equal on all ranks: `fit` shards it.
            validation: data of the same kind, evaluated after each epoch into "val_" metrics. Several sets by name,
                {"clean": a, "noisy": b}, give "val_clean_loss", "val_noisy_loss" and so on.
            epochs: number of epochs in all; those before a checkpoint count. The default is 1, and without limit if
                steps or seconds are given. Whichever of the three is reached first ends the run.
            steps: number of optimizer steps in all; those before a checkpoint count.
            seconds: training time in all, without validation; that before a checkpoint counts. All ranks end after
                the same step, the first one that all know to be late enough.
            validate_every: optimizer steps, counted over all epochs, after which validation runs within an epoch too.
                It does not change training: metrics, statistics and random states of the epoch stay as they are. Only
                with a `sync` that has fragments or overlap, ranks synchronize for it.
            batch_size: samples per rank and batch; an optimizer step takes batch_size * size * accumulate.
            class_weight: for Keras: how much training samples weigh, by class, as in Keras's fit; a class that is left
                out weighs 1. A torch loss has weights of its own.
            balance: how ranks divide the samples of a step: None equally; [3, 3, 1, 1] in proportion to a number for
                each rank; "speed" by their measured speed, where that makes steps at least 5 % shorter. A rank then
                takes at most 2 * batch_size samples. Steps hold the same samples as without, and each sample has the
                same weight in the gradient. BatchNorm normalizes each rank's part by itself. Data must be read by
                index: iterable data comes in whole batches.
            callbacks: `hvdtrain.callbacks` and, for a Keras model, Keras's own.
            checkpoint_dir: where a checkpoint is written after each epoch.
            resume: "auto" resumes from the newest complete checkpoint in checkpoint_dir; "never" starts from the
                beginning, and moves the checkpoints there into a folder "old-1", "old-2", ... beside the new ones.
            override: names of the optimizer's settings that a resumed run takes from the script, such as
                ["lr", "weight_decay"]. The others are the checkpoint's; a line names each that differs. Keras: "lr".
            run_dir: where `callbacks.RunFolder` writes configuration, environment and metrics: "auto" for a folder of
                this Trainer in runs/, None for no folder.
            progress: show the progress on rank 0; `callbacks.Progress` has the styles.

        When steps or seconds end the run within an epoch, its part of the epoch is reported as an epoch is: validation
        runs, History gets an entry, and callbacks get `on_epoch_end`. The checkpoint that is then written holds the run
        as it was before that: a longer run that resumes from it equals one that never ended there. Data that never ends
        needs steps or seconds; checkpoints within its only epoch come from `Checkpoint(every_steps=...)`.

        A SIGTERM or SIGUSR1 to any rank causes an orderly stop. About a second later, or when validation is done, all
        ranks end after the same step, with a checkpoint if there is a checkpoint_dir, and exit with
        `hvdtrain.preemption.EXIT_CODE`, 75. This also holds after the last epoch, until `fit` returns. After that, the
        script's own handlers receive the signals.

        In an elastic job, when a rank dies or hosts change, the remaining ranks continue from the last commit, a copy
        of the state in every rank's memory; with `shard`, of each part in two ranks' memory. They commit at the
        beginning, at each epoch's end, at each checkpoint within an epoch, and at the step after which they learn that
        hosts have changed. New ranks create their Trainer and call `fit` alone. So a script has one call of `fit`, and
        no collective before it except `hvdtrain.init`: no `evaluate`.

        Raises:
            ValueError: no data, or an option outside its range.
            DesyncError: ranks have different data or options, or their weights differ (`SyncCheck`).
            CheckpointError: another run uses the folder of checkpoints, or it cannot be written; see `Checkpoint`.
            LostShardError: with `shard`, both ranks that held a part have died, and there is no checkpoint.
            SystemExit: a stop was requested.
        """
        budget = as_budget(epochs, steps, seconds)
        if validate_every is not None:
            check_positive("validate_every", validate_every, int)
            if validation is None:
                raise ValueError(f"validate_every needs validation. Received: validate_every={validate_every!r}")
        check_choice("resume", resume, ("auto", "never"))
        self._loop.state.settings.check(override)
        if balance is not None and self._cutoff is not None:
            raise ValueError(f"balance and cutoff cannot be combined. Received: balance={balance!r} and a cutoff")
        if balance == "speed" and self.world.grid is not None:
            raise ValueError(
                "The ranks of a replica wait for each other in each step, so the speed of one is not known. Received: "
                f"balance='speed' with {self.world.grid}. Give a number for each replica's data: balance=[3, 1]"
            )
        self._adapter.class_weight = as_class_weight(class_weight)

        run_folder = self._run_folder if run_dir == "auto" else None if run_dir is None else RunFolder(run_dir)

        def fit_round(commits: FitState | None) -> None:
            self._fit_round(
                train, validation, with_defaults(callbacks, run_folder, checkpoint_dir, progress), commits,
                budget=budget, validate_every=validate_every, batch_size=batch_size, resume=resume,
                override=list(override), balance=check_balance(balance, size=DataRanks(self.world).size),
            )  # fmt: skip

        restore_signals = preemption.install()  # once for all rounds: a signal in one round may be handled in the next
        try:
            if self._elastic:
                from hvdtrain.training import elastic

                commits = elastic.FitState(self._sync, self.world)
                elastic.run(lambda: fit_round(commits), commits, framework_of(self.model))
            else:
                fit_round(None)
        finally:
            restore_signals()
        preemption.pass_on()
        return self.history

    def _fit_round(
        self,
        train: Any,
        validation: Any,
        hooks: CallbackList,
        commits: FitState | None,
        *,
        budget: Budget,
        validate_every: int | None,
        batch_size: int,
        resume: str,
        override: list[str],
        balance: str | list[float] | None,
    ) -> None:
        """Train with the current ranks, from the last commit, a checkpoint or the beginning."""
        world, of_rank = self.world, self._of_rank(batch_size)
        if self._elastic:
            self._lr.scale_to(DataRanks(world).size)
            agreement.require_equal(self._config, world=world, what="the Trainer's options")
        checkpoints = [hook.checkpoint for hook in hooks if hook.checkpoint is not None]
        sets = named_sets(validation, train.keys() if isinstance(train, Mapping) else None)
        limits = {**asdict(budget), "validate_every": validate_every, "override": override}
        limits |= {"class_weight": self._adapter.class_weight, "balance": balance}
        schedules = {"checkpoints": [each.schedule for each in checkpoints], "resume": resume}
        # Compare before ranks read data together.
        agreement.require_equal({**limits, "validation": list(sets), **schedules}, world=world, what="fit")
        source = as_source(train, **of_rank)
        check_end(source.facts, budget)
        if world.is_root and budget.epochs != 1:
            warn_of_stale_epochs(train.data if isinstance(train, Sharded) else train)
        steps = self._make_steps(source, balance)
        sources = {
            name: as_source(each, **of_rank, what=f"validation data {name!r}" if name else "validation data")
            for name, each in sets.items()
        }
        facts = {"batch_size": int(batch_size), "data": source.facts, "arguments": script_arguments()}
        self._fit_config = {**limits, **facts}
        self._budget, self.epochs, self.steps_per_epoch = budget, budget.epochs, self._steps_per_epoch(source.steps)
        self._lr.check(self.steps_per_epoch)
        self.hosts, run_id = agree_on_run(world)
        fit = Fit(
            run_id=run_id, steps=steps, budget=budget, callbacks=hooks, checkpoints=checkpoints, resume=resume,
            validation=Validation(self._adapter, self, sources, validate_every, source.generators),
            override=override, commits=commits, notes=self._describe_strategy(),
        )  # fmt: skip
        self._loop.run(fit)

    def _make_steps(self, source: Source, balance: str | list[float] | None) -> Steps:
        """Return the steps of a fit; warn on the root if a step depends on how ranks divide its samples."""
        of_steps: dict[str, Any] = {"ranks": DataRanks(self.world), "accumulate": self._config["accumulate"]}
        if self._cutoff is not None:
            return CutoffPlan(self._cutoff, source, **of_steps)
        if balance is None:
            return OrdinarySteps(source, **of_steps)
        shares = Balance(balance, source, size=DataRanks(self.world).size)
        if self._adapter.couples_samples and self.world.is_root:
            log.warning(
                "balance: BatchNorm normalizes each rank's part of a step by itself, so the gradient depends on the "
                "shares. With SyncBatchNorm, or a normalization of single samples, it does not."
            )
        return OrdinarySteps(source, balance=shares, **of_steps)

    def _describe_strategy(self) -> list[str]:
        """Return log lines on what the options of `sync` mean for this fit."""
        if self._strategy is None or self.world.size == 1:
            return []
        lengths = [length for length in (self.steps_per_epoch, self.total_steps) if length is not None]
        return self._strategy.describe(min(lengths, default=None))

    def evaluate(self, data: Any, *, batch_size: int = 32) -> dict[str, float]:
        """Return loss and metrics over all of `data`: exact over all ranks, each sample counted once.

        A collective: call it on every rank, not within an epoch of `fit`. All ranks get the same numbers.
        """
        if not self.in_sync:
            raise HvdTrainError(self._not_in_sync("evaluate", "computes the loss of a part"))
        if self._loop.in_epoch:
            raise HvdTrainError(
                "evaluate() was called in the middle of a training epoch: it would mix its metrics with the epoch's. "
                "Call it in on_epoch_end, or after fit."
            )
        source = as_source(data, **self._of_rank(batch_size))
        return evaluate(self._adapter, self, source)

    def predict(self, x: Any, *, batch_size: int = 32) -> Any:
        """Return the model's outputs for all of `x`, in input order, on every rank: arrays of shape (len(x), ...).

        Args:
            x: arrays, a map-style dataset, or a torch DataLoader over one, whose samples are taken in the order of the
                dataset, all of them, also where the loader shuffles or has drop_last.
            batch_size: samples per rank and batch; a DataLoader has its own.

        Raises:
            TypeError: on every rank, if the data can only be iterated, or a DataLoader has a sampler of its own.
            ValueError: on every rank, if an output has not one row a sample.
        """
        if not self.in_sync:
            raise HvdTrainError(self._not_in_sync("predict", "predicts a part"))
        return predict(self._adapter, self.world, x, batch_size=batch_size)

    def _not_in_sync(self, method: str, what: str) -> str:
        return (
            f"{method}() was called between two synchronizations of sync=..., where each rank holds weights of its "
            f"own, and {what}. Call it where trainer.in_sync is True, as in on_epoch_end. "
            f"Received: {method}() after step {self.global_step} on rank {self.world.rank}"
        )

    def save(self, directory: str) -> None:
        """Write weights, optimizer state and options to `directory`. A collective; rank 0 writes.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        checkpointing.save(directory, self._sync, self._loop.snapshot(), world=self.world)

    @classmethod
    def load(cls, directory: str, model: Any, *, weights_only: bool = False, **options: Any) -> Trainer:
        """Return a Trainer with the weights and optimizer state of a checkpoint.

        Args:
            directory: a checkpoint of `save` or `checkpoint_dir`. Rank 0 reads it; the others need not see its disk.
            model: a model of the same architecture.
            weights_only: take weights and buffers alone, for another training with these weights: optimizer, options
                and History are new.
            options: as for Trainer; the default is the checkpoint's, and with weights_only the Trainer's.

        Raises:
            CheckpointError: it is missing, damaged, or of another model; names the tensor.
        """
        world = init_if_missing(framework_of(model))
        if launch_environment.is_elastic():
            raise HvdTrainError(
                "Trainer.load needs all ranks, and in an elastic job ranks synchronize only in fit. Call fit with "
                f"checkpoint_dir: it resumes from the newest checkpoint. Received: directory={directory!r}"
            )
        config = {} if weights_only else checkpointing.read_config(directory, world=world)
        trainer = cls(model, **{**config, **options})
        if weights_only:
            checkpointing.load_weights(directory, trainer._sync, world=world)
        else:
            found = checkpointing.load(directory, trainer._sync, lr_factor=trainer._lr.factor, world=world)
            trainer._loop.state.restore(found)
        trainer._sync.start()
        return trainer

    @property
    def decisions(self) -> list[str]:
        """Log lines on what is resumed, the effective batch, the learning rate and the best checkpoint."""
        return self._loop.decisions

    @property
    def memory(self) -> dict[str, float | None]:
        """Bytes of this rank in a step at most: weights, gradients, optimizer, buckets, activations; no collective.

        Activations are what forward saves for backward, and whatever else a step takes; None before they are known.
        Empty if a part cannot be measured.
        """
        parts = self._loop.memory.parts()
        return {} if parts is None else asdict(parts)

    @property
    def history(self) -> History:
        """The metrics of the current or last `fit` so far."""
        return self._loop.state.history

    @property
    def run(self) -> RunId | None:
        """The run of the current or last `fit`, equal on all ranks."""
        return self._loop.state.run_id

    @property
    def config(self) -> dict[str, Any]:
        """The options of this Trainer and of the current or last `fit`, as JSON.

        "optimizer_settings" are the present ones, such as lr; those of several parameter groups stand by number.
        "arguments" are the script's, without secrets.
        """
        groups = self._adapter.settings
        settings = groups[0] if len(groups) == 1 else {str(number): group for number, group in enumerate(groups)}
        known = {"model": name_of(self.model), **self._chosen, "optimizer_settings": settings}
        return {**known, **self._config, **self._fit_config}

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps that epochs and steps allow the current `fit`; None if unknown. See `count_steps`."""
        limits = [self._budget.steps]
        if self.epochs is not None and self.steps_per_epoch is not None:
            limits.append(self.epochs * self.steps_per_epoch)
        return min((each for each in limits if each is not None), default=None)

    def count_steps(self, train: Any, *, batch_size: int = 32, epochs: int = 1) -> int:
        """Return how many optimizer steps `fit` takes with these arguments, for a schedule that is made before it.

        A collective. In an elastic job the number of ranks changes: `callbacks.Schedule` takes a function of the number
        of steps, which each round calls.

        Raises:
            ValueError: the length of the data is not known: `fit(steps=...)` then sets the number.
        """
        if self._elastic:
            raise HvdTrainError(
                "count_steps needs all ranks, and in an elastic job ranks synchronize only in fit. "
                f"Use Schedule(lambda steps: ...). Received: count_steps on rank {self.world.rank}"
            )
        check_positive("epochs", epochs, int)
        found = self._steps_per_epoch(as_source(train, **self._of_rank(batch_size)).steps)
        if found is None:
            raise ValueError(
                "count_steps needs data whose length is known. Received: data that can only be iterated. "
                "Give fit(steps=...), and make the schedule for this number."
            )
        return found * epochs

    def _of_rank(self, batch_size: int) -> dict[str, Any]:
        common = {"world": self.world, "seed": self._config["seed"], "prefetch": self._adapter.prefetch}
        return {"batch_size": batch_size, **common}

    def _steps_per_epoch(self, batches: int | None) -> int | None:
        return None if batches is None else -(-batches // self._config["accumulate"])

    @property
    def global_step(self) -> int:
        """Optimizer steps taken since training began, those before a resumed checkpoint included."""
        return self._loop.progress.global_step

    @property
    def learning_rate(self) -> float:
        """The first parameter group's present learning rate; it may make a GPU wait."""
        return self._adapter.learning_rates[0]

    @property
    def epoch(self) -> int:
        """Number of the current epoch, from 0."""
        return self._loop.progress.epoch

    @property
    def step(self) -> int:
        """Optimizer steps of the current epoch so far."""
        return self._loop.progress.step

    @property
    def in_epoch(self) -> bool:
        """True if steps of the current epoch are left: a validation comes within epochs and at their ends."""
        return self._loop.in_epoch

    @property
    def shares(self) -> list[int] | None:
        """Samples of a whole step by rank, with `balance`; None for equal parts."""
        return self._loop.state.shares

    @property
    def step_taken(self) -> bool:
        """False if the last step was left out, by nan_policy="skip" or by loss scaling; equal on all ranks."""
        return self._sync.step_taken

    @property
    def in_sync(self) -> bool:
        """True if ranks hold equal weights: always, except between two synchronizations of a strategy (`sync`)."""
        return self._sync.in_sync

    def save_checkpoint(self, options: CheckpointOptions) -> None:
        """Save the current state; a collective call. See `hvdtrain.callbacks.Checkpoint.save`."""
        self._loop.saver.save_when_equal(options)

    def state(self, *, copy: bool = True) -> State:
        """Return weights and optimizer state; without a copy, as arrays that the next step may change.

        With `shard`, a copy has the whole optimizer's state on every rank's host. Without a copy, the parts are in
        `State.sharded`.

        A collective: call it on every rank, because ranks may wait for a gradient that is in flight.
        """
        state = self._sync.state()
        return state.copied() if copy else state

    def load_state(self, state: State) -> None:
        """Load what `state` returned; call it on every rank, with equal state."""
        self._sync.load_state(state)

    def repair(self) -> None:
        """Give every rank the root's weights and optimizer state; a collective call."""
        self._sync.state()  # waits for a gradient that is in flight, which `start` then gives to all ranks
        self._sync.start()

    def local_metrics(self) -> dict[str, float]:
        """Return this rank's running metrics of the epoch or the validation set. It makes a GPU wait; no collective."""
        return self._adapter.local_metrics()

    def stop(self, *, within_epoch: bool = False) -> None:
        """End the run after this epoch or the next validation, on every rank; one rank's call is enough.

        With within_epoch=True, in a hook of a step, it ends after this step in one process, on several ranks about a
        second later.
        """
        self._loop.stop(within_epoch=within_epoch)
