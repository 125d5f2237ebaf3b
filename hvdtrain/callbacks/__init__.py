"""Callbacks for the Trainer, framework-neutral, one concern a file."""

from hvdtrain.callbacks.base import Callback as Callback
from hvdtrain.callbacks.checkpoint import Checkpoint as Checkpoint
from hvdtrain.callbacks.early_stopping import EarlyStopping as EarlyStopping
from hvdtrain.callbacks.progress import ProgressLine as ProgressLine
from hvdtrain.callbacks.schedule import Schedule as Schedule
from hvdtrain.callbacks.sync_check import SyncCheck as SyncCheck

__all__ = ["Callback", "Checkpoint", "EarlyStopping", "ProgressLine", "Schedule", "SyncCheck"]
