"""The identity, the progress and the limits of a run, and its history."""

from __future__ import annotations

import itertools
import os
import socket
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hvdtrain.callbacks.base import RunId
from hvdtrain.callbacks.run_folder import default_name
from hvdtrain.data.assignment import Assignment
from hvdtrain.data.sources import NOTHING, Consumed, Source
from hvdtrain.distributed.world import World
from hvdtrain.errors import CheckpointError
from hvdtrain.system.settings import RUN_ID, RUN_NAME

_runs_here = itertools.count(1)  # of a job that has an id


class History(dict[str, list[float]]):
    """A metric's name -> one float per epoch, equal on every rank.

    Besides the metrics it holds "learning_rate", the first parameter group's after the epoch's last step,
    "samples_per_s", over all ranks, and "seconds", the slowest rank's training time without validation. If steps or
    seconds end the run within an epoch, the last entry is that of the part. A longer run that resumes replaces it.

    Attributes:
        validations: {"global_step": ..., "val_loss": ...} of each validation within an epoch (`validate_every`).
        cutoffs: {step: batches by rank}: how many batches each rank has contributed to each optimizer step that closed
            before all ranks were done. Steps are counted over the run, from 0. `Trainer(cutoff=history.cutoffs)`
            repeats the run.
    """

    def __init__(
        self,
        epochs: Mapping[str, list[float]] | None = None,
        validations: Iterable[Mapping[str, float]] = (),
        cutoffs: Mapping[Any, Sequence[int]] | None = None,
    ) -> None:
        super().__init__(epochs or {})
        self.validations = [dict(each) for each in validations]
        self.cutoffs = {int(step): list(counts) for step, counts in (cutoffs or {}).items()}  # JSON has no int keys

    @property
    def seconds(self) -> float:
        """The training time of the epochs, equal on all ranks."""
        return sum(self.get("seconds", ()))

    def validated_after(self, global_step: int) -> dict[str, float]:
        """Return the metrics of the validation within an epoch after this step, if it is the last one."""
        last = self.validations[-1] if self.validations else {}
        if last.get("global_step") != global_step:
            return {}
        return {name: value for name, value in last.items() if name != "global_step"}

    def add(self, logs: dict[str, float]) -> None:
        """Append one epoch."""
        for name, value in logs.items():
            self.setdefault(name, []).append(float(value))


@dataclass(frozen=True)
class Budget:
    """The limits of a run; None is no limit, and the first one that is reached ends the run."""

    epochs: int | None = None
    steps: int | None = None  # optimizer steps
    seconds: float | None = None  # of training, without validation

    def is_spent(self, progress: RunProgress, *, seconds: float) -> bool:
        """Return whether a run that has come so far, in so many seconds, takes no further step."""
        done = ((progress.epoch, self.epochs), (progress.global_step, self.steps), (seconds, self.seconds))
        return any(limit is not None and reached >= limit for reached, limit in done)

    def describe(self) -> str:
        """Return the limits in words, and what a run that has reached one can do."""
        given = ", ".join(f"{name}={value}" for name, value in asdict(self).items() if value is not None)
        return f' with {given}: a larger number continues, fit(resume="never") starts from the beginning'


@dataclass
class RunProgress:
    """The place that a run has come to."""

    epoch: int = 0  # epochs done, and so the number of the current one
    step: int = 0  # optimizer steps done of the current epoch, with any number of ranks
    global_step: int = 0  # optimizer steps done in all
    consumed: Consumed = NOTHING  # what has been read of the epoch's data
    seconds: float = 0.0  # training time of the epoch, up to the checkpoint that the run resumed from

    def advance(self, consumed: Consumed) -> None:
        """Count a step, after which so much of the epoch is done."""
        self.step += 1
        self.global_step += 1
        self.consumed = consumed

    def end_epoch(self) -> None:
        """Count an epoch."""
        self.epoch, self.step, self.consumed, self.seconds = self.epoch + 1, 0, NOTHING, 0.0

    def describe(self) -> str:
        """Return how far the run has come, in words."""
        place = f"step {self.step} of epoch {self.epoch + 1}" if self.step else f"epoch {self.epoch}"
        return f"after {place} ({self.global_step} steps in all)"

    def has_read(self, source: Source) -> bool:
        """Return whether all of the epoch's data is read; False if its length is not known."""
        samples = source.facts.get("number of samples")
        if samples is not None:
            return self.consumed.samples >= int(samples)
        return source.steps is not None and self.consumed.batches >= source.steps * self.consumed.size

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RunProgress:
        """Return what `asdict` was called on, a later version's too, which may have more fields."""
        known = {name: value[name] for name in ("epoch", "step", "global_step", "seconds")}
        consumed = {name: value["consumed"][name] for name in ("samples", "batches", "size")}
        assignment = value["consumed"].get("assignment")
        return cls(**known, consumed=Consumed(**consumed, assignment=assignment and Assignment.from_json(assignment)))


def steps_done(consumed: Consumed, facts: dict[str, Any], *, size: int, accumulate: int) -> int:
    """Return how many of this run's optimizer steps have read `consumed`, perhaps in other batches by other ranks."""
    batch_size = facts.get("batch_size")
    batches = consumed.batches if batch_size is None else -(-consumed.samples // batch_size)
    return -(-batches // (size * accumulate))


def check_data(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise CheckpointError if an epoch would resume with other data (`Source.facts`) than it began with."""
    for name in before:
        if name not in ("batch_size", "steps") and before[name] != now.get(name):
            raise CheckpointError(
                f"The checkpoint's epoch began with other data: {name} was {before[name]!r}. Received: "
                f"{now.get(name)!r}. Samples would be seen twice or never: give the same data and seed, or resume from "
                "a checkpoint of an epoch's end."
            )


def agree_on_run(world: World) -> tuple[list[str], RunId]:
    """Return each rank's host, and a new run's id; a collective call.

    A resumed run has the id in its checkpoint. All starts of one `hvdtrain run` are one run, also without a checkpoint.
    """
    job = os.environ.get(RUN_ID)
    own = RunId(
        id=f"{job}-{next(_runs_here)}" if job else uuid.uuid4().hex,
        name=os.environ.get(RUN_NAME) or default_name(),
        resumed=bool(job),
    )
    everyones = world.allgather_object([socket.gethostname(), asdict(own)], name="hosts")
    return [str(host) for host, _ in everyones], RunId(**everyones[0][1])
