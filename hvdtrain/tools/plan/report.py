"""Shows a forecast: a table and plain words for people, one JSON object for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table

from hvdtrain.system.quantities import format_size, format_time, three_digits
from hvdtrain.tools.plan.compressions import CompressionForecast, compressions
from hvdtrain.tools.plan.model import Cluster, Forecast, Step, marginal_efficiency, pays_up_to, require
from hvdtrain.tools.plan.strategies import (
    ENOUGH,
    StrategyForecast,
    strategies,
    waits_most,
    wanted,
    wanted_by_link,
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The options, and the forecast for each number of ranks, in rising order from one rank."""

    step: Step
    cluster: Cluster
    forecasts: Sequence[Forecast]
    run_samples: int  # samples of the whole run, whose time and cost are shown
    price: float | None = None  # of one rank for one hour, in any currency; None shows rank-hours in its place
    worth: float = 0.5  # the share of a lone rank's work that an added rank must bring
    moments: int = 2  # numbers that the optimizer keeps for a weight

    def __post_init__(self) -> None:
        require("the samples of the run", self.run_samples, "above 0 and finite")
        require("what an added rank must be worth", self.worth, "above 0 and at most 1")
        if self.price is not None:
            require("the price of a rank for an hour", self.price, "0 or above, and finite")

    def cost(self, forecast: Forecast) -> float:
        """Return the run's cost, or its rank-hours where no price was given."""
        return forecast.rank_hours(self.run_samples) * (1.0 if self.price is None else self.price)

    def gains(self) -> list[float | None]:
        """Return for each forecast what a rank added since the one before it brings; None for the first."""
        return [None, *(marginal_efficiency(fewer, more) for fewer, more in pairwise(self.forecasts))]

    @property
    def stop(self) -> Forecast:
        """The forecast at which adding ranks stops paying."""
        return pays_up_to(self.forecasts, worth=self.worth)

    def strategies(self) -> list[StrategyForecast]:
        """Return the forecast of each strategy on the largest number of ranks; nothing for one rank."""
        ranks = self.forecasts[-1].ranks
        return strategies(self.step, self.cluster, ranks, moments=self.moments) if ranks > 1 else []

    def compressions(self) -> list[CompressionForecast]:
        """Return the forecast of each compression on the largest number of ranks; nothing for one host."""
        forecast = self.forecasts[-1]
        return compressions(self.step, self.cluster, forecast.ranks) if forecast.hosts > 1 else []


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as one JSON object: the options, the table's rows, and where adding ranks stops paying."""
    fields = ("ranks", "hosts", "sync_s", "exposed_s", "waiting_s", "step_s", "efficiency", "samples_per_s")
    rows = [
        {
            **{name: getattr(f, name) for name in fields},
            "added_rank_brings": gain,
            "run_s": f.run_s(plan.run_samples),
            "rank_hours": f.rank_hours(plan.run_samples),
            "cost": None if plan.price is None else plan.cost(f),
        }
        for f, gain in zip(plan.forecasts, plan.gains(), strict=True)
    ]
    return {
        "step": dataclasses.asdict(plan.step),
        "cluster": dataclasses.asdict(plan.cluster),
        "run_samples": plan.run_samples,
        "price_per_rank_hour": plan.price,
        "worth": plan.worth,
        "pays_up_to_ranks": plan.stop.ranks,
        "forecast": rows,
        "moments": plan.moments,
        "strategies": [dataclasses.asdict(each) for each in plan.strategies()],
        "compressions": [dataclasses.asdict(each) for each in plan.compressions()],
        "wants": wanted(plan.strategies()).name if plan.strategies() else None,
    }


def show(plan: Plan, console: Console) -> None:
    """Print the table, the meaning of its columns, and the number of ranks at which adding ranks stops paying."""
    console.print(_table(plan))
    console.print(_meaning(plan))
    console.print(_verdict(plan))
    if found := plan.strategies():
        console.print(_strategies(found, plan))
        console.print(_advice(found, plan))
    if schemes := plan.compressions():
        console.print(_compressions(schemes, plan))
        console.print(_COSTS)


def _choices(what: str, plan: Plan, last: str) -> Table:
    """Return a table of the Trainer's choices, without rows; `last` heads its last column."""
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left", title_style="")
    table.title = f"\n{what}, on {plan.forecasts[-1].ranks} ranks:\n"
    table.add_column("Trainer(...)", no_wrap=True)
    for heading in ("sent a step", "step", last):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _strategies(found: Sequence[StrategyForecast], plan: Plan) -> Table:
    table = _choices("Strategies of synchronization", plan, "efficiency")
    best = wanted(found)
    for each in found:
        cells = (each.name, format_size(each.sent_bytes), format_time(each.step_s), _percent(each.efficiency))
        table.add_row(*cells, style="bold" if each is best else None)
    return table


_COSTS = (
    "\nCompressing is counted with the time of one core of a CPU; GPUs are not measured. Matrices are taken to have "
    "1024 rows and columns."
)


def _compressions(found: Sequence[CompressionForecast], plan: Plan) -> Table:
    table = _choices("Gradients in fewer bytes", plan, "pays below")
    for each in found:
        link = "never" if each.pays_below is None else f"{three_digits(each.pays_below * 8 / 1e9)} Gb/s"
        table.add_row(each.name, format_size(each.sent_bytes), format_time(each.step_s), link)
    return table


def _advice(found: Sequence[StrategyForecast], plan: Plan) -> str:
    best, ranks, plain = wanted(found), plan.forecasts[-1].ranks, found[0]
    if waits_most(found):
        waiting, link = (_percent(seconds / plain.step_s) for seconds in (plain.waiting_s, plain.link_s))
        text = (
            f"On {ranks} ranks most of the loss is waiting for the slowest rank, {waiting} of a step; the link takes "
            f'{link}. More even batches and hosts, fit(balance="speed") or cutoff= come before a strategy'
        )
        if (then := wanted_by_link(found)) is not plain:
            text += f"; after them, the link wants {then.name}"
    elif best is plain:
        text = (
            f"On {ranks} ranks this link needs no strategy: gradients in every step reach {_percent(best.efficiency)}"
        )
    elif best.link_efficiency >= ENOUGH:
        waits = ", without the waits for slow ranks" if best.waiting_s else ""
        text = (
            f"On {ranks} ranks this link wants {best.name}: what stands above it changes less in what is learned, and "
            f"does not reach {ENOUGH:.0%}{waits}"
        )
    else:
        text = f"On {ranks} ranks nothing reaches {ENOUGH:.0%}. {best.name} comes closest; a larger `every` sends less"
    kept = {0: "weights alone", 1: "weights and momentum, twice the gradients' bytes"}
    sent = kept.get(
        plan.moments, f"weights and the optimizer's averages, {1 + plan.moments} times the gradients' bytes"
    )
    sent += f" (--moments {plan.moments}); fragments send weights alone."
    sent += " With compression, averages are sent as bfloat16." if plan.moments else ""
    return f"\n{text}. LocalSGD and DiLoCo send {sent}"


def _table(plan: Plan) -> Table:
    stop, waits = plan.stop.ranks, plan.step.spread_s > 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    times = ("T_sync", "exposed", *(["waiting"] if waits else []), "step")
    cost = "rank-\nhours" if plan.price is None else "cost"
    for heading in ("ranks", *times, "efficiency", "added\nrank", "samples/s", "time", cost):
        table.add_column(heading, justify="right", no_wrap=True)
    for f, gain in zip(plan.forecasts, plan.gains(), strict=True):
        seconds = (f.sync_s, f.exposed_s, *([f.waiting_s] if waits else []), f.step_s)
        table.add_row(
            f"{f.ranks}",
            *map(format_time, seconds),
            _percent(f.efficiency),
            "" if gain is None else _percent(gain),
            three_digits(f.samples_per_s),
            format_time(f.run_s(plan.run_samples)),
            three_digits(plan.cost(f)),
            style="bold" if f.ranks == stop else None,
        )
    return table


def _percent(share: float) -> str:
    return f"{share:.1%}" if 0 < share < 0.1 else f"{share:.0%}"


def _meaning(plan: Plan) -> str:
    step, link = plan.step, plan.cluster.link_bytes_per_s
    between = "" if link is None else f" ({format_size(link)}/s between hosts)"
    waiting = " + waiting for the slowest rank" if step.spread_s else ""
    price = "rank-hours" if plan.price is None else "cost"
    return (
        f"\nT_comp: {format_time(step.compute_s)} for the {step.samples} samples of a rank. "
        "It stays: R ranks take R times the samples in a step.\n"
        f"T_sync: all allreduces of a step, {format_size(step.gradient_bytes)}{between}.\n"
        f"Overlap: they run beside backward ({step.backward_share:.0%} of T_comp) as gradients become ready; "
        "what is left of them when backward ends is exposed.\n"
        f"Step: T_comp + exposed{waiting}. Efficiency: T_comp / step. Added rank: what each rank more than in the "
        f"line above brings, of a lone rank's work. Time and {price}: of {plan.run_samples:,} samples."
    )


def _verdict(plan: Plan) -> str:
    stop, last = plan.stop, plan.forecasts[-1]
    rule = f"an added rank must bring {plan.worth:.0%} of a lone rank's work"
    cost = f" A sample costs {1 / stop.efficiency:.2f} times what it costs on one rank there."
    if stop is last:
        where = f"Adding ranks pays as far as this forecast goes, {stop.ranks} ranks ({rule}).{cost}"
    elif stop.ranks == 1:
        where = f"Adding ranks does not pay here ({rule}; on no number of ranks does one)."
    else:
        where = f"Adding ranks stops paying after {stop.ranks} ranks ({rule}; beyond, none does).{cost}"
    return f"\n{where} {_reason(last if stop.ranks == 1 else stop)}".rstrip()


def _reason(forecast: Forecast) -> str:
    """Say what takes most of the lost time, and what would win it back."""
    if forecast.efficiency > 0.95:
        return ""
    ranks = f"On {forecast.ranks} ranks"
    if forecast.waiting_s > forecast.exposed_s:
        return f"{ranks} most of the loss is waiting for the slowest rank: more even batches and hosts would help."
    if forecast.bandwidth_s > forecast.sync_s / 2:
        cause, cure = "bandwidth", "a faster link, bf16 compression"
    else:
        cause, cure = "latency", "fewer and larger buckets, a tree or hierarchical allreduce"
    return f"{ranks} most of T_sync is {cause}: {cure}, a larger batch a rank or accumulation would help."
