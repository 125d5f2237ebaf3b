"""The forecast of each strategy of synchronization (`Trainer(sync=...)`) on one number of ranks.

With T_comp, T_sync and waiting as in `model`, and X the time of an allreduce of weights and moments:

- in every step: T_comp + exposed + waiting; with fp16 on the wire, half the bytes;
- delayed by a step: max(T_comp, T_sync) + waiting, where an allreduce runs beside the computation;
- every k steps: T_comp + X / k + waiting / sqrt(k), since the sum of k independent times spreads by sqrt(k);
- every k steps with compression: as every k steps, with X of fewer bytes, and the time of compressing;
- every k steps in f fragments, each in flight for o steps: T_comp + f * max(0, X_f - o * T_comp) / k + waiting /
  sqrt(k), X_f being the allreduce of one fragment, which has no moments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvdtrain.tools.plan.compressions import COMPRESSIONS
from hvdtrain.tools.plan.model import Cluster, Step, allreduce, forecast

ENOUGH = 0.9  # of a lone rank's speed
_LOCAL, _DILOCO, _FRAGMENTS, _IN_FLIGHT = 8, 100, 4, 10
_SCHEME = COMPRESSIONS[-1]  # of changes of weights: the scheme that sends least


@dataclass(frozen=True, kw_only=True)
class StrategyForecast:
    """A step with one strategy.

    Attributes:
        name: as one writes it for the Trainer.
        sent_bytes: what a rank sends in a step, on average.
        step_s: seconds from one step to the next, on average.
        waiting_s: the part of it that waits for the slowest rank.
        efficiency: samples per second, as a share of those of as many lone ranks.
    """

    name: str
    sent_bytes: float
    step_s: float
    waiting_s: float
    efficiency: float

    @property
    def link_s(self) -> float:
        """The part of a step that the link takes."""
        return self.step_s * (1 - self.efficiency) - self.waiting_s

    @property
    def link_efficiency(self) -> float:
        """The efficiency if no rank waited for a slow one."""
        return self.efficiency * self.step_s / (self.step_s - self.waiting_s)


def strategies(step: Step, cluster: Cluster, ranks: int, *, moments: int) -> list[StrategyForecast]:
    """Return the forecast of each strategy, those that change least in what is learned first.

    `moments` is how many numbers the optimizer keeps for a weight: 0 for plain SGD, 1 with momentum, 2 for Adam.
    """
    every_step = forecast(step, cluster, ranks)
    halved = forecast(replace(step, gradient_bytes=step.gradient_bytes / 2), cluster, ranks)
    hidden_s = max(step.compute_s, every_step.sync_s)
    delayed_s = cluster.overlap * hidden_s + (1 - cluster.overlap) * (step.compute_s + every_step.sync_s)
    travels = 2 * (ranks - 1) / ranks  # of the bytes; see `model`
    whole = (1 + moments) * step.gradient_bytes

    def found(name: str, size_bytes: float, busy_s: float, waiting_s: float) -> StrategyForecast:
        step_s = busy_s + waiting_s
        return StrategyForecast(
            name=name,
            sent_bytes=travels * size_bytes,
            step_s=step_s,
            waiting_s=waiting_s,
            efficiency=step.compute_s / step_s,
        )

    def alone(name: str, every: int, exchange_s: float, size_bytes: float) -> StrategyForecast:
        busy_s = step.compute_s + exchange_s / every
        return found(name, size_bytes / every, busy_s, every_step.waiting_s / math.sqrt(every))

    def compressed(strategy: str, every: int) -> StrategyForecast:
        size_bytes = (_SCHEME.share(ranks) + moments / 2) * step.gradient_bytes  # averages are sent as bfloat16
        exchange_s = sum(allreduce(cluster, size_bytes, ranks)) + _SCHEME.seconds_per_byte * step.gradient_bytes
        return alone(f"sync={strategy}(every={every}), {_SCHEME.name}", every, exchange_s, size_bytes)

    whole_s = sum(allreduce(cluster, whole, ranks))
    fragment_s = sum(allreduce(cluster, step.gradient_bytes / _FRAGMENTS, ranks))
    left_s = _FRAGMENTS * max(0.0, fragment_s - cluster.overlap * _IN_FLIGHT * step.compute_s)
    streaming = f"sync=DiLoCo(every={_DILOCO}, fragments={_FRAGMENTS}, overlap={_IN_FLIGHT})"
    return [
        found("sync=None", step.gradient_bytes, step.compute_s + every_step.exposed_s, every_step.waiting_s),
        found('compression="fp16"', step.gradient_bytes / 2, step.compute_s + halved.exposed_s, halved.waiting_s),
        found("sync=Delayed()", step.gradient_bytes, delayed_s, every_step.waiting_s),
        alone(f"sync=LocalSGD(every={_LOCAL})", _LOCAL, whole_s, whole),
        alone(f"sync=DiLoCo(every={_DILOCO})", _DILOCO, whole_s, whole),
        alone(streaming, _DILOCO, left_s, step.gradient_bytes),
        compressed("LocalSGD", _LOCAL),
        compressed("DiLoCo", _DILOCO),
    ]


def waits_most(found: Sequence[StrategyForecast]) -> bool:
    """True if gradients in every step lose more to waits for the slowest rank than to the link, and not little."""
    return found[0].efficiency < ENOUGH and found[0].waiting_s > found[0].link_s


def wanted(found: Sequence[StrategyForecast]) -> StrategyForecast:
    """Return the strategy that the largest loss asks for: sync=None if that is waiting for the slowest rank."""
    return found[0] if waits_most(found) else wanted_by_link(found)


def wanted_by_link(found: Sequence[StrategyForecast]) -> StrategyForecast:
    """Return the first of `strategies` with which the link costs little; if there is none, the fastest."""
    enough = (each for each in found if each.link_efficiency >= ENOUGH)
    return next(enough, max(found, key=lambda each: each.efficiency))
