"""Callbacks for the Trainer, framework-neutral, one concern a file."""

from hvdtrain.callbacks.base import Callback as Callback
from hvdtrain.callbacks.early_stopping import EarlyStopping as EarlyStopping
from hvdtrain.callbacks.progress import ProgressLine as ProgressLine

__all__ = ["Callback", "EarlyStopping", "ProgressLine"]
