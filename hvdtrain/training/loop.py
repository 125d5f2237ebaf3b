"""A run's place and its steps: where it is, how it goes on from a checkpoint, and what a checkpoint must hold."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.adapter import Adapter
from hvdtrain.callbacks.base import CallbackList
from hvdtrain.callbacks.checkpoint import Checkpoint
from hvdtrain.data.sources import Batch, Source
from hvdtrain.distributed import rank_state, watchdog
from hvdtrain.telemetry.heartbeat import Beat, Pulse
from hvdtrain.telemetry.interval import Interval
from hvdtrain.training import preemption
from hvdtrain.training.learning_rate import LearningRate
from hvdtrain.training.nan_policy import BadNumbers
from hvdtrain.training.progress import Position, check_data, steps_done
from hvdtrain.training.run_id import RunId

if TYPE_CHECKING:
    from hvdtrain.training.checkpointing import Keeper
    from hvdtrain.training.elastic import FitState
    from hvdtrain.training.trainer import Trainer


class History(dict[str, list[float]]):
    """A metric's name -> one float an epoch, equal on every rank.

    Besides the metrics it holds "samples_per_s", over all ranks, and "seconds", the slowest rank's training time.
    """

    def add(self, logs: dict[str, float]) -> None:
        """Append one epoch."""
        for name, value in logs.items():
            self.setdefault(name, []).append(float(value))


class Loop:
    """The steps of a Trainer, which says what they are made of.

    Args:
        trainer: what callbacks are given.
        adapter: takes the steps.
        learning_rate: the rate of each.
        config: the Trainer's options, as JSON.

    Attributes:
        position: how far the run has come.
        history: what it has recorded so far.
        run: which one it is; None before the first.
        in_epoch: whether steps are under way, whose metrics must not be mixed with others.
        stopped: whether the run ends within an epoch, which then has no metrics.
    """

    def __init__(self, trainer: Trainer, adapter: Adapter, learning_rate: LearningRate, config: dict[str, Any]) -> None:
        self.position = Position()
        self.history = History()
        self.run: RunId | None = None
        self.in_epoch = False
        self.stopped = False
        self._trainer = trainer
        self._world = trainer.world
        self._adapter = adapter
        self._lr = learning_rate
        self._config = config
        self._accumulate: int = config["accumulate"]
        self._hooks = CallbackList([])
        self._facts: dict[str, Any] = {}
        self._loaded: dict[str, Any] | None = None  # the meta data of a checkpoint to go on from
        self._held: rank_state.Arrays = {}  # of it, what this rank takes on when steps begin
        self._random_at_begin: rank_state.Arrays = {}  # of the epoch, whose order may have been drawn from it
        self._ahead = 0  # steps of this run that the epoch's would have been, less those that it took
        self._began = 0.0
        self._earlier_samples = self._told_samples = 0  # of this run's epochs before, and of what intervals told
        self._pulse = Pulse(trainer.world)
        self._numbers = BadNumbers(config["nan_policy"], trainer.world)

    # Checkpoints

    def find(self, keepers: Sequence[Keeper], kept: FitState | None, *, anew: bool) -> None:
        """Be where the run was that is to be gone on with: by what ranks have kept in memory, else by a checkpoint.

        Args:
            keepers: of checkpoints.
            kept: in an elastic job.
            anew: go on with no checkpoint, and move those there are out of the way.
        """
        found = None if kept is None else kept.find(lr_factor=self._lr.factor)
        if found is not None:
            self.load(found)
            return
        for keeper in keepers:
            if anew:
                keeper.set_aside()
            else:
                self.load(keeper.restore(self._adapter, lr_factor=self._lr.factor))

    def load(self, found: tuple[dict[str, Any], rank_state.Arrays] | None) -> None:
        """Be where the run was that `training.checkpointing` has found, and go on there; None changes nothing."""
        if found is not None:
            self._loaded, self._held = found
            self._facts = self._loaded["data"]
            self.position = Position.from_json(self._loaded["position"])
            self.history = History(self._loaded["history"])

    def begin(self, source: Source, hooks: CallbackList, run: RunId) -> list[Any]:
        """Take the place that a checkpoint has, or the beginning; return the states of its callbacks.

        Args:
            source: of the steps.
            hooks: called around them.
            run: which one this is, unless it is one that goes on.
        """
        self._hooks, self._facts, self._pulse = hooks, source.facts, Pulse(self._world)
        self.stopped, self._ahead = False, 0
        self._earlier_samples = self._told_samples = 0
        meta, self._loaded = self._loaded, None
        known = None if meta is None else meta.get("run")
        self.run = RunId(**known, resumed=True) if known else run
        if meta is None:
            self.position, self.history, self._held = Position(), History(), {}
            return []
        if self.position.step:
            check_data(meta["data"], self._facts)
            # Steps are counted on, since checkpoints are in that order; on the way through the epoch these are as many.
            here = steps_done(self.position.consumed, self._facts, size=self._world.size, accumulate=self._accumulate)
            self._ahead = here - self.position.step
            self._told_samples = self.position.consumed.samples
        return list(meta["callbacks"])

    def progress(self) -> dict[str, Any]:
        """Return what a checkpoint says of the run, as JSON."""
        seconds = time.perf_counter() - self._began if self.in_epoch else self.position.seconds
        last = {} if self.position.step else {name: values[-1] for name, values in self.history.items()}
        return {
            "config": self._config,
            "run": self.run and {"id": self.run.id, "name": self.run.name},
            "position": replace(self.position, seconds=seconds).to_json(),
            "history": self.history,
            "metrics": last,
            "data": self._facts,
            "callbacks": self._hooks.states() if self._loaded is None else self._loaded["callbacks"],
        }

    def own(self) -> rank_state.Arrays:
        """Return what this rank holds of its own."""
        begin = {f"begin.{name}": array for name, array in self._random_at_begin.items()}
        now = rank_state.random_states() | self._adapter.rank_state | (begin if self.position.step else {})
        return now | self._held  # what is yet to be taken on

    def _take_on(self, held: rank_state.Arrays) -> None:
        rank_state.set_random_states(held)
        self._adapter.rank_state = held

    # Steps

    def run_epoch(self, source: Source) -> dict[str, float]:
        """Take the steps of an epoch, those that are left of it; return its metrics, equal on all ranks.

        None of them, where the run stops within the epoch.
        """
        if not self.position.step:
            self._take_on(self._held)
            self._ahead = 0
        epoch = self.position.epoch
        self._hooks.on_epoch_begin(self._trainer, epoch)
        self._began = time.perf_counter() - self.position.seconds
        self.in_epoch = True
        try:
            self._train(source)
        except BaseException:
            # What this rank has counted must not reach the next epoch; the error under way is the one to show.
            with suppress(Exception):
                self._adapter.metrics(lambda local: local)
            raise
        finally:
            self.in_epoch = False
        if self.stopped:
            self._adapter.metrics(lambda local: local)
            self._adapter.settle()
            return {}
        if not self.position.consumed.samples:
            raise ValueError(
                f"train yielded no samples on any rank in epoch {epoch}. Give data that can be iterated anew."
            )
        return self._results()

    def end_epoch(self, logs: dict[str, float]) -> None:
        """Record the epoch's metrics, and begin the next."""
        self.history.add(logs)
        self._numbers.epoch_taken(logs, epoch=self.position.epoch)
        self.position.end_epoch()

    def _train(self, source: Source) -> None:
        position, hooks, trainer, pulse = self.position, self._hooks, self._trainer, self._pulse
        pulse.go_on()
        groups = pulse.data(_groups(self._data(source), self._accumulate))
        for step, batches in enumerate(groups, start=position.step):
            hooks.on_step_begin(trainer, step)
            self._set_learning_rate(step)
            with pulse.training():
                self._adapter.train_step(batches)
            fault = self._adapter.fault
            if fault is None:
                self._numbers.step_taken()
            elif self._numbers.meet(fault, batches, step=step, epoch=position.epoch):
                self.stopped = True
                self._keep()
                return
            position.advance(batches, size=self._world.size)
            watchdog.step_done(position.global_step)
            hooks.on_step_end(trainer, step)
            asked = preemption.requested() is not None
            kept = trainer.kept
            beat = pulse.beat(asked or (kept is not None and kept.hosts_have_changed))
            if beat is not None:
                if beat.asked:
                    if kept is not None:
                        kept.meet_anew_unless(asked, self)
                    self.leave()
                self._tell(beat)

    def _tell(self, beat: Beat) -> None:
        """Let callbacks know how the steps since the last beat went."""
        position = self.position
        samples = self._earlier_samples + position.consumed.samples
        interval = Interval(
            epoch=position.epoch,
            step=position.step,
            global_step=position.global_step,
            steps=beat.steps,
            samples=samples - self._told_samples,
            seconds=beat.seconds,
            times=beat.times,
            learning_rate=self._adapter.learning_rates[0],
            metrics=self._adapter.metrics(lambda vector: self._world.allreduce(vector, name="running"), keep=True),
        )
        self._told_samples = samples
        self._hooks.on_interval(self._trainer, interval)

    def _keep(self) -> bool:
        """Have the present state written, and wait for it; return whether there is a place for it."""
        kept = [each for each in self._hooks if isinstance(each, Checkpoint)]
        for each in kept:
            each.save(self._trainer)
            each.on_fit_end(self._trainer)
        return bool(kept)

    def leave(self) -> None:
        """Keep what there is and end the process, as all ranks do at this place.

        Raises:
            SystemExit: with `preemption.EXIT_CODE`.
        """
        kept = self._keep()
        if self._world.is_root:
            what = "a checkpoint is written: start again to go on" if kept else "nothing is kept without checkpoint_dir"
            step, epoch = self.position.step, self.position.epoch
            last = ", the last" if epoch == self._trainer.epochs else ""
            place = f"after step {step} of epoch {epoch + 1}" if step else f"after epoch {epoch}{last}"
            sys.stderr.write(f"hvdtrain: stopped on request {place}; {what} (exit status {preemption.EXIT_CODE})\n")
        # mpirun ends those that are still at work when the first one exits: a log may take a while to close.
        self._hooks.close()
        self._world.barrier()
        sys.exit(preemption.EXIT_CODE)

    def _data(self, source: Source) -> Iterator[Batch]:
        """Return the epoch's batches; of an epoch that is gone on with, drawn from what it was drawn from."""
        held, self._held = self._held, {}
        if self.position.step:
            self._take_on({name.removeprefix("begin."): a for name, a in held.items() if name.startswith("begin.")})
        now = rank_state.random_states() | self._adapter.rank_state
        self._random_at_begin = {name: array for name, array in now.items() if name.startswith("random.")}
        batches = source.epoch(self.position.epoch, shuffle=True, after=self.position.consumed)
        if self.position.step:
            self._take_on(held)
            batches = self._rest(source, batches, held)
        return batches

    def _rest(self, source: Source, batches: Iterator[Batch], held: rank_state.Arrays) -> Iterator[Batch]:
        """Return an epoch's last batches; where its steps are all taken, let a batch tell what its metrics are."""
        first = next(batches, None)
        if first is not None:
            return chain([first], batches)
        shown = source.example(self.position.epoch)
        if shown is not None:
            self._adapter.eval_step(replace(shown, local_count=0, global_count=0))
        self._take_on(held)
        return iter(())

    def _set_learning_rate(self, step: int) -> None:
        # Where an epoch's length is unknown there is no ramp, and any step but the first is past it.
        steps_per_epoch = self._trainer.steps_per_epoch
        done = self.position.epoch * (steps_per_epoch or 1) + step + self._ahead
        rates = self._lr.at(done, steps_per_epoch=steps_per_epoch)
        if rates is not None:
            self._adapter.learning_rates = rates

    def _results(self) -> dict[str, float]:
        times = np.zeros(self._world.size)  # a place for each rank: the sum of the metrics brings them along

        def reduce(vector: NDArray[np.float64]) -> NDArray[np.float64]:
            times[self._world.rank] = time.perf_counter() - self._began  # here the device is done with the epoch
            total = self._world.allreduce(np.concatenate([vector, times]), name="metrics")
            times[:] = total[len(vector) :]
            return total[: len(vector)]

        logs = self._adapter.metrics(reduce)
        seconds = float(times.max())
        self._adapter.settle()
        self._earlier_samples += self.position.consumed.samples
        return logs | {"samples_per_s": self.position.consumed.samples / seconds, "seconds": seconds}


def _groups(batches: Iterator[Batch], count: int) -> Iterator[list[Batch]]:
    while group := list(islice(batches, count)):
        yield group
