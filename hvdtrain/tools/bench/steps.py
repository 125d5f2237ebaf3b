"""Step times of all ranks, put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.telemetry.step_times import MARK, MIN_STEPS, WARMUP_STEPS, RankReport, StepSummary
from hvdtrain.tools.bench.launch import BenchError, LaunchOutcome
from hvdtrain.tools.bench.sweep import Fit, moved_bytes

_QUARTILES_TO_SIGMA = 1.349  # between the quartiles of a normal distribution, in standard deviations


@dataclass(frozen=True)
class RankSteps:
    """What is known of one rank's steps."""

    rank: int
    summary: StepSummary
    facts: Mapping[str, Any]

    @property
    def own_s(self) -> float:
        """What a step takes this rank by itself: all but the wait for the others."""
        return self.summary.compute_s + self.summary.data_s


@dataclass(frozen=True)
class Steps:
    """The steps of a run, rank by rank."""

    ranks: Sequence[RankSteps]

    @property
    def slowest(self) -> RankSteps:
        """The rank for which the others wait: the one that takes longest by itself.

        All ranks' steps take equally long, since each reduction waits for the last; the one that waits least is the
        slowest, and only its wait is communication alone.
        """
        return max(self.ranks, key=lambda rank: rank.own_s)

    @property
    def fastest(self) -> RankSteps:
        """The rank that takes least by itself."""
        return min(self.ranks, key=lambda rank: rank.own_s)

    def plan_input(self, fit: Fit | None) -> dict[str, Any]:
        """Return what `hvdtrain plan --measured` reads, of the slowest rank; what was not measured is left out.

        The sweep's `fit` counts on one host only: ranks on several say nothing of a host's own speed.
        """
        summary, facts, size = self.slowest.summary, self.slowest.facts, len(self.ranks)
        own_s, spread_s = self.slowest.own_s, (summary.own_s.high - summary.own_s.low) / _QUARTILES_TO_SIGMA
        found: dict[str, Any] = {"step_s": own_s, "spread_s": spread_s, "ranks": size}
        found |= {key: facts[key] for key in ("gradient_bytes", "samples_per_step", "framework") if key in facts}
        if summary.backward_s is not None and own_s > 0:
            found["backward_share"] = summary.backward_s / own_s
        if fit is not None and len({each.facts.get("host") for each in self.ranks}) == 1:
            found["overhead_s"] = fit.alpha_s
            if fit.beta_s_per_byte > 0:
                found["intra_bytes_per_s"] = moved_bytes(1, size) / fit.beta_s_per_byte
        return found


def collect(found: Sequence[RankReport], *, name: str, ranks: int) -> Steps:
    """Return every rank's steps; BenchError, which names the script, if a rank is missing or took too few."""
    found = sorted(found, key=lambda each: each.rank)
    missing = sorted(set(range(ranks)) - {each.rank for each in found})
    fewest = min(found, key=lambda each: each.steps_taken, default=None)
    if fewest is None:
        why = (
            "ended without using hvdtrain.Trainer, hvdtrain.prepare, hvdtrain.torch or hvdtrain.keras, so no step was "
            "seen. See README.md, Ways in"
        )
    elif missing:
        why = f"ended without a report of rank {', '.join(map(str, missing))} of {ranks}"
    elif fewest.steps_taken == 0:
        seen = "Seen are steps of the Trainer, of torch optimizers and of Keras's fit and train_on_batch"
        why = f"never took a step on rank {fewest.rank}. {seen}"
    elif fewest.summary is None:
        needed = f"At least {WARMUP_STEPS + MIN_STEPS} are needed: the first {WARMUP_STEPS} warm up and are not counted"
        why = f"took {fewest.steps_taken} steps on rank {fewest.rank}. {needed}"
    else:
        return Steps([RankSteps(each.rank, each.summary, each.facts) for each in found if each.summary is not None])
    raise BenchError(f"{name} {why}")


def from_script(outcome: LaunchOutcome, *, name: str, ranks: int, timeout_s: float) -> Steps:
    """Return the steps that a script's ranks reported; BenchError if it failed, did not end, or took none."""
    found = []
    for text in outcome.marked(MARK).values():
        try:
            found.append(RankReport.from_json(text))
        except (ValueError, KeyError, TypeError) as problem:
            raise BenchError(f"a rank's report cannot be read ({problem}): {text[:200]}") from None
    complete = len(found) == ranks and all(each.summary for each in found)
    if outcome.status is None and not complete:
        raise BenchError(
            f"{name} was ended after {timeout_s:g} s (--timeout), before every rank had reported: {len(found)} of "
            f"{ranks}. Measure fewer --steps, or give it longer; {outcome.last_words()}"
        )
    if outcome.status and not (complete and all(each.facts.get("stopped") for each in found)):
        raise BenchError(f"{name} failed, horovodrun's exit status is {outcome.status}; {outcome.last_words()}")
    return collect(found, name=name, ranks=ranks)
