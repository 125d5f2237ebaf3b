"""The exchange of steps that close before every rank is done: threads average what ranks have contributed until then.

A rank that is stalled, in its data or in a batch, cannot send what it has. So a thread of each rank does: the threads
of all ranks exchange which ranks are done, and when a step closes, they average what their ranks have contributed. When
the stall ends, the rank applies the means of the steps that it has missed, one after the other, without computing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from hvdtrain.adapter import OpenStep, Options
from hvdtrain.distributed import watchdog
from hvdtrain.distributed.data_ranks import DataRanks
from hvdtrain.distributed.recorder import recorder
from hvdtrain.distributed.world import World
from hvdtrain.errors import HvdTrainError
from hvdtrain.torch.ops import engine
from hvdtrain.torch.ops.compression import Compressor
from hvdtrain.torch.ops.finite import all_finite, first_non_finite
from hvdtrain.torch.ops.submit import Reduction, submit
from hvdtrain.torch.reduction.gradient_exchange import GradientExchange
from hvdtrain.torch.reduction.weighted_mean import WeightedMean

# When a rank is so many steps behind, the others wait for it: for each of them it holds a gradient in memory.
_MOST_BEHIND = 8
# Closing as soon as enough ranks are done would cut off ranks that are almost done, in every step.
_GRACE_BATCHES = 0.25
# Between two exchanges of which ranks are done, which take time of the cores that compute. None is needed before half
# of a usual step; after that a step closes late by about 1 % of its time.
_QUIET_PART, _MOST_QUIET_S = 0.5, 1.0
_LEAST_PAUSE_S, _MOST_PAUSE_S, _PAUSES_PER_STEP = 0.001, 0.02, 50
_ROUNDING = 1e-9  # 1/3 + 1/3 + 1/3 may be less than 1
_END_S = 2.0  # at most, for the threads of other ranks to learn that this rank has failed


@dataclass
class _Contribution:
    """The contribution of this rank to the open step."""

    gradients: dict[Parameter, Tensor] = field(default_factory=dict)  # sums over batches
    weight: float = 0.0  # the sum of `Counted.weight` over batches
    samples: int = 0
    batches: int = 0


@dataclass
class _Open:
    """The step that this rank computes: what its thread must know of it."""

    planned: int = 0  # this rank's batches
    working: int = 1  # ranks that have batches
    needed: int = 1  # how many of these close the step
    expected: float | None = None  # the sum of weights for which losses are scaled; None for losses that are sums


class Mean(NamedTuple):
    """The mean of what all ranks have contributed to a step; all but `fault` is equal on all ranks."""

    counts: NDArray[np.int64]  # batches by rank: shape (size,)
    weight: float  # the sum over ranks
    samples: int  # over all ranks
    gradients: dict[Parameter, Tensor]  # without the parameters that have no gradient on any rank
    fault: Parameter | None  # the first parameter whose gradient on this rank is not finite


class CutExchange(threading.Thread):
    """Closes steps and averages what ranks have contributed, one step after the other, on all ranks alike."""

    def __init__(self, names: Mapping[Parameter, str], compressor: Compressor, options: Options, world: World) -> None:
        super().__init__(name="hvdtrain-open-steps", daemon=True)
        self._parameters, self._ranks = list(names), DataRanks(world)
        self._names, self._compressor, self._checks = names, compressor, options.nan_policy is not None
        self._changed = threading.Condition()
        self._opened = self._closed = 0  # steps
        self._open = _Open()
        self._own = _Contribution()
        self._opened_at, self._batch_s, self._step_s = 0.0, 0.0, 0.0  # this rank's last times
        self._means: deque[Mean] = deque()  # of closed steps that the main thread has not taken, the oldest first
        self._stops = self._fails = False
        self._waits = False  # whether the main thread waits for a mean
        self._news = False  # whether other ranks must learn something at once
        self._error: BaseException | None = None
        self._generation = engine.generation

    # The main thread

    def open(self, step: OpenStep, *, expected: float | None) -> None:
        """Begin to contribute to the next step; it may be closed already."""
        working = int(np.count_nonzero(step.planned))
        with self._changed:
            self._opened += 1
            self._open = _Open(int(step.planned[self._ranks.rank]), working, step.needed, expected)
            self._opened_at = time.monotonic()

    def check(self, parameters: Sequence[Parameter]) -> None:
        """Raise HvdTrainError if the optimizer has other parameters than when the fit began: they would stay alone."""
        if list(map(id, parameters)) != list(map(id, self._parameters)):
            raise HvdTrainError(
                "With cutoff, an optimizer's parameters stay the same during a fit. Received: "
                f"{len(parameters)} parameters on rank {self._ranks.world.rank}, {len(self._parameters)} when it "
                "began. Add them before fit."
            )

    @property
    def is_open(self) -> bool:
        """True if this rank can contribute to its step."""
        return self._closed < self._opened and self._error is None

    def contribute(self, weight: float, samples: int) -> bool:
        """Add the parameters' gradients, which are dense, of one more batch; False if the step has closed meanwhile."""
        with self._changed:
            if not self.is_open:
                return False
            own = self._own
            for parameter in self._parameters:
                if parameter.grad is not None:
                    self._add(parameter, parameter.grad.detach())
            own.weight, own.samples, own.batches = own.weight + weight, own.samples + samples, own.batches + 1
            if own.batches == self._open.planned:
                took_s = time.monotonic() - self._opened_at
                # The smallest, roughly: a batch that stalled is no sign of how long others take.
                self._batch_s = min(took_s / own.batches, 1.1 * self._batch_s or took_s)
                self._news = True
                self._changed.notify_all()
            return True

    def _add(self, parameter: Parameter, gradient: Tensor) -> None:
        if parameter in self._own.gradients:
            self._own.gradients[parameter].add_(gradient)
        else:
            self._own.gradients[parameter] = gradient
        parameter.grad = None

    def wait(self) -> Mean:
        """Wait for the mean of the oldest step that was not taken yet; raise the error that has ended the thread."""
        with recorder.waiting(), self._changed:
            self._waits = True
            self._changed.wait_for(lambda: self._means or self._error is not None)
            if not self._means:
                assert self._error is not None
                raise self._error
            self._changed.notify_all()
            self._waits = False
            return self._means.popleft()

    def _waited_for(self) -> int | None:
        """Return the step for which the main thread waits; None if it does not."""
        return self._opened if self._waits else None

    def end(self) -> None:
        """End the thread after the last step. A collective, unless `fail` was called or the thread has failed."""
        if self._generation != engine.generation:
            return  # Horovod was shut down, which ends the thread
        with self._changed:
            self._stops = self._news = self._waits = True
            self._changed.notify_all()
        self.join()
        if self._error is not None and not self._fails:
            raise self._error

    def fail(self) -> None:
        """Let the threads of all ranks end with an error, because this rank takes no further step. Do not wait."""
        with self._changed:
            self._fails = self._news = True
            self._changed.notify_all()
        self.join(_END_S)

    # The thread

    def run(self) -> None:
        """Close steps and average, until all ranks stop or one fails."""
        thread = threading.get_ident()
        watchdog.note_step(thread, self._waited_for)
        try:
            with torch.no_grad():
                while self._close_next():
                    mean = self._average()
                    with self._changed:
                        self._means.append(mean)
                        self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - raised where the main thread waits
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            watchdog.forget_step(thread)

    def _close_next(self) -> bool:
        """Wait until the next step closes; False where all ranks stop."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._means) < _MOST_BEHIND or self._stops or self._fails)
            began, enough_at = time.monotonic(), None
            self._changed.wait_for(lambda: self._news, min(_QUIET_PART * self._step_s, _MOST_QUIET_S))
        while True:
            with self._changed:
                mine = self._flags(enough_at)
                self._news = False
            if self._generation != engine.generation:
                raise engine.module().HorovodInternalError("Horovod has been shut down.")
            done, everyone, grace_is_over, failed, stops = self._sum(mine, "cutoff.done")
            if failed:
                raise engine.module().HorovodInternalError("Another rank's training has ended with an error.")
            if stops > self._ranks.size - 0.5:
                return False
            if done > 1 - _ROUNDING and enough_at is None:
                enough_at = time.monotonic()
            if everyone > 1 - _ROUNDING or (enough_at is not None and grace_is_over):
                took_s = time.monotonic() - began
                self._step_s = min(took_s, 1.1 * self._step_s or took_s)  # as for batches: a stall is no usual step
                return True
            with self._changed:
                pause_s = min(max(self._step_s / _PAUSES_PER_STEP, _LEAST_PAUSE_S), _MOST_PAUSE_S)
                self._changed.wait_for(lambda: self._news, pause_s)

    def _flags(self, enough_at: float | None) -> list[float]:
        """Return this rank's five numbers for the step that is to be closed; the threads add them up over ranks.

        A rank that is behind does not know how many ranks are needed. So a rank that is done sends 1 / needed, and
        1 / working: the sums are 1 when enough ranks are done, and when all ranks with batches are.
        """
        computes = self._opened == self._closed + 1
        is_done = computes and self._open.planned > 0 and self._own.batches == self._open.planned
        over = enough_at is not None and time.monotonic() - enough_at >= _GRACE_BATCHES * self._batch_s
        done = 1.0 if is_done else 0.0
        return [done / self._open.needed, done / self._open.working, is_done and over, self._fails, self._stops]

    def _average(self) -> Mean:
        """Close the step, and average over ranks what they have contributed."""
        with self._changed:
            own, self._own = self._own, _Contribution()
            expected = self._open.expected if self._opened > self._closed else 1.0
            self._closed += 1
        size, rank = self._ranks.size, self._ranks.rank
        counts = [float(own.batches * (rank == each)) for each in range(size)]
        mean = WeightedMean([float(p in own.gradients) for p in self._parameters], own.weight, expected)
        samples, *counts = self._sum([own.samples, *counts, *mean.numbers], "cutoff.numbers")
        mean.receive(counts[size:])
        fault = None
        if self._checks and not all_finite([*own.gradients.values()]):
            fault = first_non_finite(own.gradients.items())
        sent = [p for p, present in zip(self._parameters, mean.flags, strict=True) if present and mean.weight]
        gradients = [own.gradients[p] if p in own.gradients else torch.zeros_like(p).detach() for p in sent]
        if gradients:
            # Before they are added up: a half-precision sum of what is to be divided could overflow.
            torch._foreach_mul_(gradients, mean.correction(rounding=0.0) / size)
            named = [self._names[parameter] for parameter in sent]
            exchange = GradientExchange(gradients, self._sums, name="cutoff", compressor=self._compressor, names=named)
            gradients = exchange.wait()
            self._compressor.commit()  # on all ranks here, since one that is behind steps later
        batches = np.array(counts[:size]).round().astype(np.int64)
        return Mean(batches, mean.weight or 0.0, round(samples), dict(zip(sent, gradients, strict=True)), fault)

    def _sum(self, numbers: Sequence[float], name: str) -> list[float]:
        """Add up numbers over ranks; Horovod waits without Python's lock."""
        mine = torch.tensor([float(each) for each in numbers], dtype=torch.float64, device="cpu")
        total: list[float] = submit([mine], self._sums, name, in_place=True, counted=False).wait()[0].tolist()
        return total

    @property
    def _sums(self) -> Reduction:
        return Reduction(engine.Sum, process_set=engine.global_set(self._ranks.process_set))
