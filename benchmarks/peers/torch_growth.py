"""The Trainer on as many samples as it is told: how long fit and an epoch take to begin, and what memory they add."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import suppress
from typing import Any

import torch

import hvdtrain
from benchmarks.turns import peak_kib, report, reset_peak
from hvdtrain.callbacks import Callback

STEPS = 20
FITS = 5


class EnoughError(Exception):
    """The epoch has lasted long enough."""


class Watch(Callback):
    """Notes when an epoch begins, when its first step does, and how long steps take."""

    def __init__(self) -> None:
        self.marks: list[float] = []
        self.fit_start_s: list[float] = []
        self.epoch_start_s: list[float] = []
        self.step_s: list[float] = []

    def on_epoch_begin(self, trainer: Any, epoch: int) -> None:
        self.marks.append(time.perf_counter())
        self.fit_start_s.append(self.marks[1] - self.marks[0])

    def on_step_begin(self, trainer: Any, step: int) -> None:
        if step == 0:
            self.epoch_start_s.append(time.perf_counter() - self.marks[1])

    def on_step_end(self, trainer: Any, step: int) -> None:
        self.marks.append(time.perf_counter())
        if step == STEPS:
            self.step_s += [later - earlier for earlier, later in zip(self.marks[2:], self.marks[3:], strict=False)]
            raise EnoughError


def main() -> None:
    world = hvdtrain.init("torch")
    samples = int(os.environ["BENCH_SAMPLES"])
    # One row that all samples share: what memory grows is the Trainer's.
    inputs, targets = torch.zeros(1, 9).expand(samples, 9), torch.zeros(1, 1).expand(samples, 1)
    model = torch.nn.Linear(9, 1)
    trainer = hvdtrain.Trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), loss=torch.nn.MSELoss())
    reset_peak()
    before_kib = peak_kib()
    watch = Watch()
    for _ in range(FITS):
        watch.marks = [time.perf_counter()]
        with suppress(EnoughError):
            trainer.fit((inputs, targets), batch_size=8, callbacks=[watch], progress=False)
    report(
        world.rank,
        {
            "peak_mib": (peak_kib() - before_kib) / 1024,
            "fit_start_ms": 1000 * statistics.median(watch.fit_start_s),
            "epoch_start_ms": 1000 * statistics.median(watch.epoch_start_s),
            "step_us": 1e6 * statistics.median(watch.step_s),
        },
    )


if __name__ == "__main__":
    main()
