"""The epochs and steps of `Trainer.fit`.

From `fit(train)` to the framework's step the data passes through eight functions: `Trainer.fit`, `Trainer._fit_round`,
`as_source`, `OrdinarySteps.__init__`, `Source.epoch`, `IndexedSource.batch`, `Loop.run_epoch` and `Adapter.train_step`.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from hvdtrain.adapter import Adapter
from hvdtrain.callbacks.base import CallbackList, CheckpointOptions, RunContext, RunId
from hvdtrain.distributed import rank_state, streams, watchdog
from hvdtrain.distributed.recorder import recorder
from hvdtrain.errors import FolderInUseError
from hvdtrain.sync.steps import Steps
from hvdtrain.telemetry.interval import Heartbeat, HeartbeatReport
from hvdtrain.training import preemption
from hvdtrain.training.checkpointing import RunCheckpoints, Snapshot
from hvdtrain.training.learning_rate import LearningRate
from hvdtrain.training.nan_policy import NanPolicy
from hvdtrain.training.pace import Pace
from hvdtrain.training.progress import Budget, RunProgress, steps_done
from hvdtrain.training.run_state import RunState
from hvdtrain.training.validation import Validation, load_rank_state

if TYPE_CHECKING:
    from hvdtrain.training.elastic import FitState

log = logging.getLogger("hvdtrain")


class Loop:
    """Runs the epochs and steps of a Trainer, and saves the run."""

    def __init__(
        self, context: RunContext, adapter: Adapter, learning_rate: LearningRate, config: dict[str, Any]
    ) -> None:
        self.state = RunState(adapter, config, context.world)
        self.in_epoch = False  # whether an epoch's steps are running; other metrics must not be mixed with theirs
        self.stop_requested = self.stop_within_epoch = False  # whether a callback has ended the run on this rank
        self.budget = Budget()
        self.override: Collection[str] = ()  # settings of the optimizer that a resumed run takes from the script
        self._lines: list[str] = []  # on these settings
        self.validation = Validation(adapter, context)
        self.commits: FitState | None = None  # the last commit, in an elastic job
        self._context = context
        self._world = context.world
        self._adapter = adapter
        self._lr = learning_rate
        self._accumulate: int = config["accumulate"]
        self._hooks = CallbackList([])
        self._checkpoints: list[RunCheckpoints] = []  # of this fit
        self._savers: dict[CheckpointOptions, RunCheckpoints] = {}  # these, and others to which callbacks save
        self._ending = False  # whether the run takes no further step, equal on all ranks
        self._validation_is_due = self._must_leave = False  # these wait for ranks to hold equal weights
        self._ahead = 0  # steps that this number of ranks would have taken of the epoch, minus those taken
        self._pace = Pace(adapter, context.world)
        self._heartbeat = Heartbeat(context.world)
        self._exchanged: tuple[HeartbeatReport, dict[str, float]] | None = None  # in this step, with metrics so far
        self._adapter.between_exchanges = self._exchange_early
        self._nan_policy = NanPolicy(config["nan_policy"], context.world)

    @property
    def progress(self) -> RunProgress:
        """How far the run has come."""
        return self.state.progress

    # Save

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint holds of the run besides the adapter's state."""
        seconds = self._pace.seconds if self.in_epoch else self.progress.seconds
        return self.state.snapshot(seconds=seconds, callbacks=self._hooks.states)

    def save_checkpoint(self, options: CheckpointOptions) -> None:
        """Save the current state, once ranks hold equal weights; a collective call."""
        if options not in self._savers:
            self._savers[options] = RunCheckpoints(options, self._world)
        self._savers[options].is_late = True
        self._save_late()

    def _save_late(self) -> None:
        """Save the checkpoints that are due, if ranks hold equal weights."""
        for each in self._savers.values() if self._adapter.in_sync else ():
            if each.is_late:
                self._save(each)

    def _save(self, checkpoints: RunCheckpoints) -> None:
        if self.progress.step:  # an epoch's end has its own commit
            self._commit()
        checkpoints.save(self._adapter, self.snapshot())

    def _save_and_wait(self) -> None:
        """Save the current state to every folder of checkpoints, and wait until it is written."""
        for each in self._checkpoints:
            self._save(each)
            each.finish()

    def _commit(self) -> None:
        if self.commits is not None:
            self.commits.commit(self.snapshot())

    def _note(self, decision: str | None) -> None:
        """Log what the run has decided, and let callbacks show it."""
        if decision is not None and self._world.is_root:
            self._context.decisions.append(decision)
            log.info("%s", decision)

    # Epochs

    def begin(
        self, steps: Steps, hooks: CallbackList, run_id: RunId, checkpoints: list[RunCheckpoints], resume: str
    ) -> None:
        """Begin a run, or resume it: from the last commit of an elastic job, else from a checkpoint."""
        state, facts = self.state, steps.source.facts
        self.validation.of_training = steps.source.generators
        state.generators = {"train": steps.source.generators}
        state.generators |= {f"validation.{name}": each.generators for name, each in self.validation.sets.items()}
        commit = None if self.commits is None else self.commits.find(lr_factor=self._lr.factor)
        state.restore(commit)
        for each in checkpoints if commit is None else ():
            if resume == "never":
                each.set_aside()
            else:
                state.restore(each.restore(self._adapter, lr_factor=self._lr.factor))
        self._hooks, self._heartbeat = hooks, Heartbeat(self._world)
        found = state.begin(facts, run_id)
        if found.get("is_others") and self.is_finished:
            raise FolderInUseError(
                f"Another Trainer of this script has trained the run in {state.resumed_from}, and nothing is left to "
                f"train{self.budget.describe()}. Give each Trainer a folder of its own; Trainer.load returns the other "
                f"one's model. Received: the same folder on rank {self._world.rank}"
            )
        self._callback_states: list[Any] = list(found.get("callbacks", ()))
        saves = bool(checkpoints) or self.commits is not None
        for line in state.describe_generators(saves=saves) if self._world.is_root else ():
            log.warning("%s", line)
        self._resume_settings(found.get("settings"))
        consumed, self._ahead = state.progress.consumed, 0
        if self.progress.step:
            # The count of steps continues, because it orders checkpoints. The schedule needs this run's steps.
            here = steps_done(consumed, facts, size=self._world.size, accumulate=self._accumulate)
            is_assigned = consumed.assignment is not None and consumed.size == self._world.size
            self._ahead = 0 if is_assigned else here - self.progress.step
        steps.start(consumed, shares=found.get("shares"), record=state.history.cutoffs)
        state.shares = steps.shares
        self._pace = Pace(self._adapter, self._world, samples=self.progress.consumed.samples)
        self._checkpoints = checkpoints
        self._savers |= {each.options: each for each in checkpoints}
        for each in self._savers.values():  # of a fit that an error has ended
            each.is_late = False
        for each in checkpoints:
            each.claim(self._adapter)
            each.saved_at = self.progress.global_step
            if not self.is_finished:  # else nothing will be written
                each.check_writable(self._adapter, state.run_id or run_id)
        self.stop_requested = self.stop_within_epoch = self._validation_is_due = self._must_leave = False
        self._exchanged = None
        self._adapter.start()
        read = [steps.source, *self.validation.sets.values()]
        state.begin_streams(in_threads=any(getattr(each, "reads_in_threads", False) for each in read))

    def _resume_settings(self, saved: list[dict[str, Any]] | None) -> None:
        """Use the script's or the checkpoint's settings of the optimizer, and note what differs."""
        settings, self._lines = self.state.settings, []
        if saved is None or [*map(len, saved)] != [*map(len, settings.used)]:  # a new run, or another optimizer
            return
        scheduled = any(hook.sets_learning_rate for hook in self._hooks)
        self._lines = settings.resume(saved, self.override, lr_factor=self._lr.factor, scheduled=scheduled)
        if all("lr" in group for group in settings.used):
            self._lr.base = tuple(group["lr"] for group in settings.used)

    @property
    def is_finished(self) -> bool:
        """Whether the run had reached its end when it resumed."""
        return self._is_spent() and (not self.progress.step or self.state.part is not None)

    def describe_resume(self) -> list[str]:
        """Return log lines: which run is resumed, from where, and whether something is left to train."""
        lines = self.state.describe_resume() + self._lines
        return [*lines, f"nothing is left to train{self.budget.describe()}"] if lines and self.is_finished else lines

    def _is_spent(self) -> bool:
        return self.budget.is_spent(self.progress, seconds=self.state.history.seconds + self.progress.seconds)

    def run(self, steps: Steps) -> None:
        """Run the epochs that are left."""
        hooks, context, state = self._hooks, self._context, self.state
        try:
            with state.drawing_alike("on_fit_begin"):
                for hook in hooks:
                    hook.on_fit_begin(context)
            hooks.load_states(self._callback_states)
            self._commit()
            self._ending = self.agree_to_stop(after_epoch=False) or self._is_spent()
            # If the end of an interrupted run is still to be reported, its epoch is resumed without steps.
            left = not self._ending or (self.progress.step and state.part is None)
            if not left and state.part is not None:
                state.history.add(state.part)
            while left:
                state.part = None
                logs = self.run_epoch(steps)
                left = logs is not None and self._report(logs)
            for each in self._checkpoints:
                if each.options.every_epochs and each.saved_at != self.progress.global_step:
                    self._save(each)
                each.wait()
                self._note(each.describe_best())
            for hook in hooks:
                hook.on_training_end(context)
            fault = self._adapter.finish()  # after the last checkpoint, from which more epochs may be trained
            self._nan_policy.must_stop(fault, (), at="The last step")
            for hook in hooks:
                hook.on_fit_end(context)
            for each in self._savers.values():  # also of callbacks' own checkpoints
                each.finish()
            state.end_streams()
        except BaseException:
            streams.share(None)
            self._adapter.abandon()
            raise
        finally:
            hooks.close()

    def _report(self, logs: dict[str, float]) -> bool:
        """Validate, call the callbacks, and save; return whether the run continues.

        `logs` are the metrics of an epoch, or of the part of it that was left of the run.
        """
        state, epoch = self.state, self.progress.epoch
        self._validation_is_due = False
        validated = state.history.validated_after(self.progress.global_step)
        logs |= validated or self.validation.run(self._hooks, within_epoch=False)
        if state.ended is not None:  # save before callbacks end an epoch that a longer run resumes
            state.part = state.ended.meta["part"] = state.ended.meta["metrics"] = dict(logs)
            for each in self._checkpoints:
                self._save(each)
        state.history.add(logs)
        self._nan_policy.epoch_taken(logs, epoch=epoch)
        if state.ended is None:
            self.progress.end_epoch()
        with state.drawing_alike("on_epoch_end"):
            for hook in self._hooks:
                hook.on_epoch_end(self._context, epoch, logs)
        for each in self._checkpoints:
            each.is_late |= each.options.is_due_after(epoch, logs) and state.ended is None
        self._save_late()
        self._commit()
        stop = self.agree_to_stop(after_epoch=True)
        self._ending = self._ending or stop or self._is_spent()
        return not self._ending

    def _validate_within_epoch(self) -> dict[str, float]:
        """Validate if it is due after this step; return the metrics."""
        step = self.progress.global_step
        self._validation_is_due |= self.validation.is_due(step)
        if not (self._validation_is_due and self._adapter.in_sync):
            return {}
        self._validation_is_due = False
        with self._pace.paused():
            logs = self.validation.run(self._hooks, within_epoch=True)
        self.state.history.validations.append({"global_step": step, **logs})
        self._ending = self.agree_to_stop(after_epoch=True)
        return logs

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
            last = ", the last" if epoch == self.budget.epochs else ""
            place = f"after step {step} of epoch {epoch + 1}" if step else f"after epoch {epoch}{last}"
            sys.stderr.write(f"hvdtrain: stopped on request {place}; {what} (exit status {preemption.EXIT_CODE})\n")
        # mpirun ends the other ranks when the first one exits. So close the logs, which may take a while, before that.
        self._hooks.close()
        self._world.barrier()
        sys.exit(preemption.EXIT_CODE)

    # Steps

    def run_epoch(self, steps: Steps) -> dict[str, float] | None:
        """Take the steps that are left of an epoch or of the run; return the metrics.

        None: nan_policy="stop" has ended the run.
        """
        progress, hooks, context, adapter = self.progress, self._hooks, self._context, self._adapter
        epoch, resumed_at, stopped = progress.epoch, progress.step, False
        take = steps.step_of(adapter)
        self._begin_epoch()
        try:
            with self.state.drawing_order() as held:
                steps.begin(epoch, progress.consumed, number=progress.global_step)
            recorder.ended("outside")
            while not self._ending:
                group = next(steps.groups, None)
                recorder.ended("data" if group else "outside")
                if not group:
                    break
                step = progress.step
                for hook in hooks:
                    hook.on_step_begin(context, step)
                self._set_learning_rate(step)
                recorder.ended("other")
                take(group)
                recorder.ended("compute")
                fault = adapter.fault
                stopped = self._nan_policy.must_stop(fault, group, at=f"Step {step + 1} of epoch {epoch + 1}")
                if not stopped or (fault is not None and fault.is_late):
                    progress.advance(steps.took(group))
                if stopped:
                    self._save_and_wait()
                    break
                self._end_step(step, steps)
                steps.divide()
                recorder.ended("other")
            if resumed_at and not stopped and progress.step == resumed_at:  # the epoch's steps were all taken before
                self._name_metrics(steps, held)
            stopped = self._end_steps(steps, stopped=stopped)
        except BaseException:
            # Drop this epoch's counts, so that the next one does not contain them. A second error would hide the first.
            with suppress(Exception):
                adapter.reset_metrics()
            raise
        finally:
            self.in_epoch = False
            steps.close()
        if stopped:
            adapter.reset_metrics()
            adapter.settle()
            return None
        self._note(steps.describe())
        if not progress.consumed.samples:
            raise ValueError(
                f"train yielded no samples on any rank in epoch {epoch}. Give data that can be iterated once per epoch."
            )
        return self._pace.end_epoch(progress)

    def _begin_epoch(self) -> None:
        """Restore random states, unless steps of the epoch were taken, and call the callbacks."""
        if not self.progress.step:
            self.state.load_held()
            self._ahead = 0
        with self.state.drawing_alike("on_epoch_begin"):  # a callback may choose the epoch's samples
            for hook in self._hooks:
                hook.on_epoch_begin(self._context, self.progress.epoch)
        self._pace.begin_epoch(seconds=self.progress.seconds)
        self.in_epoch = True

    def _name_metrics(self, steps: Steps, held: rank_state.Arrays) -> None:
        """Let the metrics of an epoch that resumes without steps have their names, by a step without samples."""
        with steps.source.generators.aside():
            example = steps.source.example(self.progress.epoch)
        if example is not None:
            self._adapter.eval_step(replace(example, local_count=0, global_count=0))
        load_rank_state(self._adapter, held)

    def _end_steps(self, steps: Steps, *, stopped: bool) -> bool:
        """Note where a longer run resumes, and synchronize ranks; return whether nan_policy stops the run."""
        if self._ending and not self.progress.has_read(steps.source):
            self.state.end_within_epoch(self.snapshot())
        if self._adapter.in_sync:
            return stopped
        self._adapter.settle()  # only now ranks learn of steps that one of them has left out
        at = f"The last step of epoch {self.progress.epoch + 1}"
        stopped = self._nan_policy.must_stop(self._adapter.fault, (), at=at)
        if stopped:
            self._save_and_wait()
        return stopped

    def _set_learning_rate(self, step: int) -> None:
        # If the length of an epoch is unknown, there is no warm-up: every step but the first is past it.
        steps_per_epoch = self._context.steps_per_epoch
        done = self.progress.epoch * (steps_per_epoch or 1) + step + self._ahead
        rates = self._lr.at(done, steps_per_epoch=steps_per_epoch)
        if rates is not None:
            self._adapter.learning_rates = rates

    def _end_step(self, step: int, steps: Steps) -> None:
        """Call the callbacks, save checkpoints that are due, and about once a second exchange heartbeats."""
        context = self._context
        watchdog.step_done(self.progress.global_step)
        while self._adapter.notes:
            self._note(self._adapter.notes.pop(0))
        for hook in self._hooks:
            hook.on_step_end(context, step)
        validated = self._validate_within_epoch()
        for each in self._checkpoints:
            each.is_late |= each.options.is_due(self.progress.global_step, validated)
        self._save_late()
        budget = self.budget
        if budget.steps is not None and self.progress.global_step >= budget.steps:
            self._ending = True
        if self._exchanged is None:
            self._exchange(postponed=self._adapter.in_flight or steps.was_cut)
        exchanged, self._exchanged = self._exchanged, None
        if self._must_leave or self._validation_is_due or any(each.is_late for each in self._savers.values()):
            self._adapter.request_sync()  # before these, if ranks do not hold equal weights
        if self._must_leave and self._adapter.in_sync:
            requested = preemption.requested() is not None
            if self.commits is None or self._world.allreduce(np.array([requested], np.int32), "max", name="stop")[0]:
                self._leave()
            self._commit()
            self.commits.begin_next_round()
        if exchanged is None:
            return
        report, metrics = exchanged
        self._note(steps.observe(report.times))
        self.state.shares = steps.shares
        interval = self._pace.interval(report, metrics, self.progress)
        for hook in self._hooks:
            hook.on_interval(context, interval)

    def _exchange_early(self) -> None:
        """Exchange within the step the heartbeat that would be due at its end."""
        if self._heartbeat.is_due:
            recorder.ended("compute")
            self._exchange()

    def _exchange(self, *, postponed: bool = False) -> None:
        """Count a step; if a heartbeat is due, exchange it and the metrics so far."""
        limit_s = math.inf if self.budget.seconds is None else self.budget.seconds
        # Ranks exchange the largest, so all stop after the same step.
        spent_s = math.inf if self.stop_within_epoch else self.state.history.seconds + self._pace.seconds
        stop = preemption.requested() is not None or (self.commits is not None and self.commits.hosts_have_changed)
        report = self._heartbeat.beat(stop, spent_s=spent_s, limit_s=limit_s, postponed=postponed)
        if report is not None:
            self._ending = self._ending or report.spent_s >= limit_s
            self._must_leave |= report.stop
            self._exchanged = report, self._pace.metrics()
