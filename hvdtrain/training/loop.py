"""The epochs and steps of `Trainer.fit`.

From `fit(train)` to the framework's step the data passes through nine functions: `Trainer.fit`, `Trainer._fit_round`,
`as_source`, `Trainer._make_steps`, `OrdinarySteps.__init__`, `Source.epoch`, `IndexedSource.batch`,
`Loop._take_steps` and `Adapter.train_step`.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from hvdtrain.adapter import framework_of
from hvdtrain.callbacks.base import CallbackList, RunContext
from hvdtrain.distributed import agreement, rank_state, streams, watchdog
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.recorder import recorder
from hvdtrain.errors import FolderInUseError
from hvdtrain.sync.synchronizer import Synchronizer
from hvdtrain.telemetry import rank_memory
from hvdtrain.telemetry.memory import Use
from hvdtrain.telemetry.rank_memory import Place, RankMemory
from hvdtrain.training import preemption
from hvdtrain.training.checkpointing import Snapshot
from hvdtrain.training.due import Due
from hvdtrain.training.fit import Fit
from hvdtrain.training.learning_rate import LearningRate
from hvdtrain.training.nan_policy import NanPolicy
from hvdtrain.training.pace import Pace
from hvdtrain.training.progress import Budget, RunProgress, steps_done
from hvdtrain.training.run_end import RunEnd
from hvdtrain.training.run_state import RunState
from hvdtrain.training.saver import Saver
from hvdtrain.training.validation import load_rank_state

log = logging.getLogger("hvdtrain")


class Loop:
    """Runs the epochs and steps of a Trainer's fits, and saves the run.

    Attributes:
        state: what is saved of the run; it stays when a fit ends.
        decisions: log lines on what the current or last fit has decided.
        saver: saves the run.
        memory: measures the memory of steps.
        in_epoch: True while steps of an epoch are left; other metrics must not be mixed with the epoch's.
    """

    def __init__(
        self, context: RunContext, sync: Synchronizer, learning_rate: LearningRate, config: dict[str, Any]
    ) -> None:
        adapter = sync.adapter
        self.state = RunState(adapter, config, context.world)
        self.decisions: list[str] = []
        self.in_epoch = False
        self._context, self._world, self._lr = context, context.world, learning_rate
        self._sync, self._adapter = sync, adapter
        self._accumulate: int = config["accumulate"]
        self._nan_policy = NanPolicy(config["nan_policy"], context.world)
        self._due = Due()
        self.saver = Saver(context, sync, self._due, self.snapshot)
        world, use = context.world, Use(framework_of(context.model), DataRanks(context.world).size, config)
        self.memory = RankMemory(adapter.memory, lambda: use, lambda: Place(world.rank, world.local_size))
        rank_memory.speak(self.memory)
        sync.between_exchanges = self._exchange_early
        # Of the current or last fit:
        self._fit: Fit
        self._hooks = CallbackList([])
        self._end = RunEnd(Budget(), self.state, self._world)
        self._pace = Pace(adapter, self._world)
        self._ahead = 0  # steps that this number of ranks would have taken of the epoch, minus those taken

    @property
    def progress(self) -> RunProgress:
        """The place that the run has come to."""
        return self.state.progress

    def stop(self, *, within_epoch: bool) -> None:
        """End the run; see `Trainer.stop`."""
        self._end.request(within_epoch=within_epoch)

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint holds of the run besides the adapter's state."""
        seconds = self._pace.seconds if self.in_epoch else self.progress.seconds
        return self.state.snapshot(seconds=seconds, callbacks=self._hooks.states)

    # Fits

    def run(self, fit: Fit) -> None:
        """Begin a run, or resume it, and take the epochs that are left.

        Raises:
            SystemExit: a stop was requested.
        """
        with agreement.everywhere(world=self._world, name="setup"):
            for hook in fit.callbacks:
                hook.on_setup(self._context)
        with self.saver.hold(fit, before=self.state.run_id):
            callback_states = self._begin(fit)
            try:
                with self.state.drawing_alike("on_fit_begin"):
                    for hook in self._hooks:
                        hook.on_fit_begin(self._context)
                self._hooks.load_states(callback_states, world=self._world)
                self.saver.commit()
                self._run_epochs()
                self._finish()
            except BaseException as error:
                if isinstance(error, SystemExit):
                    watchdog.note_status(error.code)
                self.memory.explain(error)
                streams.share(None)
                self._adapter.abandon()
                raise
            finally:
                self._hooks.close()
            self._agree_to_end()  # a signal may have come while the run ended

    def _note(self, decision: str | None) -> None:
        """Log what the run has decided, and let callbacks show it."""
        if decision is not None and self._world.is_root:
            self.decisions.append(decision)
            log.info("%s", decision)

    def _begin(self, fit: Fit) -> list[Any]:
        """Begin a run, or resume it; return the states of callbacks in the checkpoint."""
        state, self._fit, self._hooks = self.state, fit, fit.callbacks
        self._due.clear()
        self._end = RunEnd(fit.budget, state, self._world)
        state.generators = fit.generators
        state.restore(self.saver.restore(fit.resume, lr_factor=self._lr.factor))
        found = state.begin(fit.steps.source.facts, fit.run_id)
        if found.get("is_others") and self._end.is_over:
            raise FolderInUseError(
                f"Another Trainer of this script has trained the run in {state.resumed_from}, and nothing is left to "
                f"train{fit.budget.describe()}. Give each Trainer a folder of its own; Trainer.load returns the other "
                f"one's model. Received: the same folder on rank {self._world.rank}"
            )
        for line in state.describe_generators(saves=fit.saves) if self._world.is_root else ():
            log.warning("%s", line)
        lines = self._resume_settings(found.get("settings"))
        self._start_steps(found.get("shares"))
        self._pace = Pace(self._adapter, self._world, samples=self.progress.consumed.samples)
        self.saver.begin(
            state.run_id or fit.run_id, global_step=self.progress.global_step, will_write=not self._end.is_over
        )
        self._sync.start()
        state.begin_streams(in_threads=fit.reads_in_threads)
        self._describe(lines)
        self.memory.begin()
        return list(found.get("callbacks", ()))

    def _resume_settings(self, saved: list[dict[str, Any]] | None) -> list[str]:
        """Use the script's or the checkpoint's settings of the optimizer; return log lines on what differs."""
        fit, settings = self._fit, self.state.settings
        if saved is None or [*map(len, saved)] != [*map(len, settings.used)]:  # a new run, or another optimizer
            return []
        lines = settings.resume(saved, fit.override, lr_factor=self._lr.factor, scheduled=fit.schedules_rate)
        if all("lr" in group for group in settings.used):
            self._lr.base = tuple(group["lr"] for group in settings.used)
        return lines

    def _start_steps(self, shares: list[int] | None) -> None:
        """Let the steps begin where the run resumes, with the checkpoint's shares."""
        steps, consumed, self._ahead = self._fit.steps, self.progress.consumed, 0
        if self.progress.step:
            # The count of steps continues, because it orders checkpoints. The schedule needs this run's steps.
            size = DataRanks(self._world).size
            here = steps_done(consumed, steps.source.facts, size=size, accumulate=self._accumulate)
            is_assigned = consumed.assignment is not None and consumed.size == size
            self._ahead = 0 if is_assigned else here - self.progress.step
        steps.start(consumed, shares=shares, record=self.state.history.cutoffs)
        self.state.shares = steps.shares

    def _describe(self, settings: list[str]) -> None:
        """Log what is resumed, with these lines on the optimizer's settings, then the learning rate and the options."""
        fit, resumed = self._fit, self.state.describe_resume() + settings
        if resumed and self._end.is_over:
            resumed.append(f"nothing is left to train{fit.budget.describe()}")
        # A DataLoader has its own batch size; an iterable dataset need not have one.
        scale = self._lr.describe(
            batch_size=fit.steps.source.facts.get("batch_size"),
            accumulate=self._accumulate,
            rates=self._adapter.learning_rates,
            scheduled=fit.schedules_rate or not all(self._adapter.settings),
        )
        self.decisions = [*resumed, *scale, *fit.notes]
        for line in self.decisions if self._world.is_root else ():
            log.info("%s", line)

    def _finish(self) -> None:
        """Save the last checkpoint, call the callbacks, and return when everything is written."""
        for each in self.saver.folders:
            if each.options.every_epochs and each.saved_at != self.progress.global_step:
                self.saver.save(each)
            each.wait()
            self._note(each.describe_best())
        self.memory.report()
        for hook in self._hooks:
            hook.on_training_end(self._context)
        fault = self._sync.finish()  # after the last checkpoint, from which more epochs may be trained
        self._nan_policy.handle(fault, (), at="The last step")
        for hook in self._hooks:
            hook.on_fit_end(self._context)
        self.saver.finish()
        self.state.end_streams()

    def _agree_to_end(self) -> None:
        """End the run if a callback on any rank has requested it; exit if a signal to any rank has."""
        self._end.agree()
        if self._end.why == "signal":
            self._exit()

    def _exit(self) -> NoReturn:
        """Save the current state and end the process, on all ranks."""
        self.saver.save_and_wait()
        if self._world.is_root:
            what = "nothing is saved without checkpoint_dir"
            if self._fit.checkpoints:
                what = "a checkpoint is written: the same command resumes from it"
            step, epoch = self.progress.step, self.progress.epoch
            last = ", the last" if epoch == self._fit.budget.epochs else ""
            place = f"after step {step} of epoch {epoch + 1}" if step else f"after epoch {epoch}{last}"
            sys.stderr.write(f"hvdtrain: stopped on request {place}; {what} (exit status {preemption.EXIT_CODE})\n")
        # mpirun ends the other ranks when the first one exits. So close the logs, which may take a while, before that.
        self._hooks.close()
        self._world.barrier()
        sys.exit(preemption.EXIT_CODE)

    # Epochs

    def _run_epochs(self) -> None:
        """Run the epochs that are left."""
        state, end = self.state, self._end
        end.agree(heed_signals=False)  # a resumed run has not yet loaded all that a checkpoint must contain
        end.check_budget()
        # If the end of an interrupted run is still to be reported, its epoch is resumed without steps.
        left = end.why is None or (self.progress.step and state.part is None)
        if not left and state.part is not None:
            state.history.add(state.part)
        while left:
            state.part = None
            logs = self._run_epoch()
            left = logs is not None and self._report(logs)

    def _run_epoch(self) -> dict[str, float] | None:
        """Take the steps that are left of an epoch or of the run; return the metrics.

        None: nan_policy="stop" has ended the run.
        """
        progress, adapter, steps, resumed_at = self.progress, self._adapter, self._fit.steps, self.progress.step
        self._begin_epoch()
        try:
            with self.state.drawing_order() as held:
                steps.begin(progress.epoch, progress.consumed, number=progress.global_step)
            recorder.ended("outside")
            self._take_steps()
            if resumed_at and self._end.why != "nan_policy" and progress.step == resumed_at:  # all were taken before
                self._name_metrics(held)
            self._end_steps()
        except BaseException:
            # Drop this epoch's counts, so that the next one does not contain them. A second error would hide the first.
            with suppress(Exception):
                adapter.reset_metrics()
            raise
        finally:
            self.in_epoch = False
            steps.close()
        if self._end.why == "nan_policy":
            adapter.reset_metrics()
            adapter.average_buffers()
            return None
        self._note(steps.describe())
        if not progress.consumed.samples:
            raise ValueError(
                f"train yielded no samples on any rank in epoch {progress.epoch}. Give data that can be iterated once "
                "per epoch."
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

    def _name_metrics(self, held: rank_state.Arrays) -> None:
        """Let the metrics of an epoch that resumes without steps have their names, by a step without samples."""
        source = self._fit.steps.source
        with source.generators.aside():
            example = source.example(self.progress.epoch)
        if example is not None:
            self._adapter.eval_step(replace(example, local_count=0, global_count=0))
        load_rank_state(self._adapter, held)

    def _end_steps(self) -> None:
        """Note where a longer run resumes, and synchronize ranks, which may tell of a step that was not taken."""
        if self._end.why not in (None, "nan_policy") and not self.progress.has_read(self._fit.steps.source):
            self.state.end_within_epoch(self.snapshot())
        if self._sync.in_sync:
            return
        fault = self._sync.make_equal()  # only now ranks learn of steps that one of them has left out
        if self._nan_policy.handle(fault, (), at=f"The last step of epoch {self.progress.epoch + 1}"):
            self._stop_by_nan_policy()

    def _report(self, logs: dict[str, float]) -> bool:
        """Validate, call the callbacks, and save; return whether the run continues.

        `logs` are the metrics of an epoch, or of the part of it that was left of the run.
        """
        fit, state, epoch = self._fit, self.state, self.progress.epoch
        self._due.validation = False
        validated = state.history.validated_after(self.progress.global_step)
        logs |= validated or fit.validation.run(self._hooks, within_epoch=False)
        if state.ended is not None:  # save before callbacks end an epoch that a longer run resumes
            state.part = state.ended.meta["part"] = state.ended.meta["metrics"] = dict(logs)
            for each in self.saver.folders:
                self.saver.save(each)
        state.history.add(logs)
        self._nan_policy.epoch_taken(logs, epoch=epoch)
        if state.ended is None:
            self.progress.end_epoch()
        with state.drawing_alike("on_epoch_end"):
            for hook in self._hooks:
                hook.on_epoch_end(self._context, epoch, logs)
        for each in self.saver.folders:
            if each.options.is_due_after(epoch, logs) and state.ended is None:
                self._due.add(each)
        self.saver.save_due()
        self.saver.commit()
        self._agree_to_end()
        self._end.check_budget()
        return self._end.why is None

    # Steps

    def _take_steps(self) -> None:
        """Take the steps that are left of the epoch, until the run ends."""
        steps, progress, hooks, context = self._fit.steps, self.progress, self._hooks, self._context
        take, memory = steps.step_of(self._adapter), self.memory.steps
        while self._end.why is None:
            group = next(steps.groups, None)
            recorder.ended("data" if group else "outside")
            if not group:
                break
            step = progress.step
            for hook in hooks:
                hook.on_step_begin(context, step)
            self._set_learning_rate(step)
            recorder.ended("other")
            memory.begin_step()
            self._sync.before_step()
            take(group)
            fault = self._sync.after_step(group)
            memory.end_step()
            recorder.ended("compute")
            stops = self._nan_policy.handle(fault, group, at=f"Step {step + 1} of epoch {progress.epoch + 1}")
            if not stops or (fault is not None and fault.is_late):
                progress.advance(steps.took(group))
            if stops:
                self._stop_by_nan_policy()
                break
            self._end_step(step)
            steps.divide()
            recorder.ended("other")

    def _set_learning_rate(self, step: int) -> None:
        # If the length of an epoch is unknown, there is no warm-up: every step but the first is past it.
        steps_per_epoch = self._context.steps_per_epoch
        done = self.progress.epoch * (steps_per_epoch or 1) + step + self._ahead
        rates = self._lr.at(done, steps_per_epoch=steps_per_epoch)
        if rates is not None:
            self._adapter.learning_rates = rates

    def _stop_by_nan_policy(self) -> None:
        self._end.by_nan_policy()
        self.saver.save_and_wait()

    def _end_step(self, step: int) -> None:
        """Call the callbacks, do what is due, and about once a second exchange a heartbeat."""
        watchdog.step_done(self.progress.global_step)
        while self._adapter.notes:
            self._note(self._adapter.notes.pop(0))
        for hook in self._hooks:
            hook.on_step_end(self._context, step)
        validated = self._validate_within_epoch()
        for each in self.saver.folders:
            if each.options.is_due(self.progress.global_step, validated):
                self._due.add(each)
        self.saver.save_due()
        self._end.check_budget()
        if not self._pace.has_report:
            self._exchange(postponed=self._sync.in_flight or self._fit.steps.was_cut)
        if self._due:
            self._sync.request_sync()  # before these, if ranks do not hold equal weights
        if self._due.stop and self._sync.in_sync:
            self._stop_on_request()
        self._end_interval()

    def _validate_within_epoch(self) -> dict[str, float]:
        """Validate if it is due after this step; return the metrics."""
        step, validation = self.progress.global_step, self._fit.validation
        self._due.validation |= validation.is_due(step)
        if not (self._due.validation and self._sync.in_sync):
            return {}
        self._due.validation = False
        with self._pace.paused():
            logs = validation.run(self._hooks, within_epoch=True)
        self.state.history.validations.append({"global_step": step, **logs})
        self._agree_to_end()
        return logs

    def _exchange_early(self) -> None:
        """Exchange within the step the heartbeat that would be due at its end."""
        if self._pace.heartbeat_is_due:
            recorder.ended("compute")
            self._exchange()

    def _exchange(self, *, postponed: bool = False) -> None:
        """Count a step; if a heartbeat is due, exchange it: it may end the run, or say that a stop is due."""
        commits = self._fit.commits
        stop = preemption.requested() is not None or (commits is not None and commits.hosts_have_changed)
        spent_s = self._end.spent_s(self._pace.seconds)
        report = self._pace.beat(stop, spent_s=spent_s, limit_s=self._end.limit_s, postponed=postponed)
        if report is not None:
            self._end.learn(report)
            self._due.stop |= report.stop

    def _stop_on_request(self) -> None:
        """Exit; if only the hosts of an elastic job have changed, commit and begin the next round."""
        commits, requested = self._fit.commits, preemption.requested() is not None
        if commits is None or self._world.allreduce(np.array([requested], np.int32), "max", name="stop")[0]:
            self._exit()
        self.saver.commit()
        commits.begin_next_round()

    def _end_interval(self) -> None:
        """After a heartbeat, tell the steps and the callbacks of the interval that it ends."""
        interval = self._pace.interval(self.progress)
        if interval is None:
            return
        self._note(self._fit.steps.observe(interval.times))
        self.state.shares = self._fit.steps.shares
        self.memory.post()
        for hook in self._hooks:
            hook.on_interval(self._context, interval)
