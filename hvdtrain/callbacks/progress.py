"""One line an epoch, from rank 0."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hvdtrain.callbacks.base import Callback, Logs

if TYPE_CHECKING:
    from hvdtrain.trainer import Trainer

# What History keeps besides metrics, with how to print it.
_UNITS = {"samples_per_s": "{:,.0f} samples/s", "seconds": "{:.1f} s"}


class ProgressLine(Callback):
    """Print "epoch 1/3  loss 0.4012  accuracy 0.8811  ... 12,345 samples/s  1.2 s" on rank 0 after each epoch."""

    def on_epoch_end(self, trainer: Trainer, epoch: int, logs: Logs) -> None:
        """Print the epoch's metrics, then its speed over all ranks."""
        if not trainer.world.is_root:
            return
        metrics = [f"{name} {value:.4f}" for name, value in logs.items() if name not in _UNITS]
        speed = [template.format(logs[name]) for name, template in _UNITS.items() if name in logs]
        # One write: launchers prefix what they read, and print() would send the line's end separately.
        sys.stdout.write(f"epoch {epoch + 1}/{trainer.epochs}  " + "  ".join(metrics + speed) + "\n")
        sys.stdout.flush()
