"""The epochs and steps of `Trainer.fit`.

From `fit(train)` to the framework's step the data passes through eight functions: `Trainer.fit`, `Trainer._fit_round`,
`as_source`, `Loop.run`, `Loop.run_epoch`, `Source.epoch`, `IndexedSource.batch` and `Adapter.train_step`.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from hvdtrain.adapter import Adapter
from hvdtrain.callbacks.base import Callback, CallbackList, CheckpointOptions, RunContext, RunId
from hvdtrain.data.sources import Source
from hvdtrain.distributed import rank_state, watchdog
from hvdtrain.distributed.recorder import recorder
from hvdtrain.telemetry.interval import Heartbeat, HeartbeatReport, Interval
from hvdtrain.training import preemption
from hvdtrain.training.checkpointing import RunCheckpoints, Snapshot
from hvdtrain.training.learning_rate import LearningRate
from hvdtrain.training.nan_policy import NanPolicy
from hvdtrain.training.progress import History, RunProgress, check_data, steps_done

if TYPE_CHECKING:
    from hvdtrain.training.elastic import FitState


class Loop:
    """Runs the epochs and steps of a Trainer, and saves and restores the run's progress."""

    def __init__(
        self, context: RunContext, adapter: Adapter, learning_rate: LearningRate, config: dict[str, Any]
    ) -> None:
        self.progress = RunProgress()
        self.history = History()
        self.run_id: RunId | None = None
        self.in_epoch = False  # whether an epoch's steps are running; other metrics must not be mixed with theirs
        self.stop_requested = False  # whether a callback has ended the run on this rank
        self.commits: FitState | None = None  # the last commit, in an elastic job
        self._context = context
        self._world = context.world
        self._adapter = adapter
        self._lr = learning_rate
        self._config = config
        self._accumulate: int = config["accumulate"]
        self._hooks = CallbackList([])
        self._checkpoints: list[RunCheckpoints] = []  # of this fit
        self._savers: dict[CheckpointOptions, RunCheckpoints] = {}  # these, and others to which callbacks save
        self._facts: dict[str, Any] = {}
        self._loaded: dict[str, Any] | None = None  # meta data of the checkpoint to resume from
        self._held: rank_state.Arrays = {}  # that checkpoint's arrays of this rank, to be loaded when steps begin
        self._random_at_begin: rank_state.Arrays = {}  # random states that the epoch's order was drawn from
        self._ahead = 0  # steps that this number of ranks would have taken of the epoch, minus those taken
        self._began = 0.0
        self._earlier_samples = self._reported_samples = 0  # of this run's earlier epochs, and of its intervals
        self._heartbeat = Heartbeat(context.world)
        self._nan_policy = NanPolicy(config["nan_policy"], context.world)

    # Save and restore

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint holds of the run besides the adapter's state."""
        seconds = time.perf_counter() - self._began if self.in_epoch else self.progress.seconds
        last = {} if self.progress.step else {name: values[-1] for name, values in self.history.items()}
        meta = {
            "config": self._config,
            "run": self.run_id and {"id": self.run_id.id, "name": self.run_id.name},
            "position": asdict(replace(self.progress, seconds=seconds)),
            "history": self.history,
            "metrics": last,
            "data": self._facts,
            "callbacks": self._hooks.states() if self._loaded is None else self._loaded["callbacks"],
        }
        begin = {f"begin.{name}": array for name, array in self._random_at_begin.items()}
        now = rank_state.random_states() | self._adapter.rank_state | (begin if self.progress.step else {})
        return Snapshot(now | self._held, meta)  # what is still to be loaded replaces the current values

    def restore(self, found: Snapshot | None) -> None:
        """Restore the run's progress; None changes nothing."""
        if found is not None:
            self._loaded, self._held = found.meta, found.arrays
            self._facts = found.meta["data"]
            self.progress = RunProgress.from_json(found.meta["position"])
            self.history = History(found.meta["history"])

    def save_checkpoint(self, options: CheckpointOptions) -> None:
        """Save the current state; a collective call."""
        if options not in self._savers:
            self._savers[options] = RunCheckpoints(options, self._world)
        self._save(self._savers[options])

    def _save(self, checkpoints: RunCheckpoints) -> None:
        if self.progress.step:  # an epoch's end has its own commit
            self._commit()
        checkpoints.save(self._adapter, self.snapshot())

    def _save_and_wait(self) -> None:
        """Save the current state to every folder of checkpoints, and wait until it is written."""
        for each in self._checkpoints:
            self._save(each)
            each.wait()

    def _commit(self) -> None:
        if self.commits is not None:
            self.commits.commit(self.snapshot())

    # Epochs

    def begin(
        self, facts: dict[str, Any], hooks: CallbackList, run_id: RunId, checkpoints: list[RunCheckpoints], resume: str
    ) -> None:
        """Begin a run, or resume it: from the last commit of an elastic job, else from a checkpoint."""
        commit = None if self.commits is None else self.commits.find(lr_factor=self._lr.factor)
        self.restore(commit)
        for each in checkpoints if commit is None else ():
            if resume == "never":
                each.set_aside()
            else:
                self.restore(each.restore(self._adapter, lr_factor=self._lr.factor))
        self._hooks, self._facts, self._heartbeat = hooks, facts, Heartbeat(self._world)
        self._ahead = self._earlier_samples = self._reported_samples = 0
        meta, self._loaded = self._loaded, None
        known = None if meta is None else meta.get("run")
        self.run_id = RunId(**known, resumed=True) if known else run_id
        self._callback_states: list[Any] = [] if meta is None else list(meta["callbacks"])
        if meta is None:
            self.progress, self.history, self._held = RunProgress(), History(), {}
        elif self.progress.step:
            check_data(meta["data"], facts)
            # The count of steps continues, because it orders checkpoints. The schedule needs this run's steps.
            here = steps_done(self.progress.consumed, facts, size=self._world.size, accumulate=self._accumulate)
            self._ahead = here - self.progress.step
            self._reported_samples = self.progress.consumed.samples
        self._checkpoints = checkpoints
        self._savers |= {each.options: each for each in checkpoints}
        for each in checkpoints:
            each.saved_at = self.progress.global_step
            if self.progress.epoch < self._context.epochs:  # else nothing will be written
                each.check_writable(self._adapter, self.run_id)
        self.stop_requested = False
        self._adapter.start()

    def run(self, train: Source, held_out: Source | None) -> None:
        """Run the epochs that are left."""
        hooks, context = self._hooks, self._context
        try:
            for hook in hooks:
                hook.on_fit_begin(context)
            hooks.load_states(self._callback_states)
            self._commit()
            stop = self.agree_to_stop(after_epoch=False)
            for epoch in range(self.progress.epoch, context.epochs):
                logs = None if stop else self.run_epoch(train)
                if logs is None:
                    break
                if held_out is not None:
                    logs |= self._validate(held_out)
                self.history.add(logs)
                self._nan_policy.epoch_taken(logs, epoch=epoch)
                self.progress.end_epoch()
                for hook in hooks:
                    hook.on_epoch_end(context, epoch, logs)
                for each in self._checkpoints:
                    if each.options.is_due_after(epoch, logs):
                        self._save(each)
                self._commit()
                stop = self.agree_to_stop(after_epoch=True)
            for each in self._checkpoints:
                if each.options.every_epochs and each.saved_at != self.progress.global_step:
                    self._save(each)
            self._adapter.finish()  # after the last checkpoint, from which more epochs may be trained
            for hook in hooks:
                hook.on_fit_end(context)
            for each in self._checkpoints:
                each.wait()
        finally:
            hooks.close()

    def _validate(self, source: Source) -> dict[str, float]:
        """Return the metrics of a validation set, named "val_...", and call the callbacks around it."""
        for hook in self._hooks:
            hook.on_validation_begin(self._context)
        logs = {f"val_{name}": value for name, value in self.evaluate(source, self._hooks).items()}
        for hook in self._hooks:
            hook.on_validation_end(self._context, logs)
        return logs

    def evaluate(self, source: Source, hooks: Iterable[Callback] = ()) -> dict[str, float]:
        """Return the loss and metrics over all of the data, exact over all ranks."""
        for step, batch in enumerate(source.epoch(0, shuffle=False)):
            for hook in hooks:
                hook.on_validation_step_begin(self._context, step)
            self._adapter.eval_step(batch)
            for hook in hooks:
                hook.on_validation_step_end(self._context, step)
        return self._adapter.metrics(lambda vector: self._world.allreduce(vector, name="metrics"))

    def agree_to_stop(self, *, after_epoch: bool) -> bool:
        """Return whether a callback on any rank has ended the run; exit if a signal to any rank requested a stop.

        Before its first step signals wait: a resumed run has not yet loaded all that a checkpoint must contain.
        """
        requested = after_epoch and preemption.requested() is not None
        flags = np.array([self.stop_requested, requested], np.int32)
        stop, requested_anywhere = self._world.allreduce(flags, "max", name="stop")
        if requested_anywhere:
            self._leave()
        return bool(stop)

    def _leave(self) -> NoReturn:
        """Save the current state and end the process, on all ranks."""
        self._save_and_wait()
        if self._world.is_root:
            what = "nothing is saved without checkpoint_dir"
            if self._checkpoints:
                what = "a checkpoint is written: the same command resumes from it"
            step, epoch = self.progress.step, self.progress.epoch
            last = ", the last" if epoch == self._context.epochs else ""
            place = f"after step {step} of epoch {epoch + 1}" if step else f"after epoch {epoch}{last}"
            sys.stderr.write(f"hvdtrain: stopped on request {place}; {what} (exit status {preemption.EXIT_CODE})\n")
        # mpirun ends the other ranks when the first one exits. So close the logs, which may take a while, before that.
        self._hooks.close()
        self._world.barrier()
        sys.exit(preemption.EXIT_CODE)

    # Steps

    def run_epoch(self, source: Source) -> dict[str, float] | None:
        """Take the steps that are left of an epoch; return its metrics, None if nan_policy="stop" ends the run."""
        progress, hooks, context, adapter = self.progress, self._hooks, self._context, self._adapter
        epoch, resumed_at, stopped = progress.epoch, progress.step, False
        if not resumed_at:
            self._load_rank_state(self._held)
            self._ahead = 0
        for hook in hooks:
            hook.on_epoch_begin(context, epoch)
        self._began = time.perf_counter() - progress.seconds
        self.in_epoch = True
        try:
            held, self._held = self._held, {}
            # A resumed epoch has the order that was drawn when it began.
            if resumed_at:
                begin = {name: array for name, array in held.items() if name.startswith("begin.")}
                self._load_rank_state({name.removeprefix("begin."): array for name, array in begin.items()})
            now = rank_state.random_states() | adapter.rank_state
            self._random_at_begin = {name: array for name, array in now.items() if name.startswith("random.")}
            batches = source.epoch(epoch, shuffle=True, after=progress.consumed)
            if resumed_at:
                self._load_rank_state(held)
            recorder.ended("outside")
            while True:
                group = list(itertools.islice(batches, self._accumulate))
                recorder.ended("data" if group else "outside")
                if not group:
                    break
                step = progress.step
                for hook in hooks:
                    hook.on_step_begin(context, step)
                self._set_learning_rate(step)
                recorder.ended("other")
                adapter.train_step(group)
                recorder.ended("compute")
                if self._nan_policy.must_stop(adapter.fault, group, step=step, epoch=epoch):
                    self._save_and_wait()
                    stopped = True
                    break
                progress.advance(group, size=self._world.size)
                self._end_step(step)
                recorder.ended("other")
            if resumed_at and not stopped and progress.step == resumed_at:  # the epoch's steps were all taken before
                example = source.example(epoch)
                if example is not None:  # a step without samples, so that the metrics have their names
                    adapter.eval_step(replace(example, local_count=0, global_count=0))
                self._load_rank_state(held)
        except BaseException:
            # Drop this epoch's counts, so that the next one does not contain them. A second error would hide the first.
            with suppress(Exception):
                adapter.metrics(lambda local: local)
            raise
        finally:
            self.in_epoch = False
        if stopped:
            adapter.metrics(lambda local: local)
            adapter.settle()
            return None
        if not progress.consumed.samples:
            raise ValueError(
                f"train yielded no samples on any rank in epoch {epoch}. Give data that can be iterated once per epoch."
            )
        return self._results()

    def _load_rank_state(self, arrays: rank_state.Arrays) -> None:
        rank_state.set_random_states(arrays)
        self._adapter.rank_state = arrays

    def _set_learning_rate(self, step: int) -> None:
        # If the length of an epoch is unknown, there is no warm-up: every step but the first is past it.
        steps_per_epoch = self._context.steps_per_epoch
        done = self.progress.epoch * (steps_per_epoch or 1) + step + self._ahead
        rates = self._lr.at(done, steps_per_epoch=steps_per_epoch)
        if rates is not None:
            self._adapter.learning_rates = rates

    def _end_step(self, step: int) -> None:
        """Call the callbacks, save checkpoints that are due, and about once a second exchange step times."""
        context = self._context
        watchdog.step_done(self.progress.global_step)
        for hook in self._hooks:
            hook.on_step_end(context, step)
        for each in self._checkpoints:
            if each.options.is_due(self.progress.global_step):
                self._save(each)
        requested = preemption.requested() is not None
        report = self._heartbeat.beat(requested or (self.commits is not None and self.commits.hosts_have_changed))
        if report is None:
            return
        if report.stop:
            if self.commits is None or self._world.allreduce(np.array([requested], np.int32), "max", name="stop")[0]:
                self._leave()
            self._commit()
            self.commits.begin_next_round()
        interval = self._interval(report)
        for hook in self._hooks:
            hook.on_interval(context, interval)

    def _interval(self, report: HeartbeatReport) -> Interval:
        """Return the times, samples and metrics of the steps since the last report."""
        progress = self.progress
        samples = self._earlier_samples + progress.consumed.samples
        before, self._reported_samples = self._reported_samples, samples
        return Interval(
            epoch=progress.epoch,
            step=progress.step,
            global_step=progress.global_step,
            steps=report.steps,
            samples=samples - before,
            seconds=report.seconds,
            times=report.times,
            learning_rate=self._adapter.learning_rates[0],
            metrics=self._adapter.metrics(lambda vector: self._world.allreduce(vector, name="running"), keep=True),
        )

    def _results(self) -> dict[str, float]:
        times = np.zeros(self._world.size)  # one entry per rank: they travel with the metrics

        def reduce(vector: NDArray[np.float64]) -> NDArray[np.float64]:
            times[self._world.rank] = time.perf_counter() - self._began  # the device has finished the epoch
            total = self._world.allreduce(np.concatenate([vector, times]), name="metrics")
            times[:] = total[len(vector) :]
            return total[: len(vector)]

        logs = self._adapter.metrics(reduce)
        seconds = float(times.max())
        self._adapter.settle()
        self._earlier_samples += self.progress.consumed.samples
        return logs | {"samples_per_s": self.progress.consumed.samples / seconds, "seconds": seconds}
