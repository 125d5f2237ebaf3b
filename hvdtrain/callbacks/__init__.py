"""Callbacks for the Trainer, framework-neutral, one concern a file."""

from hvdtrain.callbacks.base import Callback as Callback
from hvdtrain.callbacks.checkpoint import Checkpoint as Checkpoint
from hvdtrain.callbacks.early_stopping import EarlyStopping as EarlyStopping
from hvdtrain.callbacks.progress import Progress as Progress
from hvdtrain.callbacks.run_folder import RunFolder as RunFolder
from hvdtrain.callbacks.schedule import Schedule as Schedule
from hvdtrain.callbacks.stragglers import Stragglers as Stragglers
from hvdtrain.callbacks.sync_check import SyncCheck as SyncCheck

__all__ = ["Callback", "Checkpoint", "EarlyStopping", "Progress", "RunFolder", "Schedule", "Stragglers", "SyncCheck"]
