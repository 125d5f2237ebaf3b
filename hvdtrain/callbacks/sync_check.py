"""Prove that ranks stay in sync: compare what they hold, every so many steps."""

from __future__ import annotations

import logging
import math
import socket
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hvdtrain.adapter import State
from hvdtrain.callbacks.base import Callback, RunContext
from hvdtrain.distributed import agreement, checksums
from hvdtrain.distributed.data_ranks import PartRanks
from hvdtrain.distributed.world import World
from hvdtrain.errors import DesyncError

log = logging.getLogger("hvdtrain")

# Share of the time of the steps between two checks. The docs promise 0.5 %: after a check, caches are cold and ranks
# are not aligned, which costs up to a quarter of the check itself (measured, 2 ranks on 2 cores).
BUDGET = 0.004
FIRST_STEPS = 10  # between the first check and the second, to measure step times after warm-up
_RECENT = 64  # step times that count
_CHECKS = 9  # checks whose cost counts
_NAMED = 8  # ranks that a message names
SETTINGS = "the optimizer's settings"  # the name of State.meta among the tensors

_ADVICE = (
    "Weights that differ make every later step wrong. Faulty memory does this, and so does code that treats the model "
    "differently on one rank: a callback, a layer with its own state, a weight set by hand; in Keras a train_step that "
    "calls an optimizer that is no attribute of the model."
)
_AGAIN = (
    "Start the run again from a checkpoint written while ranks were equal: with checkpoint_dir it resumes from the "
    "newest, which is rank 0's. If a host is named again, exclude it."
)


class SyncCheck(Callback):
    """Compare weights and optimizer state over ranks after the first step, every so many steps, and at the end of fit.

    A difference of one bit is found. Ranks exchange digests (see `hvdtrain.distributed.checksums`), 56 bytes a check;
    the check's cost is reading the state once, array by array. PyTorch's tensors on a GPU are summed up there, and one
    part in 256 of them is copied to the host; other frameworks' are copied. What each rank changes on its own within
    an epoch, such as BatchNorm's running statistics, is compared at the end of fit only. With a strategy such as
    `LocalSGD`, a check follows the synchronization after it is due. The Trainer adds a SyncCheck to callbacks without
    one.

    Args:
        every: steps between checks. "auto" measures, and chooses so that checks cost at most 0.5 % of the time of the
            steps between them; 0 switches all checks off, also the last one.
        on_divergence: "stop" raises DesyncError on every rank; "repair" gives every rank the root's state, logs a
            warning and continues.

    Raises:
        ValueError: another value.
        DesyncError: in `fit`, on every rank: names the first tensor that differs and the ranks. Under "repair" too
            where most ranks agree and rank 0 is not among them.
    """

    def __init__(
        self, every: int | Literal["auto"] = "auto", *, on_divergence: Literal["stop", "repair"] = "stop"
    ) -> None:
        if every != "auto" and (isinstance(every, bool) or not isinstance(every, int) or every < 0):
            raise ValueError(f'every must be "auto" or an int >= 0. Received: every={every!r}')
        if on_divergence not in ("stop", "repair"):
            raise ValueError(f'on_divergence must be "stop" or "repair". Received: on_divergence={on_divergence!r}')
        self._every: int | Literal["auto"] = every
        self._on_divergence = on_divergence
        self._begin()

    def _begin(self) -> None:
        self._epoch = 0
        self._steps = 0  # of this fit
        self._next = 0  # the step after which the next check is due; 0 for never
        self._equal = "when fit began"
        self._announced = 0
        self._step_times: deque[float] = deque(maxlen=_RECENT)
        self._costs: deque[int] = deque(maxlen=_CHECKS)  # ns, agreed by all ranks
        self._exchange = 0  # ns that this rank's last exchange took
        self._step = 0  # ns, agreed by all ranks
        self._since = 0.0

    def on_fit_begin(self, trainer: RunContext) -> None:
        """Reset, and require equal options on all ranks."""
        self._begin()
        options = {"every": self._every, "on_divergence": self._on_divergence}
        agreement.require_equal(options, world=trainer.world, what="SyncCheck's options")
        if self._every and trainer.world.size > 1:
            self._next = 1

    def on_epoch_begin(self, trainer: RunContext, epoch: int) -> None:
        """Begin the first step here: the time between epochs is part of no step."""
        self._epoch = epoch
        self._since = time.perf_counter()

    def on_step_end(self, trainer: RunContext, step: int) -> None:
        """Check if it is time."""
        if not self._next:
            return
        self._steps += 1
        self._step_times.append(time.perf_counter() - self._since)
        if self._steps >= self._next and trainer.in_sync:
            self.check(trainer, f"after step {step + 1} of epoch {self._epoch + 1}", settled=False)
            self._next = self._steps + self._interval(trainer)
        self._since = time.perf_counter()

    def on_fit_end(self, trainer: RunContext) -> None:
        """Check everything, running statistics included."""
        if self._next:
            self.check(trainer, "at the end of fit", settled=True)

    def check(self, trainer: RunContext, when: str, *, settled: bool) -> None:
        """Compare now; a collective call.

        Args:
            trainer: whose state.
            when: the moment, for messages.
            settled: whether running statistics are equal on all ranks at this moment, as between epochs.

        Raises:
            DesyncError: see the class.
        """
        begin = time.perf_counter_ns()
        mine = digests(trainer.state(copy=False), settled=settled)
        hashed = time.perf_counter_ns()
        # Negative if the minimum over ranks is needed: the rank that enters an exchange last does not wait in it.
        step = int(1e9 * statistics.median(self._step_times)) if self._step_times else 0
        same, (cost, exchange, step) = equal(
            mine, world=trainer.world, figures=[hashed - begin, -self._exchange, -step]
        )
        # The first exchange is not representative: ranks enter it as far apart as their first steps end.
        self._exchange = time.perf_counter_ns() - hashed if self._costs else 0
        self._costs.append(cost - exchange)
        self._step = -step
        if not same:
            self._diverged(trainer, *difference(mine, world=trainer.world), when, settled=settled)
        self._equal = when

    def _diverged(self, trainer: RunContext, what: str, root_is_odd: bool, when: str, *, settled: bool) -> None:
        facts = f"Ranks no longer hold the same weights and optimizer state: {what}. Found {when}; equal {self._equal}."
        if self._on_divergence == "stop":
            other = 'SyncCheck(on_divergence="repair") continues with rank 0\'s instead of stopping.'
            raise DesyncError(f"{facts} {_ADVICE} {_AGAIN} {other}")
        if root_is_odd:
            why = "Most ranks agree and rank 0 is not among them: a repair, which spreads rank 0's, would do damage."
            raise DesyncError(f"{facts} {_ADVICE} {why} {_AGAIN}")
        trainer.repair()
        mine = digests(trainer.state(copy=False), settled=settled)
        if not equal(mine, world=trainer.world)[0]:
            left, _ = difference(mine, world=trainer.world)
            raise DesyncError(f"{facts} All ranks were given rank 0's, and still {left}.")
        if trainer.world.is_root:
            log.warning("%s %s All ranks continue with rank 0's.", facts, _ADVICE)

    def _interval(self, trainer: RunContext) -> int:
        """Return the steps until the next check: equal on all ranks, because the inputs are."""
        if self._every != "auto":
            every = self._every
        elif len(self._costs) == 1:
            return FIRST_STEPS
        else:
            # Without the oldest: the first check includes one-time costs.
            every = interval(cost=statistics.median_high(list(self._costs)[1:]), step=self._step)
            if len(self._costs) == 2:
                return every  # measured without an exchange: good enough to use, not to log
        # On busy machines, costs vary. Log the interval once, and again when it has more than doubled.
        if trainer.world.is_root and every > 2 * self._announced:
            log.info(
                "weights and optimizer state compared over ranks every %s", f"{every} steps" if every > 1 else "step"
            )
            self._announced = every
        return every


def interval(*, cost: float, step: float) -> int:
    """Return the fewest steps whose time a check's cost is at most the budget of, both in the same unit."""
    return max(1, math.ceil(cost / (BUDGET * step))) if step > 0 else FIRST_STEPS


def digests(state: State, *, settled: bool) -> dict[str, bytes]:
    """Return digests of tensors and settings, by name; those in `State.per_rank` only if settled."""
    compared = (name for name in [*state.arrays, *state.part] if settled or name not in state.per_rank)
    return {name: state.digest(name) for name in compared} | {SETTINGS: checksums.of_json(state.meta)}


def equal(mine: Mapping[str, bytes], *, world: World, figures: Sequence[int] = ()) -> tuple[bool, list[int]]:
    """Return whether all ranks' digests are equal, and each figure's maximum over ranks, by one small allreduce.

    The maximum of a value and the maximum of its complement are complements only if all ranks gave the same value.
    """
    ours = np.frombuffer(checksums.combined(mine), np.int64)
    if world.part_set is not None:
        return _equal_parts(ours, world, figures)
    largest = world.allreduce(np.concatenate([ours, ~ours, np.array(figures, np.int64)]), "max", name="sync")
    return bool((largest[:2] == ~largest[2:4]).all()), [int(each) for each in largest[4:]]


def _equal_parts(ours: NDArray[np.int64], world: World, figures: Sequence[int]) -> tuple[bool, list[int]]:
    """Do so where a Grid divides the model: the ranks of each part have equal digests."""
    largest = PartRanks(world).allreduce(np.concatenate([ours, ~ours]), "max", name="sync.part")
    differ = bool((largest[:2] != ~largest[2:]).any())
    differ, *found = world.allreduce(np.array([differ, *figures], np.int64), "max", name="sync").tolist()
    return not differ, found


def difference(mine: Mapping[str, bytes], *, world: World) -> tuple[str, bool]:
    """Return `describe` of all ranks; a collective call, for when `equal` has returned False."""
    part = None if world.grid is None else world.grid.part
    report = {"host": socket.gethostname(), "digests": {name: each.hex() for name, each in mine.items()}, "part": part}
    reports = [{**each, "rank": rank} for rank, each in enumerate(world.allgather_object(report, name="desync"))]
    parts = [[each for each in reports if each["part"] == part] for part in dict.fromkeys(r["part"] for r in reports)]
    return describe(next((each for each in parts if _differ(each)), reports))


def _differ(reports: Sequence[Mapping[str, Any]]) -> bool:
    return any(each["digests"] != reports[0]["digests"] for each in reports)


def describe(reports: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """Say which tensor differs first, and where; and whether rank 0 is in a minority, with this or a later tensor."""
    size = len(reports)
    hosts = [f"{report.get('rank', index)} ({report['host']})" for index, report in enumerate(reports)]
    names = dict.fromkeys(name for report in reports for name in report["digests"])
    groups = {name: _groups([report["digests"].get(name) for report in reports]) for name in names}
    differing = {name: each for name, each in groups.items() if len(each) > 1}
    if not differing:
        raise ValueError(f"the digests of {size} ranks do not differ")
    tensor, first = next(iter(differing.items()))
    minority = _minority(first, size)
    missing = [rank for rank, report in enumerate(reports) if tensor not in report["digests"]]
    if missing:
        how = f"is missing on {_ranks(missing, hosts)}"
    elif minority:
        how = f"on {_ranks(minority, hosts)} differs from that of the other {size - len(minority)} ranks"
    else:
        how = "differs between " + " and ".join(_ranks(group, hosts) for group in first[:_NAMED])
    count = f"{len(differing)} of {len(groups)} tensors {'differs' if len(differing) == 1 else 'differ'}"
    return f"{tensor} {how} ({count})", any(0 in _minority(each, size) for each in differing.values())


def _groups(values: Sequence[Any]) -> list[list[int]]:
    """Return the ranks that hold the same value together; the largest group first, rank 0's first among equals."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return sorted(ranks.values(), key=lambda group: -len(group))


def _minority(groups: Sequence[Sequence[int]], size: int) -> list[int]:
    """Return the ranks outside the largest group, if more than half of all ranks are in that group."""
    return sorted(rank for group in groups[1:] for rank in group) if 2 * len(groups[0]) > size else []


def _ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    named = ", ".join(hosts[rank] for rank in ranks[:_NAMED])
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {named}{more}"
