"""Show on rank 0 how training runs: a live display in a terminal, lines anywhere else."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdtrain.callbacks.base import Callback, Logs, RunContext
from hvdtrain.distributed import launch_environment
from hvdtrain.telemetry.interval import COMPARED_S, PARTS, Interval, RankTimes, lower_median

if TYPE_CHECKING:
    from rich.live import Live

log = logging.getLogger("hvdtrain")

VARIABLE = "HVDTRAIN_PROGRESS"
STYLES = ("auto", "live", "lines", "epochs", "off")

# Entries of History besides metrics, with their formats.
_UNITS = {"samples_per_s": "{:,.0f} samples/s", "seconds": "{:.1f} s", "learning_rate": "lr {:.3g}"}


class Progress(Callback):
    """Show epoch, step, loss, metrics, samples a second over all ranks, learning rate and the time that is left.

    Only rank 0 prints, and each line in one piece, so that a launcher's prefixes do not garble it.

    Args:
        style: "live" for a display that is redrawn, "lines" for a line every so often and one per epoch, "epochs" for
            the latter alone, "off"; "auto" is live where standard output is a terminal and no launcher has started
            this rank, and lines elsewhere. The environment variable HVDTRAIN_PROGRESS wins over "auto".
        every_s: seconds between two lines within an epoch.

    Raises:
        ValueError: another style, or every_s is below 0.
    """

    def __init__(self, style: str = "auto", *, every_s: float = 10.0) -> None:
        source = "style"
        if style == "auto" and os.environ.get(VARIABLE):
            style, source = os.environ[VARIABLE], VARIABLE
        if style not in STYLES:
            raise ValueError(f"{source} must be one of {', '.join(STYLES)}. Received: {source}={style!r}")
        if not every_s >= 0:
            raise ValueError(f"every_s must be >= 0. Received: every_s={every_s!r}")
        self._style, self._every_s = style, every_s
        self._live: Live | None = None
        self._lines = False
        self._printed = self._began = 0.0
        self._intervals = self._steps = self._said = 0
        self._rows: Any = 0.0  # times of all steps, by part and rank

    def on_fit_begin(self, trainer: RunContext) -> None:
        """Open the display, and show the decisions about the batch and the learning rate."""
        self._began = self._printed = time.monotonic()
        self._intervals, self._said, self._lines = 0, 0, False
        # Read once: each access to `config` reads the optimizer's settings, too.
        self._last_step: int | None = trainer.config.get("steps")
        if sys.stdout is None:  # the parent process has closed it
            self._style = "off"
        if not trainer.world.is_root or self._style in ("off", "epochs"):
            return
        # Under mpirun each rank has its own terminal, and mpirun prefixes the output.
        if self._style == "live" or (
            self._style == "auto" and sys.stdout.isatty() and launch_environment.detect() is None
        ):
            from rich.live import Live

            self._live = Live(transient=True)
            self._live.start()
        else:
            self._lines = True
        self._write_decisions(trainer)

    def on_epoch_begin(self, trainer: RunContext, epoch: int) -> None:
        """Reset the display's bar: an epoch may end before its first interval."""
        if self._live is not None:
            _draw(self._live, _place(trainer, epoch), 0, trainer.steps_per_epoch)

    def on_interval(self, trainer: RunContext, interval: Interval) -> None:
        """Show the speed and the metrics of the latest steps."""
        if self._intervals < 2:  # the first one, which compiles and connects, counts only until there is another
            self._steps, self._rows = 0, 0.0
        self._intervals += 1
        self._steps += interval.steps
        self._rows = self._rows + np.stack(list(vars(interval.times).values())) * interval.steps
        if not trainer.world.is_root:
            return
        self._write_decisions(trainer)
        place, steps = _place(trainer, interval.epoch), trainer.steps_per_epoch
        words = [*_metrics(interval.metrics), _UNITS["samples_per_s"].format(interval.samples_per_s)]
        words.append(_UNITS["learning_rate"].format(interval.learning_rate))
        left = ""
        limits = [(trainer.epochs - interval.epoch) * steps - interval.step] if trainer.epochs and steps else []
        if self._last_step:
            limits.append(self._last_step - interval.global_step)
        if limits:
            steps_left = max(0, min(limits))  # with a cutoff, an epoch may have more steps
            left = f"{_clock(steps_left * interval.seconds / interval.steps)} left"
        if self._live is not None:
            _draw(self._live, place, interval.step, steps, left=left, words="  ".join(words))
        elif self._lines and time.monotonic() - self._printed >= self._every_s:
            self._printed = time.monotonic()
            step = f"step {interval.step}/{steps}" if steps else f"step {interval.step}"
            self._write("  ".join([place, step, *words, *[left] * bool(left)]))

    def on_validation_end(self, trainer: RunContext, logs: Logs) -> None:
        """Print the metrics of a validation within an epoch."""
        if trainer.in_epoch and trainer.world.is_root and self._style != "off":
            step = f"step {trainer.step}" + (f"/{trainer.steps_per_epoch}" if trainer.steps_per_epoch else "")
            self._write("  ".join([_place(trainer, trainer.epoch), step, *_metrics(logs)]))

    def on_epoch_end(self, trainer: RunContext, epoch: int, logs: Logs) -> None:
        """Print the epoch's metrics, then its speed over all ranks."""
        if not trainer.world.is_root or self._style == "off":
            return
        self._write_decisions(trainer)
        speed = [template.format(logs[name]) for name, template in _UNITS.items() if name in logs]
        self._write("  ".join([_place(trainer, epoch), *_metrics(logs), *speed]))
        self._printed = time.monotonic()

    def on_fit_end(self, trainer: RunContext) -> None:
        """Close the display, and print the parts of the time."""
        self.close()
        if trainer.world.is_root and self._style not in ("off", "epochs") and self._intervals:
            times = RankTimes(*(self._rows / self._steps))
            seconds, measured_s = time.monotonic() - self._began, self._steps * float(times.step.max())
            self._write(_summary(trainer, times, seconds, measured_s=measured_s))
        if trainer.world.is_root:
            self._write_decisions(trainer)

    def close(self) -> None:
        """Close the display."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _write_decisions(self, trainer: RunContext) -> None:
        """Print new decisions, unless the log has shown them."""
        new, self._said = trainer.decisions[self._said :], len(trainer.decisions)
        if self._style not in ("off", "epochs") and not log.isEnabledFor(logging.INFO):  # Python's default
            for line in new:
                self._write(line)

    def _write(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(line, highlight=False, markup=False, soft_wrap=True)
            return
        try:
            # One write: launchers prefix what they read, and print() would send the line's end separately.
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
        except (OSError, ValueError) as problem:  # no reader is left, or the disk is full: training continues
            self._style, self._lines = "off", False
            log.warning("progress is shown no more: %s", problem)


def _summary(trainer: RunContext, times: RankTimes, seconds: float, *, measured_s: float) -> str:
    """Return one line: the time of a step, and its parts on the slowest rank."""
    slowest, size = int(times.own.argmax()), trainer.world.size
    step = float(times.step[slowest])
    parts = {part: float(getattr(times, part)[slowest]) for part in PARTS if size > 1 or part != "reduction"}
    waits = {"waiting elsewhere": float(times.elsewhere[slowest])} if size > 1 else {}
    percents = _percents({**parts, **waits})
    shares = ", ".join(f"{part} {percent} %" for part, percent in percents.items() if percent or part in parts)
    line = f"trained for {_clock(seconds)}: a step {1000 * step:,.1f} ms, {shares}"
    if size > 1:
        above = 100 * (times.own[slowest] / max(lower_median(times.own), 1e-9) - 1)
        compared = f", the slowest: {above:.0f} % above the median" if measured_s >= COMPARED_S else ""
        line += f" (rank {slowest} on host {trainer.hosts[slowest]}{compared})"
    return line


def _percents(parts: dict[str, float]) -> dict[str, int]:
    """Return the parts' shares in whole percents that add up to 100."""
    total = sum(parts.values()) or 1.0
    exact = {part: 100 * value / total for part, value in parts.items()}
    rounded = {part: int(share) for part, share in exact.items()}
    by_rest = sorted(exact, key=lambda part: rounded[part] - exact[part])
    for part in by_rest[: 100 - sum(rounded.values())]:
        rounded[part] += 1
    return rounded


def _draw(live: Live, place: str, step: int, steps: int | None, *, left: str = "", words: str = "") -> None:
    """Redraw two lines at the bottom of the terminal: a bar, and the latest steps. 80 columns hold no more."""
    from rich import console, progress_bar, table, text

    bar = table.Table.grid(padding=(0, 1))
    bar.add_row(place, progress_bar.ProgressBar(steps, step, width=40), f"{step}/{steps or '?'}", left)
    live.update(console.Group(bar, text.Text(words, no_wrap=True, overflow="ellipsis")))


def _place(trainer: RunContext, epoch: int) -> str:
    return f"epoch {epoch + 1}/{trainer.epochs}" if trainer.epochs else f"epoch {epoch + 1}"


def _metrics(logs: dict[str, float]) -> list[str]:
    return [f"{name} {value:.4f}" for name, value in logs.items() if name not in _UNITS]


def _clock(seconds: float) -> str:
    """Return "7 s", "3:07" or "2:03:07"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
